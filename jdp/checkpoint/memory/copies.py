"""The copies of a run's state in its hosts' memory: two generations, one of them always complete.

Saving, every few steps:

1. Wait until the previous generation is committed on every process. Then it is protected, and older ones are removed.
   If one process cannot copy, all stop copying, because a partial generation is useless.
2. Copy this process' parts, and the parts from the neighbouring host, into its free slot.
3. In the background, hash them and write the index.

The next start finds the generations that are complete over all hosts. Files of a killed visit stay until a new
generation is complete. The end of the run removes the folder.
"""

from __future__ import annotations

import base64
import json
import math
import socket
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.notices import warn
from jdp.base.progress_file import note_progress
from jdp.base.words import is_integer
from jdp.checkpoint.errors import CheckpointError, DamagedError
from jdp.checkpoint.format.content import Source
from jdp.checkpoint.memory import host
from jdp.checkpoint.memory.exchange import Generation, decoded, encoded, received
from jdp.checkpoint.memory.generation import Key, Slot, head, of, slots
from jdp.checkpoint.memory.host import RunFolder
from jdp.checkpoint.memory.layout import Layout, layout
from jdp.core.cluster.barrier import from_every_process, from_first_process
from jdp.core.sharding.host_memory import is_on_host, to_host

_T = TypeVar("_T")
_AT_ONCE = 2**30
"""Bytes in transit through pinned memory, besides one part."""
_PINNED_FOR = ("gpu", "cuda", "tpu")


def check_every(steps: int) -> None:
    """Raise ValueError if `keep_in_memory` is not a number of steps."""
    if not is_integer(steps) or steps < 0:
        raise UserError(f"keep_in_memory is a number of steps, 0 or more; given {steps!r}. 0 keeps no copies.")


