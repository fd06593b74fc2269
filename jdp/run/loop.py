"""The training loop of `jdp train`, read top to bottom.

1. `run`: assemble the run, check that it can start, claim its folder.
2. `_visit`: make the state, or restore the newest checkpoint (`_start`).
3. `_steps`: take the steps. Reading, transfer and Python run ahead of the devices. The work around a step is in
   `visit.py` (metrics, evaluations, checkpoints, signals) and `bad_steps.py`.
4. Exit at the end, or early at a signal, with a checkpoint of the last step.

`step` in metrics and checkpoints counts batches consumed: the optimizer's steps and the skipped ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jdp.base.notices import notice, warn
from jdp.checkpoint import CheckpointError, Checkpoints
from jdp.checkpoint.format.checksums import COMMITTED
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.run.evaluation import Best
from jdp.run.export import check_free
from jdp.run.folder import CHECKPOINTS, Claim, changed, claimed, passing_trouble, writing
from jdp.run.outputs import trackers
from jdp.run.outputs.history import devices_of
from jdp.run.progress import Progress, check_record
from jdp.run.signals import StopRequest
from jdp.run.visit import Visit

if TYPE_CHECKING:
    from jdp.run.initial_weights import InitialWeights


def run(
    experiment: Experiment,
    *,
    root: Path,
    quiet: bool = False,
    profile: range | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, or resume, an experiment in `root`/NAME, and return its summary, which is also in its summary.json."""
    trackers.check_installed(experiment.train.wandb)
    with StopRequest() as stop:  # from here on a signal is never lost; until the first step it exits at once
        assembly = Assembly.on_devices(experiment)
        assembly.check_memory()
        _ = assembly.eval_sets  # errors of the data come before anything is written
        weights = _initial_weights(experiment.train)
        folder = root / experiment.name
        has_checkpoints = any((folder / CHECKPOINTS).glob(f"*/{COMMITTED}"))
        if weights is not None and not has_checkpoints:  # afterwards they may be moved
            weights.check(assembly.config)
        with (
            passing_trouble(lambda: stop.began),
            claimed(folder, assembly.toml) as claim,
            writing(folder),
        ):
            if experiment.train.export is not None:
                check_free(folder)
            for line in settings:
                notice(line)
            return _visit(assembly, weights, stop, claim, quiet=quiet, profile=profile)


def _initial_weights(train: Train) -> InitialWeights | None:
    if train.init_from is None:
        return None
    from jdp.run.initial_weights import InitialWeights  # late, as all that reads other models' files

    return InitialWeights.of(train)


def _visit(
    assembly: Assembly,
    weights: InitialWeights | None,
    stop: StopRequest,
    claim: Claim,
    *,
    quiet: bool,
    profile: range | None,
) -> dict[str, Any]:
    """Train in a claimed folder until the end or a stop, and return the summary. Raises as `run` does."""
    guard, progress, folder = assembly.experiment.guard, Progress(), claim.folder
    limits = Deadline(guard.deadline_seconds, guard.first_deadline_seconds)
    with watching(folder, limits, devices_of(assembly.mesh), done=lambda: progress.done) as watch:
        stop.on_signal = lambda number: watch.flight.event("signal", signal=number.name)
        with _open_checkpoints(assembly.experiment, folder) as saved:
            with watch.during("restore"):
                state, progress, weights_read = _start(assembly, saved, weights)
            visit = Visit(assembly, progress, claim, saved, stop, watch, quiet=quiet)
            visit.introduce(weights_read)
            with visit.recorded(profile):
                state = _steps(visit, state)
                if stop.signal:
                    raise visit.stopped(f"after step {progress.done}, saved")
            return visit.finish(state)


def _open_checkpoints(experiment: Experiment, folder: Path) -> Checkpoints:
    """Open the run's checkpoints; [train] sets which of them are kept."""
    train, best = experiment.train, experiment.train.best_metric
    by: dict[str, Any] = {"best": best, "mode": Best(best).mode} if train.keep_best else {}
    by |= {"keep": train.keep_checkpoints, "keep_in_memory": experiment.guard.keep_in_memory, "mirror": train.mirror}
    return Checkpoints(folder / CHECKPOINTS, **by)


def _start(
    assembly: Assembly,
    saved: Checkpoints,
    weights: InitialWeights | None,
) -> tuple[TrainState, Progress, str | None]:
    """Restore the newest complete state onto the run's plan, or make a state, with any initial weights."""
    train, fingerprint = assembly.experiment.train, assembly.data.fingerprint
    found = _restored(assembly, saved)
    if found is None:
        state, message = _initial(assembly, weights)
        return state, Progress.of(train, assembly.toml, {"fingerprint": fingerprint}), message
    state, record = found
    check_record(record, saved.directory / str(int(state.consumed)))
    if record["fingerprint"] != fingerprint:
        raise ExperimentError(
            f"{saved.directory.parent} was trained on other data (fingerprint {record['fingerprint']}, now "
            f"{fingerprint}){_moved(saved.directory.parent, assembly.toml)}: restore [data] as it was, or choose "
            "another `name`. The standard library's text differs between Python versions."
        )
    progress = Progress.of(train, assembly.toml, record)
    progress.skipped = progress.skips_seen = int(jax.device_get(state.skipped))
    if progress.kept is not None and progress.kept.step and progress.kept.step not in saved.steps:
        warn(f"the best checkpoint, {progress.kept.step}, is not there: the next evaluation is the best again")
        progress.kept = Best(progress.kept.metric)
    return state, progress, None


def _moved(folder: Path, toml: str) -> str:
    """Return the keys of the data that changed, for the message about other data; "" if none did."""
    words = [
        f"{key} was {was!r}, is {now!r}" for key, (was, now) in changed(folder, toml).items() if key[:5] == "data."
    ]
    return f"; {'; '.join(words)}" if words else ""


def _initial(assembly: Assembly, weights: InitialWeights | None) -> tuple[TrainState, str | None]:
    """Make the state that the run starts from, and a line about weights that are read."""
    if weights is None:
        return assembly.state(), None
    return weights.load(assembly.state(), assembly.config, assembly.plan)


def _restored(assembly: Assembly, saved: Checkpoints) -> tuple[TrainState, dict[str, Any]] | None:
    """Restore the newest complete state; None without one."""
    newest = saved.latest
    try:
        return None if newest is None else saved.restore(assembly.abstract_state())
    except CheckpointError:
        if saved.latest is not None:
            raise
        return None  # all there was were copies in memory, and they are damaged, which was reported


def _steps(visit: Visit, state: TrainState) -> TrainState:
    """Step until the end, an early stop or a signal; return the state of the last step, which is saved."""
    train_step = visit.assembly.train_step
    visit.evaluate(state)  # a signal may have come between a step and its evaluation
    visit.sample(state)
    with visit.feed():
        while not visit.ended:
            batch = visit.before(state)
            state, metrics = train_step(state, batch)
            visit.after(state, batch, metrics)
    return state
