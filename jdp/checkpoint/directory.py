"""A directory of checkpoints, one a step: which are kept, which is best, and how they are written in the background.

Orbax writes. A step counts only once its commit file is there, so a run killed while saving finds the step before.
Opening a directory changes nothing in it: another process may read while a run trains. The first save removes what
killed runs left half-written. `ownership` decides which entries may be deleted or set aside, and which steps a run that
went back has abandoned. For a directory in a bucket `bucket_copies` keeps copies in a folder of this host.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import orbax.checkpoint as ocp

from jdp.base.notices import notice
from jdp.base.progress_file import note_progress
from jdp.base.user_path import address_of, user_path
from jdp.checkpoint.bucket_copies import BucketCopies, named, require_shared
from jdp.checkpoint.errors import CheckpointError, hush, write_error
from jdp.checkpoint.format import committing, content
from jdp.checkpoint.format.trees import Content, check_values, number_of
from jdp.checkpoint.upkeep import damage, ownership
from jdp.checkpoint.upkeep.ownership import Lineage
from jdp.checkpoint.upkeep.retention import PreserveForeign, metric, policy
from jdp.core.cluster.barrier import from_first_process, meet
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
        directory: created if it does not exist; `~` is expanded. All processes see the same one. Or the address of a
            folder in a bucket, such as s3://bucket/run.
        keep: how many of the newest to keep; None: all. Raise it when you may go back further.
        keep_every: also keep every step that this divides, for good; None: no others. Give it to evaluate or compare
            checkpoints later.
        best: also keep the one that is best by this metric, among those saved with a finite value of it; the newest of
            equals. Give it when the best model is needed, not the last.
        mode: "min" if less of that metric is better, as of a loss, "max" if more is, as of an accuracy.

    Attributes:
        before_commit: called on process 0 with the folder of a checkpoint before it counts in a bucket.

    Raises:
        CheckpointError: the directory cannot be created, or is none. It has an entry named by a number that is no
            checkpoint. The metrics of one are damaged. A bucket cannot be reached.
        ValueError: `keep`, `keep_every` or `mode` is out of range.
    """

    @named()
    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        for name, count in (("keep", keep), ("keep_every", keep_every)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is a positive number of steps or None; given {count}. Give 1 or more.")
        if mode not in ("min", "max"):
            raise ValueError(f'mode is "min" or "max"; given {mode!r}. A loss has "min", an accuracy "max".')
        self._bucket = None if address_of(directory) is None else BucketCopies(directory)
        self.directory = user_path(directory).absolute() if self._bucket is None else self._bucket.folder
        self.before_commit: Callable[[Path], None] | None = None
        self._best, self._sign = best, -1.0 if mode == "min" else 1.0
        self._lineage = Lineage()
        self._saving: int | None = None
        self._writer = ThreadPoolExecutor(1, "jdp checkpoint")  # one thread, as Orbax tells each of an error once
        self._writing: Future[bool] | None = None
        self._deleting: list[int] = []
        self._announced: list[int] = []  # steps to delete in the bucket, once the next save has succeeded
        self._began = self._shared = self._closed = self._warned = False
        self._restore_logging = hush()  # threads of Orbax log their errors when they occur; here they are raised
        kept = policy(keep, keep_every, self._score if best is not None else None)
        self._manager = self._open(PreserveForeign(self.directory, self._mark_for_deletion, kept))
        self._follow()

    def _open(self, kept: Any) -> ocp.CheckpointManager:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"{self.directory} cannot be made a directory of checkpoints", error) from error
        ownership.check_numbered_entries(self.directory)
        damage.set_unreadable_aside(self.directory)
        try:
            return ocp.CheckpointManager(
                self.directory,
                item_handlers=content.item_handlers(),
                options=committing.manager_options(kept, self._score, None if self._bucket is None else self._send),
            )
        except ValueError as error:  # what Orbax keeps of each step is JSON, but no table
            raise CheckpointError(
                f"{self.directory} cannot be opened; the _CHECKPOINT_METADATA of one of its checkpoints is damaged: "
                f"{error}. Remove that file: Orbax does without."
            ) from error

    @property
    def latest(self) -> int | None:
        """Return the newest step: committed, or being written by this process; None if there is none."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Return all steps, committed by any process or being written by this one, oldest first.

        In a bucket, steps of other runs are looked for until this one saves.
        """
        if self._bucket is not None and not self._began and jax.process_index() == 0:
            with named():
                self._bucket.look()
        committed = set(ownership.committed_steps(self.directory)) - set(self._deleting)
        return sorted(committed if self._saving is None else committed | {self._saving})

    @property
    def best(self) -> int | None:
        """Return the best step by the metric `best`; None if that is None, or no checkpoint has a finite value of it.

        Raises:
            CheckpointError: the last save failed, or the metrics of a checkpoint are damaged.
        """
        if self._best is None:
            return None
        self.wait()  # metrics may still be on their way to the disk
        self._reload_if_changed()
        step = self._manager.best_step()
        return step if step is not None and math.isfinite(self._score(self._manager.metrics(step))) else None

    @named()
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
        numbers = {name: metric(name, value) for name, value in (metrics or {}).items()}
        if numbers and self._best is not None and self._best not in numbers:
            raise ValueError(
                f"The best checkpoint is chosen by {self._best!r}; given the metrics {list(numbers)}. Pass it too."
            )
        step = number_of(state, step)
        if self._bucket is not None and not self._shared:
            require_shared(self._bucket.scratch, self._bucket.remote.address)
            self._shared = True
        self.wait()
        if step == self._lineage.last:
            if self._lineage.is_other(state):
                notice(
                    f"{self.directory}: checkpoint {step} was saved or restored just before and stays; another state "
                    "with as many batches consumed is not saved: give it a directory of its own"
                )
            return
        items, are_copies = content.save_arguments(state, record or {})
        self._saving = step
        with self._save_errors():
            self._prepare(step)
            save = functools.partial(self._manager.save, step, args=items, metrics=numbers, force=True)
            self._writing = writing = self._writer.submit(save)
            if not are_copies:
                writing.result()  # when Orbax has copied the arrays
        self._lineage.saved(step, ownership.committed_steps(self.directory), state)

    @named()
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
        chosen, (state, record) = self._read(
            step, lambda folder, fix: (content.read_state(folder, target, fix), content.read_record(folder, fix))
        )
        left = ownership.committed_steps(self.directory)  # damaged ones were set aside
        self._lineage.restored(chosen, [other for other in existing if other in left], state)
        return state, record

    @named()
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
        return self._read(
            step, lambda folder, fix: content.read_params(folder, target, fix, missing=missing, ignore=ignore)
        )[1]

    @named()
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
                ownership.unmark(self.directory, [*self._deleting, *([] if self._saving is None else [self._saving])])
                if self._saving is not None:
                    note_progress(self._saving)
        self._saving, self._deleting = None, []
        gone, self._announced = self._announced, []
        if self._bucket is not None and jax.process_index() == 0:
            self._bucket.delete([str(step) for step in gone if not (self.directory / str(step)).exists()])

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
            self._writer.submit(self._manager.close).result()
            self._writer.shutdown()
            self._restore_logging()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            notice(str(error))  # the exception that is being raised already matters more

    def _read(self, step: int | Literal["best"] | None, read: Callable[[Path, str], _T]) -> tuple[int, _T]:
        """Read a step, or the newest complete one: damaged ones after it are set aside. Return which it was."""

        def read_copy(folder: Path, fix: str) -> _T:
            return read(folder if self._bucket is None else self._bucket.fetched(folder), fix)

        if step is None and self.steps:
            value, chosen, damaged = damage.read_newest(self.directory, read_copy)
            damage.set_aside(self.directory, damaged, chosen)
        else:
            folder, fix = self._choose(step)
            value, chosen = read_copy(folder, fix), int(folder.name)
        self._follow()
        return chosen, value

    def _choose(self, step: int | Literal["best"] | None) -> tuple[Path, str]:
        """Return the folder of a step, and what to do if it is damaged."""
        steps = self.steps
        existing = ", ".join(map(str, steps)) or "none"
        if step == "best":
            if self._best is None:
                raise CheckpointError('step="best" needs a metric to go by: Checkpoints(directory, best="eval_loss").')
            if (chosen := self.best) is None:
                raise CheckpointError(
                    f"No checkpoint in {self.directory} was saved with a finite {self._best!r}; there are: {existing}."
                )
        else:
            chosen = self.latest if step is None else step
        if chosen is None or chosen not in steps:
            which = "" if chosen is None else f" {chosen}"
            raise CheckpointError(f"There is no checkpoint{which} in {self.directory}; there are: {existing}.")
        folder = self.directory / str(chosen)
        earlier = [other for other in steps if other != chosen]
        fix = f"Restore another, with step=... (there are: {', '.join(map(str, earlier))}), or remove that folder"
        return folder, fix if earlier else "There is no other in this directory: remove that folder to start afresh"

    @contextmanager
    def _save_errors(self) -> Generator[None]:
        """Turn an error of the code inside into that of the step being saved."""
        try:
            yield
        except BaseException as error:
            of_disk = isinstance(error, OSError | ValueError) and not isinstance(error, jax.errors.JaxRuntimeError)
            failure = self._failure(error) if of_disk else None
            self._announced, self._began = [], False  # no step is deleted in a bucket for one that was not saved
            if failure is None:
                raise
            raise failure from error

    def _failure(self, error: BaseException) -> CheckpointError:
        """Remove what there is of the step being saved, and return the error that names it."""
        step, self._saving, self._writing = self._saving, None, None
        unfinished, self._deleting = [*self._deleting, *([] if step is None else [step])], []
        self._lineage.failed(step)
        for each in unfinished if jax.process_index() == 0 else ():
            ownership.discard_unfinished(self.directory, each)
        self._manager.reload()
        complete = ", ".join(map(str, self.steps)) or "none"
        what = f"Checkpoint {step} was not saved in {self.directory}"
        return write_error(what, error, f" (those saved before are whole: {complete})")

    def _prepare(self, step: int) -> None:
        """Clear the way for a step, on process 0. Orbax has the others wait, except while steps are set aside.

        Its threads wait long for a folder that cannot be created, and creating the mark first fails at once.
        """
        abandoned: list[int] = []
        if jax.process_index() == 0:
            if not self._began and self._bucket is not None:
                self._bucket.look()
                self._bucket.delete(self._bucket.unfinished)
            if not self._began:
                ownership.remove_leftovers(self.directory)
            ownership.discard_unfinished(self.directory, step)
            abandoned = self._lineage.abandoned_by(step, ownership.committed_steps(self.directory))
            if step not in abandoned and os.path.lexists(self.directory / str(step)):  # neither complete nor marked
                abandoned.append(step)
        if from_first_process("whether checkpoints are set aside", bool(abandoned)):
            if abandoned:
                self._set_aside(abandoned, step)
            meet("Checkpoints.save, where process 0 sets checkpoints aside")
        if jax.process_index() == 0:
            ownership.mark(self.directory, step)
        self._reload_if_changed()
        self._follow()
        self._began = True
        if not self._warned and (skipped := self._lineage.skipped(step)):
            self._warned = True
            notice(
                f"{self.directory}: step {self._lineage.last} was restored, and step {step} is saved behind "
                f"{ownership.listed(skipped)}, which stay; if training went back to {self._lineage.last}, they are of "
                "the abandoned run, and yours to remove"
            )

    def _set_aside(self, abandoned: Sequence[int], step: int) -> None:
        aside = ownership.set_aside(self.directory, abandoned)
        back = f"after step {self._lineage.last}" if self._lineage.last is not None else "of this run"
        notice(
            f"{self.directory}: checkpoint {step} {back} differs from what was there: {ownership.listed(abandoned)} "
            f"set aside in {aside.name}, which can be restored from and is yours to delete"
        )

    def _reload_if_changed(self) -> None:
        """Have Orbax read the directory again if another process wrote to it or steps were set aside."""
        if sorted(self._manager.all_steps()) != (steps := ownership.committed_steps(self.directory)):
            for step in steps:
                content.check_metrics(self.directory / str(step))  # Orbax reads all of them
            self._manager.reload()

    def _mark_for_deletion(self, steps: Sequence[int]) -> None:
        """Mark these steps before any of them is deleted."""
        self._deleting = list(steps)
        self._announced += steps
        if jax.process_index() == 0:
            for step in steps:
                ownership.mark(self.directory, step)

    def _send(self, folder: Path) -> None:
        """Send a checkpoint that was just committed on this host to the bucket."""
        assert self._bucket is not None
        if self.before_commit is not None:
            self.before_commit(folder)
        self._bucket.send(folder)

    def _follow(self) -> None:
        """Move in the bucket what was renamed on this host."""
        if self._bucket is not None and jax.process_index() == 0:
            self._bucket.follow()

    def _score(self, metrics: Mapping[str, Any] | None) -> float:
        """Return the metric `best`, its sign such that more is better; minus infinity if it was not measured."""
        value = None if metrics is None else metrics.get(self._best or "")
        return -math.inf if value is None else self._sign * value