class MemoryCopies:
    """The copies in memory for the run of a directory of checkpoints. Every process creates one, together."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory, self._every = directory, every
        said = from_every_process("which processes share a host", _together("the hosts' memory", host.token))
        self._hosts = [said.index(each) for each in said]  # for each process the first process of its host
        self._visit = from_first_process("the name of this visit", host.new_name())
        self._written: Key | None = None
        self._committing: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, "jdp memory")
        self._layouts: dict[Any, Layout] = {}
        self._folder: RunFolder | None = None
        self._slots: list[Slot] = []
        self._calls, self._failed = 0, False
        self._restored = math.inf
        name = from_first_process("the name of the run in memory", host.folder_of(directory))
        if name:
            self._open(name)
        self._here = {} if self._folder is None else slots(self._folder.path)
        self._keys = {file: index.key for file, index in self._here.items()}  # file of an index -> its generation
        self._found = self._survey()
        self._protected: Key | None = max(self._found, default=None)

    @property
    def steps(self) -> list[int]:
        """The steps that were complete in memory at the start of the run, without abandoned ones."""
        return [step for step, _ in self._found]

    def due(self, step: int | None) -> bool:
        """Return True if the state at this step, or (None) at this call, must be copied."""
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
            self._protected = key
            older = f"the newest checkpoint in storage is {stored}" if stored >= 0 else "storage has no checkpoint"
            lost = from_every_process("what came from other hosts", str(generation.from_others))
            moved = sum(map(int, lost))
            others = f", {format_bytes(moved)} of it from other hosts" if moved else ""
            warn(f"step {key[0]} is restored from the hosts' memory{others}; {older}")
            return key[0], value
        return None

    def restored(self, step: int) -> None:
        """Record that a step was read from storage: the next save abandons later generations."""
        self._restored = step

    def save(self, step: int, arrays: Mapping[str, Any], table: Mapping[str, Any], record: Any) -> bool:
        """Copy a state into memory; its checksums are computed in the background. Every process calls this.

        If a process cannot copy, all stop copying, and False is returned; complete generations stay.
        """
        if self._failed:
            return False
        arrays = {path: np.asarray(x) if isinstance(x, np.generic) else x for path, x in arrays.items()}
        self._remove_stale()
        if not self._agreed(self._wait()):
            return False
        if self._written is not None:  # complete now
            self._protected = self._written
        self.forget_after(step - 1)
        if self._folder is None:
            self._open(from_first_process("the name of the run in memory", self._name_run()))
        plan, problem = self._layout(arrays)
        slot = next(
            each for each in self._slots if self._keys.get(each.index) != self._protected or not self._protected
        )
        own, kept = plan.own, plan.kept
        parts, problem = ([], problem) if problem else self._memory(slot, plan)
        if not self._agreed(problem):
            return False
        _copy(own, parts[: len(own)], arrays)
        places = {(path, number): part for (path, number, _), part in zip(kept, parts[len(own) :], strict=True)}
        for path, moved in received(arrays, plan.sent, plan.route):
            mine = [each for each in kept if each[0] == path]
            _copy(mine, [places[each[:2]] for each in mine], {path: moved})
        self._written = self._keys[slot.index] = (step, self._visit)
        if parts:
            common = head(self._written, table, record, plan.grids, plan.total)
            numbers = [number for _, number, _ in (*own, *kept)]
            self._committing = self._worker.submit(slot.commit, common, numbers, parts)
            self._committing.add_done_callback(lambda done: done.exception() or note_progress(step))
        else:
            note_progress(step)
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
        last, self._restored = min(step, self._restored), math.inf
        newer = {key for key in (*self._found, *self._keys.values()) if key[0] > last}
        if not newer:
            return
        self._wait()
        for file, key in list(self._keys.items()):
            if key in newer:
                file.unlink(missing_ok=True)
                del self._keys[file]
        self._found = {key: has for key, has in self._found.items() if key not in newer}
        self._written = None if self._written in newer else self._written
        if self._protected in newer:
            self._protected = max(self._found, default=None)

    def close(self, *, stored: int) -> None:
        """Wait for the last copy, and release the folder; remove it if its step is in storage, `stored`."""
        self._wait()
        self._worker.shutdown()
        newest = max((key for key in (self._written, *self._found) if key is not None), default=(-1, ""))[0]
        if self._folder is None:
            return
        self._folder.close()
        self._slots, self._here = [], {}  # they map the files
        if newest <= stored:
            self._folder.remove()
        else:
            older = f"checkpoint {stored}" if stored >= 0 else "no checkpoint"
            warn(
                f"step {newest} stays in {self._folder.path} for the next start, while storage has {older}; remove "
                "that folder if you do not start the run again"
            )

    def _generation(self, key: Key) -> Generation:
        """Return a generation in `found`."""
        assert self._folder is not None
        own = [index for index in self._here.values() if index.key == key]
        speaker = min(self._found[key])
        text = ""
        if jax.process_index() == speaker:
            first = own[0]
            common = head(key, first.table, first.record, first.grids, first.total)
            text = base64.b85encode(zlib.compress(json.dumps(common).encode())).decode()
        text = from_every_process("the index of a state in memory", text)[speaker]
        index = of({**json.loads(zlib.decompress(base64.b85decode(text))), "parts": []}, Path())
        assert index is not None
        parts = {number: part for each in own for number, part in each.parts.items()}
        return Generation(index, parts, self._found[key], self._folder.path)

    # Location of the copies.

    def _name_run(self) -> str:
        """Return, on process 0, the name of the run's folders in memory; create it if missing."""
        name = host.folder_of(self._directory)
        if jax.process_index() or name:
            return name
        (self._directory / host.RUN_ID).write_text(host.new_name(), encoding="ascii")
        return host.folder_of(self._directory)

    def _open(self, name: str) -> None:
        """Open the run's folder on this host."""
        me = jax.process_index()
        self._folder = _together("the run's folder in memory", lambda: RunFolder(name, str(self._directory), me))
        self._slots = [Slot(self._folder.path, me, number) for number in range(2)]

    def _survey(self) -> dict[Key, Mapping[int, np.ndarray]]:
        """Return the complete generations: key -> process that represents its host -> the parts on that host."""
        me, here = jax.process_index(), dict[Key, tuple[int, set[int]]]()
        for index in self._here.values() if self._hosts[me] == me else ():
            here.setdefault(index.key, (index.total, set()))[1].update(index.parts)
        own = [[key, total, encoded(numbers, total)] for key, (total, numbers) in here.items()]
        found, totals = dict[Key, dict[int, np.ndarray]](), dict[Key, int]()
        for process, said in enumerate(from_every_process("what is in the hosts' memory", json.dumps(own))):
            for (step, visit), total, text in json.loads(said):
                found.setdefault((step, visit), {})[process] = decoded(text, total)
                totals[step, visit] = total
        return {key: has for key, has in sorted(found.items()) if np.any(list(has.values()), axis=0).all()}

    # Saving.

    def _remove_stale(self) -> None:
        """Remove this host's unprotected files, but after a save not those of its own processes."""
        if self._folder is None or self._hosts[jax.process_index()] != jax.process_index():
            return
        kept = {file.with_suffix("") for file, index in self._here.items() if index.key == self._protected}
        own = self._own_numbers if self._written is not None else ()
        for file in self._folder.path.glob("*.[01]"):
            if file not in kept and file.name.partition(".")[0] not in own:
                Slot.remove(file)

    def _layout(self, arrays: Mapping[str, Any]) -> tuple[Layout, str]:
        """Return the layout of these arrays, and the problem with it on this host, or ""."""
        key = tuple((path, x.shape, str(x.dtype), getattr(x, "sharding", None)) for path, x in arrays.items())
        if key in self._layouts:
            return self._layouts[key], ""
        self._layouts = {key: (plan := layout(arrays, self._hosts, jax.process_index()))}
        if plan.alone:
            warn(
                f"{plan.alone[0]} and {len(plan.alone) - 1} more arrays are in the memory of one host only, because "
                "they are on other devices than the rest, or hosts have different numbers of devices"
            )
        assert self._folder is not None
        mine = [file for file in self._folder.path.glob("*.[01]") if file.name.partition(".")[0] in self._own_numbers]
        try:
            self._folder.require(2 * plan.host_bytes, sum(file.stat().st_size for file in mine))
        except CheckpointError as error:
            return plan, str(error).rstrip(".")
        return plan, ""

    @property
    def _own_numbers(self) -> set[str]:
        """The numbers of the processes of this host."""
        mine = self._hosts[jax.process_index()]
        return {str(process) for process, first in enumerate(self._hosts) if first == mine}

    def _memory(self, slot: Slot, plan: Layout) -> tuple[list[np.ndarray], str]:
        """Return memory for this process' parts, and the reason if there is none."""
        try:
            return slot.open([plan.grids[path].part_bytes for path, _, _ in (*plan.own, *plan.kept)]), ""
        except OSError as error:
            return [], _no_room(error)


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
    """Copy parts of arrays from their devices into memory, if there is any.

    An accelerator writes to pinned memory first: an H100 was ten times slower into unpinned memory.
    """
    begun, held = deque[tuple[Any, np.ndarray]](), 0
    for (path, _, device), memory in zip(wanted, onto, strict=False):
        x = arrays[path]
        shards: Any = () if isinstance(x, np.ndarray) else x.addressable_shards
        shard: Any = next((shard.data for shard in shards if shard.device == device), x)
        far = isinstance(shard, jax.Array) and device.platform in _PINNED_FOR and not is_on_host(shard)
        begun.append((to_host(shard) if far else shard, memory))
        held += memory.size
        while held > _AT_ONCE:
            held -= _write(*begun.popleft())
    for part, memory in begun:
        _write(part, memory)


def _write(part: Any, memory: np.ndarray) -> int:
    memory.view(part.dtype)[...] = np.asarray(part).reshape(-1)
    return memory.size
