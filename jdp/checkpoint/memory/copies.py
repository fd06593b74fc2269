"""The copies of a run's state in its hosts' memory: two generations, one of them always complete.

A save waits until the previous generation is committed on every process. Then it copies this process' parts and those
of the neighbouring host into the slot with the older generation. They are hashed in the background. If one process
cannot copy, all stop, because a partial generation is useless. The next start finds generations complete on all hosts.
"""

import math
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jdp.base.formatting import format_bytes
from jdp.base.machine import portions
from jdp.base.notices import note_progress, warn
from jdp.checkpoint.content import Source
from jdp.checkpoint.errors import CheckpointError, DamagedError
from jdp.checkpoint.memory import host
from jdp.checkpoint.memory.host import Index, Key, RunFolder, Slot, packed, unpacked
from jdp.checkpoint.memory.parts import Generation, Layout, layout, received
from jdp.core.cluster.barrier import from_every_process, from_first_process
from jdp.core.sharding.host_memory import is_on_host, to_host

_T = TypeVar("_T")
_AT_ONCE = 2**30
"""Bytes in transit through pinned memory; one part may be larger."""
_PINNED_FOR = ("gpu", "cuda", "tpu")


class MemoryCopies:
    """The copies in memory for the run of a directory of checkpoints. Every process creates one, together."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory, self._every = directory, every
        said = from_every_process("which processes share a host", _together("the hosts' memory", host.token))
        self._hosts = [said.index(each) for each in said]  # for each process the first process of its host
        self._visit = from_first_process("the name of this visit", secrets.token_hex(8))
        self._committing: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, "jdp memory")
        self._planned: tuple[Any, Layout | None] = None, None  # the last arrays' shapes, and their layout
        self._folder: RunFolder | None = None
        self._slots: list[Slot] = []
        self._calls, self._failed = 0, False
        self.restored: float = math.inf  # the step read from storage: the next save abandons later generations
        self._here: dict[Path, Index] = {}  # parts of earlier visits on this host
        if name := from_first_process("the name of the run in memory", host.folder_of(directory)):
            self._here = host.indexes(self._open(name).path)
        self._found = self._survey()

    @property
    def steps(self) -> list[int]:
        """The steps that were complete in memory at the start of the run, without abandoned ones."""
        return [step for step, _ in self._found]

    def due(self, step: int | None) -> bool:
        """Return True if the state at this step, or (None) at this call, is to be copied."""
        self._calls += 1
        return (self._calls if step is None else step) % self._every == 0

    def read(self, stored: int, read: Callable[[Source], _T]) -> tuple[int, _T] | None:
        """Read the newest complete generation; None if `stored`, in storage, is newer. Every process calls this."""
        stored = from_first_process("the newest checkpoint in storage", stored)
        while self._found and max(self._found)[0] >= stored:
            key = max(self._found)
            generation = self._generation(key)
            try:
                value = read(generation)
            except DamagedError as error:
                del self._found[key]
                warn(f"step {key[0]} in the hosts' memory is damaged ({error.problem}) and is skipped")
                continue
            older = f"the newest checkpoint in storage is {stored}" if stored >= 0 else "storage has no checkpoint"
            moved = sum(map(int, from_every_process("what came from other hosts", str(generation.from_others))))
            others = f", {format_bytes(moved)} of it from other hosts" if moved else ""
            warn(f"step {key[0]} is restored from the hosts' memory{others}; {older}")
            return key[0], value
        return None

    def save(self, step: int, arrays: Mapping[str, Any], table: Mapping[str, Any], record: Any) -> bool:
        """Copy a state into memory; its checksums are computed in the background. Every process calls this.

        If a process cannot copy, all stop copying, and False is returned; complete generations stay.
        """
        if self._failed or not self._agreed(self._wait()):
            return False
        arrays = {path: np.asarray(x) if isinstance(x, np.generic) else x for path, x in arrays.items()}
        self.forget_after(step - 1)
        if (folder := self._folder) is None:
            name = host.folder_of(self._directory)
            if jax.process_index() == 0 and not name:
                (self._directory / host.RUN_ID).write_text(secrets.token_hex(8), encoding="ascii")
                name = host.folder_of(self._directory)
            folder = self._open(from_first_process("the name of the run in memory", name))
        # The newest generation of earlier visits stays until this visit has a complete one.
        newest = None if any(slot.step >= 0 for slot in self._slots) else max(self._found, default=None)
        self._here = {file: index for file, index in self._here.items() if index.key == newest}
        self._found = {key: has for key, has in self._found.items() if key == newest}
        for file in folder.path.glob(host.FILES) if self._represents_host else ():
            if file not in self._here and not file.name.startswith(self._visit):
                host.remove(file)
        plan, problem = self._layout(arrays, folder)
        slot, parts = min(self._slots, key=lambda slot: slot.step), list[np.ndarray]()
        try:
            if not problem:
                parts = slot.open([plan.grids[path].part_bytes for path, _, _ in (*plan.own, *plan.kept)])
        except OSError as error:
            problem = _no_room(error)
        if not self._agreed(problem):
            return False
        _copy(plan.own, parts[: len(plan.own)], arrays)
        places = {(path, n): part for (path, n, _), part in zip(plan.kept, parts[len(plan.own) :], strict=True)}
        for path, moved in received(arrays, plan.sent, plan.route):
            mine = [each for each in plan.kept if each[0] == path]
            _copy(mine, [places[each[:2]] for each in mine], {path: moved})
        slot.step = step
        numbers = [number for _, number, _ in (*plan.own, *plan.kept)]
        grids = {path: astuple(grid) for path, grid in plan.grids.items()}
        head = {"key": (step, self._visit), "table": table, "record": record, "grids": grids, "total": plan.total}
        self._committing = self._worker.submit(slot.commit, head, numbers, parts)
        self._committing.add_done_callback(lambda done: done.exception() or note_progress(step))
        return True

    def _wait(self) -> str:
        """Wait until the last copy is committed on this process; return the problem, or ""."""
        committing, self._committing = self._committing, None
        try:
            if committing is not None:
                committing.result()
        except OSError as error:
            return _no_room(error)
        return ""

    def _agreed(self, problem: str) -> bool:
        """Return True if no process has a problem; else all stop copying, which is reported once."""
        problem = next(filter(None, from_every_process("a copy of the state in memory", problem)), "")
        if problem:
            self._failed = True
            warn(f"{problem}. The run goes on without copies in memory: a restart reads a complete copy, or storage")
        return not problem

    def forget_after(self, step: int) -> None:
        """Remove generations after a step, or after an earlier restored step. Every process calls this."""
        last, self.restored = min(step, self.restored), math.inf
        self._found = {key: has for key, has in self._found.items() if key[0] <= last}
        for file in [file for file, index in self._here.items() if index.key[0] > last]:
            del self._here[file]
            host.remove(file)
        for slot in self._slots:
            if slot.step > last:
                self._wait()
                slot.discard()

    def close(self, *, stored: int) -> None:
        """Wait for the last copy, and release the folder; remove it if its step is in storage, `stored`."""
        self._wait()
        self._worker.shutdown()
        newest = max((*self.steps, *(slot.step for slot in self._slots)), default=-1)
        if self._folder is None:
            return
        self._slots, self._here = [], {}  # they map the files
        self._folder.close(remove=newest <= stored)
        if newest > stored:
            older = f"checkpoint {stored}" if stored >= 0 else "no checkpoint"
            warn(
                f"step {newest} stays in {self._folder.path} for the next start, while storage has {older}; remove "
                "that folder if you do not start the run again"
            )

    def _generation(self, key: Key) -> Generation:
        """Return a generation in `found`; a process whose host has none of it gets the entries of its index."""
        own = [index for index in self._here.values() if index.key == key]
        speaker = min(self._found[key])
        text = packed(own[0].head) if jax.process_index() == speaker else ""
        shared = unpacked(from_every_process("the index of a state in memory", text)[speaker])
        parts = {number: part for each in own for number, part in each.parts.items()}
        assert self._folder is not None
        return Generation(shared, parts, self._found[key], self._folder.path)

    def _open(self, name: str) -> RunFolder:
        me = jax.process_index()
        folder = _together("the run's folder in memory", lambda: RunFolder(name, str(self._directory), me))
        self._folder, self._slots = folder, [Slot(folder.path, self._visit, me, number) for number in range(2)]
        return folder

    def _survey(self) -> dict[Key, Mapping[int, set[int]]]:
        """Return the complete generations: key -> process that represents its host -> the parts on that host."""
        here = dict[Key, tuple[int, set[int]]]()
        for index in self._here.values() if self._represents_host else ():
            here.setdefault(index.key, (index.head["total"], set()))[1].update(index.parts)
        own = [[*key, total, sorted(numbers)] for key, (total, numbers) in here.items()]
        found, totals = dict[Key, dict[int, set[int]]](), dict[Key, int]()
        for process, said in enumerate(from_every_process("what is in the hosts' memory", packed(own))):
            for step, visit, total, numbers in unpacked(said):
                found.setdefault((step, visit), {})[process] = {*numbers}
                totals[step, visit] = total
        return {key: has for key, has in sorted(found.items()) if len(set().union(*has.values())) == totals[key]}

    @property
    def _represents_host(self) -> bool:
        return self._hosts[jax.process_index()] == jax.process_index()

    def _layout(self, arrays: Mapping[str, Any], folder: RunFolder) -> tuple[Layout, str]:
        """Return the layout of these arrays, and the problem with it on this host, or ""."""
        key = tuple((path, x.shape, str(x.dtype), getattr(x, "sharding", None)) for path, x in arrays.items())
        planned, plan = self._planned
        if plan is not None and planned == key:
            return plan, ""
        plan = layout(arrays, self._hosts, jax.process_index())
        self._planned = key, plan
        if plan.alone:
            warn(
                f"{plan.alone[0]} and {len(plan.alone) - 1} more arrays are in the memory of one host only, because "
                "they are on other devices than the rest, or hosts have different numbers of devices"
            )
        return plan, folder.problem_with(2 * plan.host_bytes)


def _no_room(error: OSError) -> str:
    return f"the memory of host {socket.gethostname()} has no room for a copy of the state ({error.strerror})"


def _together(what: str, action: Callable[[], _T]) -> _T:
    """Call `action` on every process; all raise its CheckpointError if one does."""
    try:
        value, problem = [action()], ""
    except CheckpointError as error:
        value, problem = [], str(error)
    for each in filter(None, from_every_process(what, problem)):
        raise CheckpointError(each)
    return value[0]


def _copy(wanted: Sequence[tuple[str, int, Any]], onto: Sequence[np.ndarray], arrays: Mapping[str, Any]) -> None:
    """Copy parts of arrays from their devices into memory.

    An accelerator writes to pinned memory first: an H100 was ten times slower into unpinned memory.
    """

    def begun(x: Any, device: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x
        shard = next(shard.data for shard in x.addressable_shards if shard.device == device)
        return to_host(shard) if device.platform in _PINNED_FOR and not is_on_host(shard) else shard

    for group in portions(zip(wanted, onto, strict=True), lambda pair: pair[1].size, _AT_ONCE):
        parts = [begun(arrays[path], device) for (path, _, device), _ in group]
        for part, (_, memory) in zip(parts, group, strict=True):
            memory.view(part.dtype)[...] = np.asarray(part).reshape(-1)
