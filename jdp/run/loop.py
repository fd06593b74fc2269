"""The training loop of `jdp train`, read top to bottom.

1. `run`: assemble the run, check that it can start, claim its folder.
2. `_visit`: restore the newest checkpoint (`resumed`), or make the state (`fresh`).
3. `_steps`: take the steps. Reading, transfer and Python run ahead of the devices. The work around a step is in
   `visit.py` (metrics, evaluations, checkpoints, signals) and `bad_steps.py`.
4. Exit at the end, or early at a signal, with a checkpoint of the last step.

`step` in metrics and checkpoints counts consumed batches: the optimizer's steps and the skipped steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jdp.base.notices import notice, warn
from jdp.checkpoint import CheckpointError, Checkpoints
from jdp.checkpoint.stored import COMMITTED
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.run.evaluation import Best
from jdp.run.folder import CHECKPOINTS, Claim, claimed, differing, disk_trouble, refused
from jdp.run.metrics import check_installed
from jdp.run.outputs import Display
from jdp.run.progress import Progress, Record, checked_record
from jdp.run.signals import StopRequest
from jdp.run.visit import Visit
from jdp.run.weights import check_export, check_initial, load_initial


def run(
    experiment: Experiment,
    *,
    root: Path,
    quiet: bool = False,
    profile: range | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, or resume, an experiment in `root`/NAME, and return its summary, the content of summary.json."""
    check_installed(experiment.train.wandb)
    with StopRequest() as stop:  # from now on no signal is lost; before the first step it exits at once
        assembly = Assembly.on_devices(experiment)
        assembly.check_memory()
        _ = assembly.inputs.eval_sets, assembly.inputs.prompts  # report their errors before anything is written
        folder, init_from = root / experiment.name, experiment.train.init_from
        if init_from is not None and not any((folder / CHECKPOINTS).glob(f"*/{COMMITTED}")):  # later they may be moved
            check_initial(init_from, assembly.training.config)
        with disk_trouble(folder, lambda: stop.began), claimed(folder, assembly.toml) as claim:
            if experiment.train.export is not None:
                check_export(folder, assembly.training.config)
            for line in settings:
                notice(line)
            return _visit(assembly, stop, claim, quiet=quiet, profile=profile)


def _visit(
    assembly: Assembly, stop: StopRequest, claim: Claim, *, quiet: bool, profile: range | None
) -> dict[str, Any]:
    """Train in a claimed folder until the end or a stop, and return the summary. Raises as `run` does."""
    experiment, progress, folder = assembly.experiment, Progress(), claim.folder
    guard, train, best = experiment.guard, experiment.train, Best(experiment.train.best_metric)
    kept: dict[str, Any] = {"keep": train.keep_checkpoints, "keep_in_memory": guard.keep_in_memory, "mode": best.mode}
    limits = Deadline(guard.deadline_seconds, guard.first_deadline_seconds)

    def at_end() -> dict[str, Any]:
        signal = {"signal": stop.signal.name} if stop.signal else {}
        return {"step": progress.done, "stopped_early": progress.stops_early(experiment)} | signal

    with watching(folder, limits, at_end) as watch:
        stop.on_signal = lambda number: watch.log.event("signal", signal=number.name)
        with Checkpoints(
            folder / CHECKPOINTS, mirror=train.mirror, best=best.metric if train.keep_best else None, **kept
        ) as saved:
            with watch.during("restore"):
                start = resumed(assembly, saved) or fresh(assembly)
            progress = start.progress
            visit = Visit(
                assembly=assembly,
                progress=progress,
                claim=claim,
                checkpoints=saved,
                stop=stop,
                watch=watch,
                display=Display(train.steps, done=progress.done, to_stderr=quiet),
            )
            visit.introduce(start.weights_read)
            with visit.recorded(profile):
                state = _steps(visit, start.state)
                if stop.signal:
                    raise visit.stopped(stop.signal)
            return visit.finish(state)


@dataclass(frozen=True)
class Start:
    """The start of a visit."""

    state: TrainState
    progress: Progress
    weights_read: str | None = None  # a line about the initial weights


def fresh(assembly: Assembly) -> Start:
    """Make a run's initial state, with any initial weights."""
    training, init_from, weights_read = assembly.training, assembly.experiment.train.init_from, None
    state = training.state()
    if init_from is not None:
        state, weights_read = load_initial(init_from, state, training.config, training.plan)
    record = Record(fingerprint=assembly.inputs.data.fingerprint, experiment=assembly.toml)
    return Start(state, Progress.of(assembly.experiment.train, record), weights_read)


def resumed(assembly: Assembly, saved: Checkpoints) -> Start | None:
    """Restore the newest complete state onto the run's plan; None if there is none."""
    newest = saved.latest
    if newest is None:
        return None
    try:
        state, values = saved.restore(assembly.training.abstract_state)
    except CheckpointError:
        if saved.latest is not None:
            raise
        return None  # there were only copies in memory, and they are damaged, as reported
    folder, fingerprint = saved.directory.parent, assembly.inputs.data.fingerprint
    record = checked_record(values, saved.directory / str(int(state.consumed)))
    # The folder has this experiment, but a mirror may have had another run's checkpoints.
    if words := refused(pairs := differing(record.experiment, assembly.toml), assembly.toml):
        raise ExperimentError(
            f"{saved.directory} has a checkpoint of another experiment ({'; '.join(words)}): give each run its own "
            f"`name` and train.mirror, and remove {folder}"
        )
    if record.fingerprint != fingerprint:
        data = [f"; {key} was {was!r}, is {now!r}" for key, (was, now) in pairs.items() if key.startswith("data.")]
        raise ExperimentError(
            f"{folder} was trained on other data (fingerprint {record.fingerprint}, now {fingerprint}){''.join(data)}: "
            "restore [data] as it was, or choose another `name`. The standard library's text differs between Python "
            "versions."
        )
    progress = Progress.of(assembly.experiment.train, replace(record, experiment=assembly.toml))
    progress.skipped = progress.skips_seen = int(jax.device_get(state.skipped))
    if progress.kept is not None and progress.kept.step and progress.kept.step not in saved.steps:
        warn(f"the best checkpoint, {progress.kept.step}, is missing: the next evaluation becomes the best")
        progress.kept = Best(progress.kept.metric)
    return Start(state, progress)


def _steps(visit: Visit, state: TrainState) -> TrainState:
    """Step until the end, an early stop or a signal; return the state of the last step, which is saved."""
    train_step = visit.assembly.training.step
    visit.evaluate(state)  # a signal may have come between a step and its evaluation
    visit.sample(state)
    if visit.ended:
        return state
    with visit.feed():
        while not visit.ended:
            batch = visit.before(state)
            state, metrics = train_step(state, batch)
            visit.after(state, batch, metrics)
    return state
