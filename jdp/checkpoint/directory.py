"""A directory of checkpoints, one a step: which are kept, which is best, and how they are written in the background.

Orbax writes; a step counts only once its commit file is there, so a run killed while saving finds the step before.
Opening a directory changes nothing in it: what killed runs left half-written is removed by the first save, so that
another process may read while a run trains, and sees its new steps. What is ours in there, to delete or to set aside,
is told by `ours`; whether a run went back, by `line`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from jdp.checkpoint import content, ours
from jdp.checkpoint.errors import CheckpointError, hush, write_error
from jdp.checkpoint.line import Line
from jdp.core.formatting import finite_or_none
from jdp.core.notices import notice
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.core.user_path import user_path


class Checkpoints:
    """A directory of checkpoints, one a step.

    A checkpoint stays while any of `keep`, `keep_every` and `best` wants it. A run that goes back to an earlier one and
    saves again loses nothing: the later ones are set aside in the directory's `abandoned-1` (then `-2`, …), which is
    said; each of these can be restored from like any directory of checkpoints, and is yours to delete.

    Args:
        directory: made if it is not there; `~` is filled in. All processes must see the same one.
        keep: how many of the newest to keep; None keeps all.
        keep_every: also keep every step that this divides, for good; None: no others.
        best: also keep the one that is best by this metric, among those saved with a finite value of it; the newest of
            equals.
        mode: "min" where less of that metric is better, as of a loss, "max" where more is.

    Raises:
        CheckpointError: the directory cannot be made, or is none; it has an entry named by a number that is no
            checkpoint; or the metrics of one are damaged.
        ValueError: another argument that makes no sense, or a path such as gs://bucket/run.
    """

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
                raise ValueError(f"{name} is a positive number of steps or None; got {count}.")
        if mode not in ("min", "max"):
            raise ValueError(f'mode is "min" or "max"; got {mode!r}.')
        self.directory = user_path(directory).absolute()
        self._best, self._sign = best, -1.0 if mode == "min" else 1.0
        self._line = Line()
        self._saving: int | None = None
        self._deleting: list[int] = []
        self._cleaned = self._closed = self._warned = False
        self._loud = hush()  # threads of Orbax' log their errors when they occur; we raise them
        self._manager = self._open(
            _OnlyOurs(
                self.directory,
                self._about_to_delete,
                _policy(keep, keep_every, self._score if best is not None else None),
            )
        )

    def _open(self, policy: Any) -> ocp.CheckpointManager:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"{self.directory} cannot be made a directory of checkpoints", error) from error
        ours.check_no_strangers(self.directory)
        self._check_metrics()
        try:
            return ocp.CheckpointManager(
                self.directory,
                item_handlers=content.handlers(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    best_fn=self._score,  # also what makes Orbax keep the metrics beside each checkpoint
                    atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
                ),
            )
        except ValueError as error:  # what Orbax keeps of each step is JSON, but no table
            raise CheckpointError(
                f"{self.directory} cannot be opened; the _CHECKPOINT_METADATA of one of its checkpoints is damaged: "
                f"{error}. Remove that file: Orbax does without."
            ) from error

    @property
    def latest(self) -> int | None:
        """The newest step: committed, or being written by this process; None when there is none."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """The steps there are, committed by any process or being written by this one, oldest first."""
        there = set(ours.steps_of(self.directory)) - set(self._deleting)
        return sorted(there if self._saving is None else there | {self._saving})

    @property
    def best(self) -> int | None:
        """The best step by the metric `best`; None where that is None, or no checkpoint has a finite value of it."""
        if self._best is None:
            return None
        self.wait()  # metrics may still be on their way to the disk
        self._read_again()
        step = self._manager.best_step()
        return step if step is not None and math.isfinite(self._score(self._manager.metrics(step))) else None

    def save(
        self,
        state: TrainState,
        record: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `state` under the number of batches it has consumed, in the background.

        The arrays are copied off the devices before this returns, so the next step may donate them. The state that was
        saved or restored last is not written again. Steps from this one on that are there already are of a run that
        went back, or of another one: they are set aside, see above.

        Args:
            state: the whole state.
            record: any small JSON object, given back by `restore`; numbers of numpy and JAX become Python's.
            metrics: name -> number, of this very state; where `best` is set it must be among them. None: not measured.

        Raises:
            CheckpointError: this one cannot be written, or the one before could not; those before it are whole. Or the
                state is abstract, `record` is not JSON, or this is closed.
            ValueError: the metric `best` is not in `metrics`, or one of these is no number.
        """
        if self._closed:
            raise CheckpointError(
                f"{self.directory} was closed, and nothing is saved after that. Save before close(), inside `with`, or "
                "open it again: jdp.Checkpoints(...)."
            )
        content.check_values(content.leaves_of(state, ("step", "params")))  # before the step's number is taken
        numbers = {name: _metric(name, value) for name, value in (metrics or {}).items()}
        if numbers and self._best is not None and self._best not in numbers:
            raise ValueError(f"The best checkpoint is chosen by {self._best!r}; the metrics given are {list(numbers)}.")
        self.wait()
        step = int(state.consumed)
        if step == self._line.at:
            self._say_if_other(state, step)
            return
        items = content.items_of(state, record or {})
        self._saving = step
        with self._failing():
            self._prepare(step)
            self._manager.save(step, args=items, metrics=numbers, force=True)
        self._line.saved(step, ours.steps_of(self.directory), state)

    def restore(
        self, target: TrainState, step: int | Literal["best"] | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Read a checkpoint onto the shardings of `target`; return the state and the record saved with it.

        Args:
            target: `jdp.abstract_state(...)`, or a real state; its values are not read. Any strategy, mesh and number
                of devices.
            step: which one; "best" takes the best by the metric, None the newest.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit `target`, or it is damaged.
        """
        folder, fix = self._choose(step)
        there = ours.steps_of(self.directory)
        found = content.read_state(folder, target, fix), content.read_record(folder, fix)
        self._line.restored(int(folder.name), there, found[0])
        return found

    def restore_params(
        self,
        target: PyTree,
        step: int | Literal["best"] | None = None,
        *,
        missing: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> PyTree:
        """Read the parameters and the model state only, for inference or a fresh start; `jdp.restore_params` says more.

        Args:
            target: a state, real or abstract, with any optimizer; or a tree of parameters that have shardings.
            step: as for `restore`.
            missing: path patterns of parameters that the checkpoint may lack; they keep the target's values.
            ignore: path patterns of those in the checkpoint that are left unread.

        Raises:
            CheckpointError: as for `restore`.
        """
        folder, fix = self._choose(step)
        return content.read_params(folder, target, fix, missing=missing, ignore=ignore)

    def wait(self) -> None:
        """Return when everything saved so far is committed.

        Raises:
            CheckpointError: it could not be; said once.
        """
        if self._closed:
            return
        with self._failing():
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                ours.unmark(self.directory, [*self._deleting, *([] if self._saving is None else [self._saving])])
        self._saving, self._deleting = None, []

    def close(self) -> None:
        """Wait for what is being written, and let go of it. What is there can still be read."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._manager.close()
            self._loud()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            notice(str(error))  # what is on its way already matters more

    def _choose(self, step: int | Literal["best"] | None) -> tuple[Path, str]:
        """The folder of a step, and what to do where it is damaged."""
        self.wait()
        steps = self.steps
        have = ", ".join(map(str, steps)) or "none"
        if step == "best":
            if self._best is None:
                raise CheckpointError('step="best" needs a metric to go by: Checkpoints(directory, best="eval_loss").')
            if (chosen := self.best) is None:
                raise CheckpointError(
                    f"No checkpoint in {self.directory} was saved with a finite {self._best!r}; there are: {have}."
                )
        else:
            chosen = self.latest if step is None else step
        if chosen is None or chosen not in steps:
            which = "" if chosen is None else f" {chosen}"
            raise CheckpointError(f"There is no checkpoint{which} in {self.directory}; there are: {have}.")
        folder = self.directory / str(chosen)
        earlier = [other for other in steps if other != chosen]
        fix = f"Restore another, with step=... (there are: {', '.join(map(str, earlier))}), or remove that folder"
        return folder, fix if earlier else "There is no other in this directory: remove that folder to start afresh"

    @contextmanager
    def _failing(self) -> Generator[None]:
        """An error in here is that of the step being saved: what is there of it is removed, and it is said."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except (OSError, ValueError) as error:
            step, self._saving = self._saving, None
            unfinished, self._deleting = [*self._deleting, *([] if step is None else [step])], []
            self._line.failed()
            for one in unfinished if jax.process_index() == 0 else ():
                ours.discard(self.directory, one)
            self._manager.reload()
            whole = ", ".join(map(str, self.steps)) or "none"
            what = f"Checkpoint {step} was not saved in {self.directory}"
            raise write_error(what, error, f" (those saved before are whole: {whole})") from error

    def _prepare(self, step: int) -> None:
        """Make way for a step, on process 0. Orbax has the others wait for us, but where steps are set aside.

        Its threads wait long for a folder that cannot be made: the mark, made here, fails before it is asked to.
        """
        left: list[int] = []
        if jax.process_index() == 0:
            if not self._cleaned:
                ours.remove_leftovers(self.directory)
            left = self._line.left(step, ours.steps_of(self.directory))
            if step not in left and os.path.lexists(self.directory / str(step)):  # neither whole nor marked as ours
                left.append(step)
        self._cleaned = True
        if _said_by_process_0(bool(left)):
            if left:
                self._set_aside(left, step)
            _said_by_process_0(True)  # the others wait
        if jax.process_index() == 0:
            ours.mark(self.directory, step)
        self._read_again()
        if not self._warned and (skipped := self._line.skipped(step)):
            self._warned = True
            notice(
                f"{self.directory}: step {self._line.at} was restored, and step {step} is saved behind "
                f"{_listed(skipped)}, which stay; where training went back to {self._line.at}, they are of the line "
                "that it left, and yours to remove"
            )

    def _set_aside(self, left: Sequence[int], step: int) -> None:
        aside = ours.set_aside(self.directory, left)
        back = f"after step {self._line.at}" if self._line.at is not None else "of this run"
        notice(
            f"{self.directory}: checkpoint {step} {back} is another than what was there: {_listed(left)} set aside in "
            f"{aside.name}, which can be restored from and is yours to delete"
        )

    def _say_if_other(self, state: TrainState, step: int) -> None:
        if self._line.is_other(state):
            notice(
                f"{self.directory}: checkpoint {step} was saved or restored just before and stays; another state with "
                "as many batches consumed is not saved: give it a directory of its own"
            )

    def _read_again(self) -> None:
        """Have Orbax look at the directory again, where another process wrote to it or steps were set aside."""
        if sorted(self._manager.all_steps()) != ours.steps_of(self.directory):
            self._check_metrics()
            self._manager.reload()

    def _check_metrics(self) -> None:
        """Orbax reads all metrics when it looks at a directory."""
        for step in ours.steps_of(self.directory):
            content.check_metrics(self.directory / str(step))

    def _about_to_delete(self, steps: Sequence[int]) -> None:
        """Before any of them is touched."""
        self._deleting = list(steps)
        if jax.process_index() == 0:
            for step in steps:
                ours.mark(self.directory, step)

    def _score(self, metrics: Mapping[str, Any] | None) -> float:
        """More is better; minus infinity where the metric was not measured."""
        value = None if metrics is None else metrics.get(self._best or "")
        return -math.inf if value is None else self._sign * value


class _OnlyOurs:
    """What Orbax deletes: of what a policy gives up, only what is ours, and only after it was announced."""

    def __init__(self, directory: Path, announce: Callable[[Sequence[int]], None], policy: Any) -> None:
        self._directory, self._announce, self._policy = directory, announce, policy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self._policy.should_preserve(checkpoints, context=context)
        pairs = list(zip((info.step for info in checkpoints), kept, strict=True))
        stays = [bool(keep) or not ours.may_delete(self._directory, step) for step, keep in pairs]
        self._announce([step for (step, _), stay in zip(pairs, stays, strict=True) if not stay])
        return stays


def _policy(keep: int | None, keep_every: int | None, score: Any) -> Any:
    """What stays: Orbax' policies, any of which keeps a checkpoint."""
    policies: list[Any] = [checkpoint_managers.LatestN(keep)]  # None: all
    if keep_every is not None:
        policies.append(checkpoint_managers.EveryNSteps(keep_every))
    if score is not None:
        policies.append(checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False))
    return checkpoint_managers.AnyPreservationPolicy(policies)


def _metric(name: str, value: Any) -> float | None:
    """Return a metric as JSON has it; None, for one that is not finite, means that it was not measured."""
    try:
        return finite_or_none(float(value))
    except (TypeError, ValueError):
        raise ValueError(
            f"A metric is one number; {name!r} is {value!r}. Leave it out where it was not measured."
        ) from None


def _said_by_process_0(it: bool) -> bool:
    """What process 0 says, on all of them; they wait for it."""
    return it if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.int32(it)))


def _listed(steps: Sequence[int]) -> str:
    return f"checkpoint {steps[0]}" if len(steps) == 1 else f"checkpoints {', '.join(map(str, steps))}"
