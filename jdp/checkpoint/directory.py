"""A directory of checkpoints, one for each step: retention, the best checkpoint, and writing in the background.

A save copies the arrays from the devices; Orbax writes them to `.saving-STEP` in the background. Then every process
hashes its files, process 0 writes the description and the checksums, and renames the folder to STEP. So a run killed
while saving finds the previous step. Opening a directory changes nothing, so another process may read during a run.
"""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import jax
import orbax.checkpoint as ocp

from jdp.base.errors import UserError, public
from jdp.base.notices import note_progress, warn
from jdp.base.user_path import user_path
from jdp.base.words import is_integer
from jdp.checkpoint import content, stored, upkeep
from jdp.checkpoint.content import Content, Source, check_values, number_of, to_json
from jdp.checkpoint.errors import HOURS, CheckpointError, hush, on_first_process, write_error
from jdp.checkpoint.memory.copies import MemoryCopies
from jdp.checkpoint.memory.host import RUN_ID
from jdp.checkpoint.mirror import Mirror
from jdp.checkpoint.stored import ARRAYS, DESCRIPTION, Stored
from jdp.checkpoint.upkeep import Retention
from jdp.core.cluster.barrier import from_every_process, from_first_process
from jdp.core.types import PyTree

_T = TypeVar("_T")


