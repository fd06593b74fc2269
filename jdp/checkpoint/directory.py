"""A directory of checkpoints, one a step: which are kept, which is best, and how they are written in the background.

Orbax writes; a step counts only once its commit file is there, so a run killed while saving finds the step before.
Opening a directory changes nothing in it: what killed runs left half-written is removed by the first save, so that
another process may read while a run trains.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jdp.checkpoint import content
from jdp.checkpoint.errors import CheckpointError, hush, write_error
from jdp.notices import notice
from jdp.state import TrainState
from jdp.types import PyTree


class Checkpoints:
    """A directory of checkpoints, one a step.

    A checkpoint stays while any of `keep`, `keep_every` and `best` wants it.

    Args:
        directory: made if it is not there. All processes must see the same one.
        keep: how many of the newest to keep; None keeps all.
        keep_every: also keep every step that this divides, for good; None: no others.
        best: also keep the one that is best by this metric, among those saved with a finite value of it; the newest of
            equals.
        mode: "min" where less of that metric is better, as of a loss, "max" where more is.

    Raises:
        CheckpointError: the directory cannot be made, or is none.
        ValueError: another argument that makes no sense.
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
        self.directory = Path(directory).absolute()
        self._best, self._sign = best, -1.0 if mode == "min" else 1.0
        self._saving: int | None = None
        self._cleaned = False
        self._loud = hush()  # threads of Orbax' log their errors when they occur; we raise them
        self._manager = self._open(_policy(keep, keep_every, self._score if best is not None else None))

    def _open(self, policy: Any) -> ocp.CheckpointManager:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"{self.directory} cannot be made a directory of checkpoints", error) from error
        return ocp.CheckpointManager(
            self.directory,
            item_handlers=content.handlers(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=self._score,  # also what makes Orbax keep the metrics beside each checkpoint
                atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
            ),
        )

    @property
    def latest(self) -> int | None:
        """The newest step: committed, or being written by this process; None when there is none."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps there are, committed or being written by this process, oldest first."""
        return sorted(self._manager.all_steps())

    @property
    def best(self) -> int | None:
        """The best step by the metric `best`; None where that is None, or no checkpoint has a finite value of it."""
        if self._best is None:
            return None
        self.wait()  # metrics may still be on their way to the disk
        step = self._manager.best_step()
        return step if step is not None and math.isfinite(self._score(self._manager.metrics(step))) else None

    def save(
        self,
        state: TrainState,
        record: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `state` under the number of batches it has consumed, in the background.

        The arrays are copied off the devices before this returns, so the next step may donate them. A step that is
        there already is left as it is.

        Args:
            state: the whole state.
            record: any small JSON object, given back by `restore`.
            metrics: name -> number, of this very state; where `best` is set it must be among them. None: not measured.

        Raises:
            CheckpointError: this one cannot be written, or the one before could not; those before it are whole. Or the
                state is abstract.
            ValueError: the metric `best` is not in `metrics`.
        """
        content.check_values(content.leaves_of(state, ("step", "params")))  # before the step's number is taken
        numbers = {name: _finite(value) for name, value in (metrics or {}).items()}
        if numbers and self._best is not None and self._best not in numbers:
            raise ValueError(f"The best checkpoint is chosen by {self._best!r}; the metrics given are {list(numbers)}.")
        self.wait()
        step = int(state.consumed)
        if step in self.steps:
            return
        self._remove_leftovers()
        items = content.items_of(state, record or {})
        self._saving = step
        with self._failing():
            self._check_writable()
            self._manager.save(step, args=items, metrics=numbers, force=True)

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
        return content.read_state(folder, target, fix), content.read_record(folder, fix)

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
        with self._failing():
            self._manager.wait_until_finished()
        self._saving = None

    def close(self) -> None:
        """Wait for what is being written, and let go of it."""
        try:
            self.wait()
        finally:
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
            self._discard(self.directory / str(step))
            self._manager.reload()
            whole = ", ".join(map(str, self.steps)) or "none"
            what = f"Checkpoint {step} was not saved in {self.directory}"
            raise write_error(what, error, f" (those saved before are whole: {whole})") from error

    def _check_writable(self) -> None:
        """Orbax' threads wait long for a folder that cannot be made: fail before it is asked to."""
        if jax.process_index() == 0:
            probe = self.directory / ".writable"
            probe.touch()
            probe.unlink()

    def _remove_leftovers(self) -> None:
        """Once, before this process writes: what killed runs left half-written. Orbax has the others wait for us."""
        if self._cleaned:
            return
        self._cleaned = True
        for folder in self.directory.iterdir():
            if folder.name.isdigit() or ".orbax-checkpoint-tmp" in folder.name:
                self._discard(folder)

    @staticmethod
    def _discard(folder: Path) -> None:
        if jax.process_index() == 0 and not (folder / content.COMMITTED).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def _score(self, metrics: Mapping[str, Any] | None) -> float:
        """More is better; minus infinity where the metric was not measured."""
        value = None if metrics is None else metrics.get(self._best or "")
        return -math.inf if value is None else self._sign * value


def _policy(keep: int | None, keep_every: int | None, score: Any) -> Any:
    """What stays: Orbax' policies, any of which keeps a checkpoint."""
    policies: list[Any] = [checkpoint_managers.LatestN(keep)]  # None: all
    if keep_every is not None:
        policies.append(checkpoint_managers.EveryNSteps(keep_every))
    if score is not None:
        policies.append(checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False))
    return checkpoint_managers.AnyPreservationPolicy(policies)


def _finite(value: Any) -> float | None:
    """A number as JSON has it: what is not finite was not measured."""
    return float(value) if math.isfinite(float(value)) else None
