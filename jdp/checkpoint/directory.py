"""A directory of checkpoints, one a step: which are kept, which is best, and how they are written in the background.

Orbax writes. A step counts only once its commit file is there, so a run killed while saving finds the step before.
Opening a directory changes nothing in it: another process may read while a run trains. The first save removes what
killed runs left half-written. `ownership` decides which entries may be deleted or set aside, `lineage` which steps a
run that went back has abandoned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from jdp.base.errors import UserError
from jdp.base.notices import warn
from jdp.base.progress_file import note_progress
from jdp.base.public import public
from jdp.base.user_path import user_path
from jdp.checkpoint.errors import CheckpointError, hush, write_error
from jdp.checkpoint.format import committing, content, stored
from jdp.checkpoint.format.content import Source
from jdp.checkpoint.format.stored import Stored
from jdp.checkpoint.format.trees import Content, check_values, number_of, to_json
from jdp.checkpoint.memory.copies import MemoryCopies, check_every
from jdp.checkpoint.memory.host import RUN_ID
from jdp.checkpoint.mirror import Mirror
from jdp.checkpoint.upkeep import damage, ownership
from jdp.checkpoint.upkeep.lineage import Lineage
from jdp.checkpoint.upkeep.retention import Best, PreserveForeign, policy
from jdp.checkpoint.upkeep.retention import chosen as chosen_step
from jdp.core.types import PyTree

_T = TypeVar("_T")


class Checkpoints:
    """A directory of checkpoints, one a step.

        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> with jdp.Checkpoints("checkpoints", keep=2, best="eval_loss") as checkpoints:
        ...     for _ in range(2):
        ...         state, metrics = train_step(state, batch)
        ...         checkpoints.save(state, {"epoch": 0}, {"eval_loss": metrics["loss"]})  # in the background
        ...     state, record = checkpoints.restore(state, "best")
        >>> checkpoints.steps, record
        ([1, 2], {'epoch': 0})

    A checkpoint is kept while any of `keep`, `keep_every` and `best` keeps it. A run that goes back to an earlier one
    and saves again loses nothing. The later ones are moved to the directory's `abandoned-1` (then `-2`, …), and this is
    reported. Each of these can be restored from like any directory of checkpoints, and is yours to delete.

    Every file has a checksum, which is compared before the file is read. If the newest checkpoint is damaged, the one
    before it is restored. The damaged one is moved to `damaged-STEP`, and this is reported.

    Args:
        directory: created if it does not exist; `~` is expanded. All processes see the same one.
        keep: how many of the newest to keep; None: all. Raise it when you may go back further.
        keep_every: also keep every step that this divides, for good; None: no others. Give it to evaluate or compare
            checkpoints later.
        best: also keep the one that is best by this metric, among those saved with a finite value of it; the newest of
            equals. Give it when the best model is needed, not the last.
        mirror: where committed checkpoints are copied in the background: s3://bucket/run, gs://bucket/run, or another
            storage that fsspec has. If the newest here is older, the mirror's newest is fetched first. None: nowhere.
        keep_in_memory: every how many steps `save_in_memory` copies the state into the hosts' memory (/dev/shm, or
            $JDP_MEMORY_DIR), from which a restart goes on; 0: never. Give it when storage is slow, or saves are rare.
        mode: "min" if less of that metric is better, as of a loss, "max" if more is, as of an accuracy.

    Raises:
        CheckpointError: the directory cannot be created, or is none. It has an entry named by a number that is no
            checkpoint. The metrics of one are damaged. Or there
            is none, and the mirror cannot be read.
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
        check_every(keep_in_memory)
        self._best = Best(best, mode)
        kept = policy(keep, keep_every, self._best)
        self.directory = user_path(directory).absolute()
        self._lineage = Lineage(self.directory)
        self._saving: int | None = None
        self._writer = ThreadPoolExecutor(1, "jdp checkpoint")  # one thread, as Orbax tells each of an error once
        self._writing: Future[bool] | None = None
        self._deleting: list[int] = []
        self._began = self._closed = False
        self._restore_logging = hush()  # threads of Orbax log their errors when they occur; here they are raised
        ownership.make_directory(self.directory)
        damage.set_unreadable_aside(self.directory)
        self._mirror = None if mirror is None else Mirror(mirror, self.directory, kept)
        self._manager = committing.open_manager(
            self.directory,
            stored.item_handlers(),
            PreserveForeign(
                self.directory, self._mark_for_deletion, kept, lambda: self._mirror and self._mirror.sending
            ),
            self._best.score,
        )
        self._memory = MemoryCopies(self.directory, keep_in_memory) if keep_in_memory else None

    @property
    def latest(self) -> int | None:
        """Return the newest step: committed, being written, or in memory when this was opened; None: there is none."""
        in_memory = () if self._memory is None else self._memory.steps
        return max((*self.steps, *in_memory), default=None)

    @property
    def steps(self) -> list[int]:
        """Return all steps, committed by any process or being written by this one, oldest first."""
        committed = set(ownership.committed_steps(self.directory)) - set(self._deleting)
        return sorted(committed if self._saving is None else committed | {self._saving})

    @property
    def best(self) -> int | None:
        """Return the best step by the metric `best`; None if that is None, or no checkpoint has a finite value of it.

        Raises:
            CheckpointError: the last save failed, or the metrics of a checkpoint are damaged.
        """
        if self._best.name is None:
            return None
        self.wait()  # metrics may still be on their way to the disk
        self._reload_if_changed()
        step = self._manager.best_step()
        return step if step is not None and math.isfinite(self._best.score(self._manager.metrics(step))) else None

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

        The arrays are copied before this returns, so the next step may donate them. The state that was saved or
        restored last is not written again. If this step or later ones exist already, they are set aside as the class
        describes.

        Args:
            state: the whole train state; or any tree of arrays, numbers, NNX modules and optimizers, such as
                {"generator": generator, "optimizer": optimizer}.
            record: any small JSON object, which `restore` returns; numbers of NumPy and JAX become Python's.
            metrics: name -> number, measured on this state; if `best` is set it must be among them. None: not measured.
            step: the number of a tree's checkpoint, 0 or more. A train state has its own.

        Raises:
            CheckpointError: this checkpoint cannot be written, or the one before could not; those before it are
                complete. Or the state is abstract, `record` is not JSON, or this directory is closed.
            ValueError: a tree is given without `step`, or a train state with another step than its own. Or the metric
                `best` is not in `metrics`, or a metric is no number.
        """
        if self._closed:
            raise CheckpointError(
                f"{self.directory} was closed, and nothing is saved after that. Save before close(), inside `with`, or "
                "open it again: jdp.Checkpoints(...)."
            )
        check_values(Content.of(state).leaves)  # before the step's number is taken
        numbers = self._best.numbers(metrics or {})
        step = number_of(state, step)
        self.wait()
        if self._lineage.has(step, state):
            return
        if self._memory is not None:
            self._memory.forget_after(step)
        items, are_copies = content.save_arguments(state, record or {})
        self._saving = step
        with self._save_errors():
            self._prepare(step)
            self._writing = self._writer.submit(self._manager.save, step, args=items, metrics=numbers, force=True)
            if not are_copies:
                self._writing.result()  # when Orbax has copied the arrays
        self._lineage.saved(step, state)

    def save_in_memory(self, state: Any, record: Mapping[str, Any] | None = None, *, step: int | None = None) -> bool:
        """Copy `state` into the hosts' memory, at every `keep_in_memory`-th call. Every process calls it.

        A restart restores it in place of an older checkpoint, also on fewer hosts: each part of the state is on two
        hosts, or on all that replicate it. The copy is made before this returns; its checksums are computed in the
        background. If this host's memory is full, that is reported, and the run goes on without copies.

        Args:
            state: the whole train state, or any tree of arrays, as for `save`.
            record: any small JSON object, which `restore` returns.
            step: the number of a tree; of a train state it may be given. A step that `keep_in_memory` does not divide
                is left out. None: calls are counted.

        Returns:
            True if it was copied.

        Copies are read when the run is started again, not by this object.

        Raises:
            ValueError: the directory was opened without `keep_in_memory`.
        """
        if self._memory is None:
            raise UserError(
                "Copies in memory are kept where `keep_in_memory` says how often; given none. Open the directory with "
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
            target: `jdp.abstract_state(...)`, a real state, or a tree like the one that was saved; its values are not
                read. Any strategy, mesh and number of devices.
            step: which one; "best" is the best by the metric, None the newest that is complete.

        Returns:
            The state, with the shardings of `target`, and the record.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit `target`, or it is damaged.
            ValueError: a leaf of `target` has no sharding.
        """
        self.wait()
        existing = ownership.committed_steps(self.directory)
        chosen, (state, record) = self._read(step, lambda source: (content.read_state(source, target), source.record()))
        self._lineage.restored(chosen, existing, state)
        if self._memory is not None and chosen in existing:
            self._memory.restored(chosen)
        return state, record

    def restore_params(
        self,
        target: PyTree,
        step: int | Literal["best"] | None = None,
        *,
        missing: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> PyTree:
        """Read the parameters and the model state only, for inference or a fresh start.

        Args:
            target: a state, real or abstract, with any optimizer; or a tree of parameters that have shardings.
            step: which one; "best" is the best by the metric, None the newest that is complete.
            missing: path patterns (`fnmatch`) of parameters that the checkpoint may lack; they keep the target's
                values.
            ignore: path patterns of parameters in the checkpoint that are left unread; each must match.

        Returns:
            `target` with its parameters and model state, or its leaves, replaced; `jdp.restore_params` has the details.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit `target`, or it is damaged; or a pattern of
                `ignore` matches nothing.
            ValueError: a leaf of `target` has no sharding.
        """
        self.wait()
        return self._read(step, lambda source: content.read_params(source, target, missing=missing, ignore=ignore))[1]

    def wait(self) -> None:
        """Return when everything saved so far is committed.

        Raises:
            CheckpointError: it could not be; raised once.
        """
        if self._closed:
            return
        with self._save_errors():
            writing, self._writing = self._writing, None
            if writing is not None:
                writing.result()
            self._writer.submit(self._manager.wait_until_finished).result()
            if jax.process_index() == 0:
                ownership.unmark(self.directory, self._unfinished)
            if self._saving is not None:
                note_progress(self._saving)
        self._saving, self._deleting = None, []

    def close(self) -> None:
        """Wait for the save in the background, and end Orbax' threads. Existing checkpoints can still be read.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            with suppress(OSError, ValueError):  # Orbax repeats the error of a save that failed
                self._writer.submit(self._manager.close).result()
            self._writer.shutdown()
            self._restore_logging()
            if self._mirror is not None:
                self._mirror.close()
            if self._memory is not None:
                self._memory.close(stored=max(ownership.committed_steps(self.directory), default=-1))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            warn(str(error))  # the exception that is being raised already matters more

    def _read(self, step: int | Literal["best"] | None, read: Callable[[Source], _T]) -> tuple[int, _T]:
        """Read a step, or the newest complete one: damaged ones after it are set aside. Return which it was."""
        if step is None and self._memory is not None:
            found = self._memory.read(max(self.steps, default=-1), read)
            if found is not None:
                return found
        if step is None and self.steps:
            value, chosen, damaged = damage.read_newest(self.directory, read)
            damage.set_aside(self.directory, damaged, chosen)
        else:
            best_step = self.best if step == "best" else None
            folder, fix = chosen_step(self.directory, self.steps, step, self._best, best_step)
            value, chosen = read(Stored(folder, fix)), int(folder.name)
        return chosen, value

    @contextmanager
    def _save_errors(self) -> Generator[None]:
        """Turn an error of the code inside into that of the step being saved."""
        try:
            yield
        except BaseException as error:
            self._began = False
            if isinstance(error, OSError | ValueError) and not isinstance(error, jax.errors.JaxRuntimeError):
                raise self._failure(error) from error
            raise

    def _failure(self, error: BaseException) -> CheckpointError:
        """Remove what there is of the step being saved, and return the error that names it."""
        step = self._saving
        self._lineage.failed(step)
        for each in self._unfinished if jax.process_index() == 0 else ():
            ownership.discard_unfinished(self.directory, each)
        self._saving, self._writing, self._deleting = None, None, []
        self._manager.reload()
        complete = ", ".join(str(other) for other in self.steps if other != step) or "none"
        what = f"Checkpoint {step} was not saved in {self.directory}"
        return write_error(what, error, f" (those saved before are whole: {complete})")

    @property
    def _unfinished(self) -> list[int]:
        """The steps that are being deleted or written."""
        return self._deleting if self._saving is None else [*self._deleting, self._saving]

    def _prepare(self, step: int) -> None:
        """Clear the way for a step, on process 0. Orbax has the others wait, except while steps are set aside.

        Its threads wait long for a folder that cannot be created, and creating the mark first fails at once.
        """
        if jax.process_index() == 0 and not self._began:
            ownership.remove_leftovers(self.directory)
            if self._memory is None:  # what is in memory is of another past than the step that is written now
                (self.directory / RUN_ID).unlink(missing_ok=True)
        self._lineage.set_aside(step)
        if jax.process_index() == 0:
            ownership.mark(self.directory, step)
        self._reload_if_changed()
        self._began = True
        self._lineage.report_skipped(step)

    def _reload_if_changed(self) -> None:
        """Have Orbax read the directory again if another process wrote to it or steps were set aside."""
        if sorted(self._manager.all_steps()) != (steps := ownership.committed_steps(self.directory)):
            for step in steps:
                stored.check_metrics(self.directory / str(step))  # Orbax reads all of them
            self._manager.reload()

    def _mark_for_deletion(self, steps: Sequence[int]) -> None:
        """Mark these steps before any of them is deleted."""
        self._deleting = list(steps)
        for step in steps if jax.process_index() == 0 else ():
            ownership.mark(self.directory, step)