class Checkpoints:
    """A directory of checkpoints, one for each step.

        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> with jdp.Checkpoints("checkpoints", keep=2, best="eval_loss") as checkpoints:
        ...     for _ in range(2):
        ...         state, metrics = train_step(state, batch)
        ...         checkpoints.save(state, {"epoch": 0}, {"eval_loss": metrics["loss"]})  # in the background
        ...     state, record = checkpoints.restore(state, "best")
        >>> checkpoints.steps, record
        ([1, 2], {'epoch': 0})

    A checkpoint is kept while any of `keep`, `keep_every` and `best` keeps it. A checkpoint is never replaced: to train
    again from an earlier one, call `go_back`.

    Every file has a checksum, which is compared before the file is read. If the newest checkpoint is damaged, it is
    moved to `damaged-STEP`, this is reported, and the previous one is restored.

    Args:
        directory: created if missing; `~` is expanded. All processes must see the same directory.
        keep: number of newest checkpoints to keep; None: all. Raise it if you may go back further.
        keep_every: also keep every step that this divides, permanently; None: no others. Use it to evaluate or compare
            checkpoints later.
        best: also keep the best checkpoint by this metric, the newest of equals; only finite values count. Use it if
            you need the best model, not the last.
        mirror: destination of copies in the background: s3://bucket/run, gs://bucket/run, or any storage of fsspec. If
            the mirror's newest checkpoint is newer than the local ones, it is fetched first. None: no mirror.
        keep_in_memory: interval in steps at which `save_in_memory` copies the state into the hosts' memory (/dev/shm,
            or $JDP_MEMORY_DIR), for a restart; 0: never. Use it if storage is slow or saves are rare.
        mode: "min" if lower values of the metric are better, as for a loss; "max" if higher, as for an accuracy.

    Raises:
        CheckpointError: the directory cannot be created, is not a directory, or has a numbered entry that is not a
            checkpoint. Or there are no checkpoints, and the mirror cannot be read.
        ValueError: `keep`, `keep_every` or `mode` is out of range.
    """

    @public()
    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_in_memory: int = 0,
        mirror: str | None = None,
    ) -> None:
        if not is_integer(keep_in_memory) or keep_in_memory < 0:
            rule = "keep_in_memory is a number of steps, 0 or more"
            raise UserError(f"{rule}; given {keep_in_memory!r}. 0 keeps no copies.")
        self._retention = Retention(keep, keep_every, best, mode)
        self.directory = user_path(directory).absolute()
        upkeep.make_directory(self.directory)
        self._last: int | None = None  # the last saved or restored step
        self._last_arrays: list[weakref.ref[jax.Array]] = []  # the arrays of that step
        self._reached: int | None = None  # the largest step saved or restored so far
        self._claim: BinaryIO | None = None  # the locked marker file, on process 0 during a save
        self._saving: tuple[int, Future[None]] | None = None  # the step that is being written, and its commit
        self._mirror = None if mirror is None else Mirror(mirror, self.directory, self._retention)
        self._memory = MemoryCopies(self.directory, keep_in_memory) if keep_in_memory else None
        self._background = ThreadPoolExecutor(1, "jdp checkpoint")
        self._restore_logging = hush()  # Orbax' threads log their errors; here they are raised instead
        self._arrays: ocp.AsyncCheckpointer | None = stored.open_writer()  # None: closed

    @property
    def latest(self) -> int | None:
        """Return the newest step: committed, being written, or in memory at opening; None if there is none."""
        in_memory = () if self._memory is None else self._memory.steps
        return max((*self.steps, *in_memory), default=None)

    @property
    def steps(self) -> list[int]:
        """Return all steps, committed by any process or being written by this one, oldest first."""
        saving = self._saving[:1] if self._saving else ()
        return sorted({*upkeep.committed_steps(self.directory), *saving})

    @property
    def best(self) -> int | None:
        """Return the best step by the metric `best`; None without a metric, or if no checkpoint has a finite value.

        Raises:
            CheckpointError: the last save failed.
        """
        self.wait()  # its metrics are written last
        return self._retention.best_step(self._metrics())

    @public()
    def save(
        self,
        state: Any,
        record: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """Save `state` under the number of batches it has consumed, or any tree under `step`, in the background.

        The arrays are copied before this returns, so the next step may donate them. The last saved or restored step is
        not written again; if its arrays have changed, this is reported.

        Args:
            state: the whole train state; or any tree of arrays, numbers, NNX modules and optimizers, such as
                {"generator": generator, "optimizer": optimizer}.
            record: any small JSON object, which `restore` returns; numbers of NumPy and JAX become Python's.
            metrics: name -> number, measured on this state, including the metric `best` if set. None: not measured.
            step: the number of a tree's checkpoint, 0 or more. A train state has its own.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written; earlier ones are complete. Or this
                step or a later one exists, or steps after the restored one: call `go_back`. Or another process saves
                here now, the state is abstract, `record` is not JSON, or this directory is closed.
            ValueError: a tree without `step`, or a train state with another step than its own. Or the metric `best` is
                not in `metrics`, or a metric is not a number.
        """
        if self._arrays is None:
            raise CheckpointError(
                f"{self.directory} is closed, so nothing can be saved. Save before close(), inside `with`, or open it "
                "again: jdp.Checkpoints(...)."
            )
        check_values(state_leaves := Content.of(state).leaves)  # before the step's number is taken
        numbers = self._retention.numbers(metrics or {})
        step = number_of(state, step)
        self.wait()
        state_arrays = _references(state_leaves)
        if step == self._last:
            if [id(array()) for array in state_arrays] != [id(array()) for array in self._last_arrays]:
                warn(
                    f"{self.directory} has checkpoint {step} already, with other arrays, so these are not saved. Save "
                    f"them under a later step, or call go_back({step - 1}) first"
                )
            return
        self._check_newest(step)
        if self._memory is not None:
            self._memory.forget_after(step)
        name = from_first_process("where a checkpoint is saved", str(self.directory))  # hosts may mount it elsewhere
        leaves, table = content.arrays_and_table(state)
        description = {**table, "record": to_json(record or {}, "record"), "metrics": numbers}
        with self._save_errors(step):
            on_first_process(self._begin)
            self._arrays.save(self._staging(step) / ARRAYS, args=ocp.args.PyTreeSave(leaves), force=True)
        self._saving = step, self._background.submit(self._commit, self._arrays, step, description, name)
        self._last, self._reached, self._last_arrays = step, step, state_arrays

    def go_back(self, step: int) -> None:
        """Set aside all checkpoints after `step`, to continue training from there. Every process calls this.

            >>> with jdp.Checkpoints("checkpoints", keep=None) as checkpoints:
            ...     for _ in range(3):
            ...         state, metrics = train_step(state, batch)
            ...         checkpoints.save(state)
            ...     state, record = checkpoints.restore(state, checkpoints.steps[0])
            ...     checkpoints.go_back(checkpoints.steps[0])
            >>> len(checkpoints.steps)
            1

        They are moved to the directory's `abandoned-1` (then `-2`, …), and this is reported. You can restore from these
        folders like from any directory of checkpoints, or delete them. Damaged checkpoints after `step` are moved too,
        and copies in memory are discarded.

        Args:
            step: the last step to keep.

        Raises:
            CheckpointError: the last save failed, or checkpoints cannot be moved.
        """
        self.wait()
        if self._memory is not None:
            self._memory.forget_after(step)
        if self._last is not None and self._last > step:
            self._last = None
        if self._reached is not None:
            self._reached = min(self._reached, step)

        def set_aside() -> None:
            self._leave_memory()
            upkeep.abandon(self.directory, step)

        on_first_process(set_aside)

    def save_in_memory(self, state: Any, record: Mapping[str, Any] | None = None, *, step: int | None = None) -> bool:
        """Copy `state` into the hosts' memory, at every `keep_in_memory`-th call. Every process calls it.

        A restart restores the copy in place of an older checkpoint, also on fewer hosts. Each part of the state is on
        two hosts, or on all hosts that replicate it. The copy is made before this returns; its checksums are computed
        in the background. If this host's memory is full, that is reported, and the run goes on without copies.

        Args:
            state, record: as for `save`.
            step: the number of a tree; optional for a train state. Steps that `keep_in_memory` does not divide are
                skipped. None: count calls.

        Returns:
            True if it was copied.

        Only the next start of the run reads the copies, not this object.

        Raises:
            ValueError: the directory was opened without `keep_in_memory`.
        """
        if self._memory is None:
            raise UserError(
                "Copies in memory need an interval, `keep_in_memory`; given none. Open the directory with "
                "jdp.Checkpoints(directory, keep_in_memory=10)."
            )
        if not self._memory.due(step):
            return False
        check_values(Content.of(state).leaves)
        number = number_of(state, step)
        return self._memory.save(number, *content.arrays_and_table(state), to_json(record or {}, "record"))

    @public()
    def restore(self, target: _T, step: int | Literal["best"] | None = None) -> tuple[_T, dict[str, Any]]:
        """Read a checkpoint onto the shardings of `target`; return the state and the record saved with it.

        Args:
            target: as for `jdp.restore`: of any strategy, mesh and number of devices.
            step: a step; "best" for the best by the metric, None for the newest complete one.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit `target`, or it is damaged.
            ValueError: a leaf of `target` has no sharding.
        """
        chosen, (state, record) = self._read(step, lambda source: (content.read_state(source, target), source.record()))
        is_stored = chosen in upkeep.committed_steps(self.directory)
        self._last, self._last_arrays = chosen if is_stored else None, _references(Content.of(state).leaves)
        self._reached = max(chosen, -1 if self._reached is None else self._reached)
        if self._memory is not None and is_stored:
            self._memory.restored = chosen
        return state, record

    def restore_params(
        self,
        target: PyTree,
        step: int | Literal["best"] | None = None,
        *,
        missing: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> PyTree:
        """Read only the parameters and the model state, for inference or a fresh start: see `jdp.restore_params`.

        Args:
            target, missing, ignore: as for `jdp.restore_params`.
            step: as for `restore`.

        Raises:
            CheckpointError: as `restore` does; or a pattern of `ignore` matches nothing.
            ValueError: a leaf of `target` has no sharding.
        """
        return self._read(step, lambda source: content.read_params(source, target, missing=missing, ignore=ignore))[1]

    def wait(self) -> None:
        """Return when all saves so far are committed.

        Raises:
            CheckpointError: a save failed; raised once.
        """
        if self._saving is None:
            return
        step, commit = self._saving
        with self._save_errors(step):
            commit.result()
        self._saving = None
        note_progress(step)

    def close(self) -> None:
        """Wait for the save in the background, and stop Orbax' threads. Existing checkpoints stay readable.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._arrays is None:
            return
        try:
            self.wait()
        finally:
            writer, self._arrays = self._arrays, None
            self._background.shutdown()
            with suppress(OSError, ValueError):  # Orbax repeats the error of a save that failed
                writer.close()
            self._release()  # not earlier: after a KeyboardInterrupt a save may still be running
            self._restore_logging()
            if self._mirror is not None:
                self._mirror.close()
            if self._memory is not None:
                self._memory.close(stored=max(upkeep.committed_steps(self.directory), default=-1))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            warn(str(error))  # the current exception matters more

    def _read(self, step: int | Literal["best"] | None, read: Callable[[Source], _T]) -> tuple[int, _T]:
        """Read a step, or the newest complete one, and set aside damaged later ones. Return its number and value."""
        self.wait()
        if step is None and self._memory is not None:
            found = self._memory.read(max(self.steps, default=-1), read)
            if found is not None:
                return found
        if step is None and self.steps:
            return upkeep.read_newest(self.directory, read, aside=True)
        best = self.best if step == "best" else None
        folder, fix = self._retention.chosen(self.directory, self.steps, step, best)
        return int(folder.name), read(Stored(folder, fix))

    def _metrics(self) -> dict[int, dict[str, float | None] | None]:
        steps = upkeep.committed_steps(self.directory)  # only `best` needs the metrics
        return {step: stored.read_metrics(self.directory / str(step)) if self._retention.best else {} for step in steps}

    # Writing.

    def _staging(self, step: int) -> Path:
        return self.directory / f"{upkeep.SAVING}{step}"

    def _check_newest(self, step: int) -> None:
        """Raise CheckpointError if this step or a later one exists, or any after the last step that this object saw."""
        seen = step - 1 if self._reached is None else min(step - 1, self._reached)
        there = [other for other in upkeep.committed_steps(self.directory) if other > seen]
        if not there and os.path.lexists(self.directory / str(step)):
            there = [step]
        listed = from_first_process("which checkpoints a save would replace", ", ".join(map(str, there)))
        if listed:
            raise CheckpointError(
                f"A checkpoint is never replaced, and a run saves later steps than it finds; {self.directory} has "
                f"{listed}, and the new step is {step}{f', after {seen}' * (seen < step - 1)}. To train again from "
                f"an earlier state, set these aside: checkpoints.go_back({seen}). For another run choose another "
                "directory."
            )

    def _begin(self) -> None:
        self._claim = self._claim or upkeep.claim(self.directory)
        upkeep.remove_leftovers(self.directory)  # if this fails, `_save_errors` ends the claim
        self._leave_memory()

    def _release(self) -> None:
        if self._claim is not None:
            upkeep.release(self._claim)
            self._claim = None

    def _leave_memory(self) -> None:
        """Discard an earlier run's copies in memory if this run keeps none: its history differs."""
        if self._memory is None:
            (self.directory / RUN_ID).unlink(missing_ok=True)

    def _commit(self, writer: ocp.AsyncCheckpointer, step: int, description: Mapping[str, Any], name: str) -> None:
        """Wait for the arrays, then hash and commit the checkpoint, in the background. `name` is process 0's path."""
        writer.wait_until_finished()
        folder, process = self._staging(step), jax.process_index()
        share, problem = stored.Files(), 0
        try:
            if process == 0:
                stored.write(folder / DESCRIPTION, json.dumps(description).encode())
            share = stored.hash_share(folder, process, jax.process_count())
        except OSError as error:  # all processes raise it, because the others would wait
            problem = error.errno or errno.EIO
        shares = from_every_process(
            f"the checksums of a checkpoint in {name}", json.dumps([share, problem]), seconds=HOURS
        )
        files: stored.Files = {}
        for share, problem in map(json.loads, shares):
            if problem:
                raise OSError(problem, os.strerror(problem))
            files |= share

        def finish() -> None:
            stored.commit(folder, files)
            folder.rename(self.directory / str(step))
            self._release()
            try:
                stored.sync(self.directory)  # before deleting an older checkpoint
                kept = self._retention.kept(metrics := self._metrics())
                # A checkpoint that the mirror is sending waits for a later save.
                for old in metrics.keys() - kept - {self._mirror and self._mirror.sending}:
                    upkeep.delete(self.directory, old)
            except OSError as error:  # the new one is committed, and the next save tries again
                warn(f"{self.directory}: older checkpoints cannot be deleted and stay: {error}")

        on_first_process(finish, f"the commit of a checkpoint in {name}")

    @contextmanager
    def _save_errors(self, step: int) -> Generator[None]:
        """Turn an error of the code inside into a save error of the step, and delete its partial files."""
        try:
            yield
        except Exception as error:
            self._saving = self._last = None
            if self._claim is not None:  # else the folder is another process'
                upkeep.remove(self._staging(step))
                time.sleep(0.1)  # another of Orbax' writes may make the folder again
                upkeep.remove(self._staging(step))
                self._release()
            if not isinstance(error, OSError | ValueError):
                raise
            complete = ", ".join(map(str, upkeep.committed_steps(self.directory))) or "none"
            what = f"Checkpoint {step} was not saved in {self.directory}"
            raise write_error(what, error, f" (earlier checkpoints are whole: {complete})") from error


def _references(leaves: Mapping[str, Any]) -> list[weakref.ref[jax.Array]]:
    return [weakref.ref(leaf) for leaf in leaves.values() if isinstance(leaf, jax.Array)]
