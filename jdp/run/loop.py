"""The training loop of `jdp train`, read top to bottom.

1. `run`: assemble the run, check that it can start, claim its folder.
2. `_visit`: make the state, or restore the newest checkpoint (`_start`); after too many bad steps in a row, or where a
   device differs from the others, go back.
3. `_steps`: take the steps. Reading, transfer and Python run ahead of the devices. The work around a step is in
   `visit.py` (metrics, evaluations, checkpoints, signals) and `bad_steps.py`.
4. Exit at the end, or early at a signal, with a checkpoint of the last step.

`step` in metrics and checkpoints counts batches consumed: the optimizer's steps and the skipped ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jdp.base.notices import notice
from jdp.base.read_toml import parse
from jdp.checkpoint import CheckpointError, Checkpoints
from jdp.core.cluster.barrier import from_first_process
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.data import TEMPLATED
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.guard.bad_steps import GoBack
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.run.evaluation import Best
from jdp.run.export import check_free
from jdp.run.folder import CHECKPOINTS, FILE, Claim, claimed, passing_trouble, writing
from jdp.run.outputs import trackers
from jdp.run.outputs.history import devices_of
from jdp.run.progress import Progress, check_record
from jdp.run.reference import Reference
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
    if wanted := experiment.track.model_dump(exclude_none=True):
        trackers.check_installed(**wanted)
    with StopRequest() as stop:  # from here on a signal is never lost; until the first step it exits at once
        experiment = _dated(experiment, root)
        assembly = Assembly.on_devices(experiment)
        assembly.check_memory()
        if assembly.chooses_remat:
            assembly = _with_policy(experiment)
        _ = assembly.eval_sets  # errors of the data come before anything is written
        weights = _initial_weights(experiment.train)
        if weights is not None:
            weights.check(assembly.config)
        folder = root / experiment.name
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


def _dated(experiment: Experiment, root: Path) -> Experiment:
    """Return the experiment with the day that a chat template writes: that of the run's first start."""
    data, file = experiment.data, f"{experiment.name}/{FILE}"
    if data.format not in TEMPLATED or data.chat_date is not None:
        return experiment
    day = date.today().isoformat()
    if jax.process_index() == 0:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a new run, or `claimed` reports it
            day = date.fromisoformat(parse((root / file).read_text("utf-8"))["data"]["chat_date"]).isoformat()
    day = from_first_process("the day of the run's first start", day)
    return experiment.model_copy(update={"data": data.model_copy(update={"chat_date": day})})


def _with_policy(experiment: Experiment) -> Assembly:
    """Return the assembly with a policy in place of `model.remat = "auto"`."""
    from jdp.experiment.remat import settled  # late: it plans, which no other run does

    return Assembly.on_devices(settled(experiment))


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
        back: GoBack | None = None
        while True:
            visit = None  # the one before holds batches and outputs
            with _open_checkpoints(assembly.experiment, folder) as saved:
                with watch.during("restore"):
                    reference = Reference.of(assembly, folder)
                    state, progress, weights_read = _start(assembly, saved, weights, back, reference, watch.batch)
                visit = Visit(assembly, progress, claim, saved, stop, watch, quiet=quiet)
                visit.introduce(back, weights_read)
                try:
                    with visit.recorded(profile):
                        state = _steps(visit, state)
                        if stop.signal:
                            raise visit.stopped(f"after step {progress.done}, saved")
                    return visit.finish(state)
                except GoBack as error:
                    back = error.with_traceback(None)  # its frames hold the state
                    if stop.signal:
                        raise visit.stopped(f"while going back ({back})") from None


def _open_checkpoints(experiment: Experiment, folder: Path) -> Checkpoints:
    """Open the run's checkpoints; [train] sets which of them are kept."""
    train, best = experiment.train, experiment.train.best_metric
    by: dict[str, Any] = {"best": best, "mode": Best(best).mode} if best else {}
    by |= {"keep": train.keep_checkpoints, "keep_every": train.keep_every}
    by |= {"keep_in_memory": experiment.guard.keep_in_memory, "mirror": train.mirror}
    return Checkpoints(folder / CHECKPOINTS, **by)


def _start(
    assembly: Assembly,
    saved: Checkpoints,
    weights: InitialWeights | None,
    back: GoBack | None,
    reference: Reference | None,
    beat: Callable[[], None],
) -> tuple[TrainState, Progress, str | None]:
    """Restore the newest complete state onto the run's plan, or make a state, with any initial weights."""
    train, fingerprint = assembly.experiment.train, assembly.data.fingerprint
    if reference is not None and not reference.is_complete and saved.latest is not None:  # further sets to evaluate
        reference.compute(_initial(assembly, weights)[0], resumes=True, beat=beat)
    found = _restored(assembly, saved, back)
    if found is None:
        state, message = _initial(assembly, weights)
        if reference is not None:
            lines = message, reference.compute(state, resumes=False, beat=beat)
            message = "\n".join(filter(None, lines)) or None
            fingerprint = reference.fingerprint(fingerprint)
        progress = Progress.of(train, assembly.toml, {"fingerprint": fingerprint})
        progress.bad.went(back)
        return state, progress, message
    if reference is not None:
        fingerprint = reference.fingerprint(fingerprint)
    state, record = found
    check_record(record, saved.directory / str(int(state.consumed)))
    if record["fingerprint"] != fingerprint:
        dated = assembly.experiment.data.format in TEMPLATED
        raise ExperimentError(
            f"{saved.directory.parent} was trained on other data (fingerprint {record['fingerprint']}, now "
            f"{fingerprint}): restore [data] as it was, or choose another `name`. The standard library's text "
            "differs between Python versions."
            + " A chat template may write the day: give that of the run's first start in data.chat_date." * dated
            + ("" if reference is None else f" The reference of the answers is part of it: restore {reference.file}.")
        )
    progress = Progress.of(train, assembly.toml, record)
    progress.bad.went(back)
    progress.skipped = progress.skips_seen = int(jax.device_get(state.skipped))
    if progress.kept is not None and progress.kept.step and progress.kept.step not in saved.steps:
        notice(f"the best checkpoint, {progress.kept.step}, is not there: the next evaluation is the best again")
        progress.kept = Best(progress.kept.metric)
    return state, progress, None


def _initial(assembly: Assembly, weights: InitialWeights | None) -> tuple[TrainState, str | None]:
    """Make the state that the run starts from, and a line about weights that are read."""
    if weights is None:
        return assembly.state(), None
    return weights.load(assembly.state(), assembly.config, assembly.plan)


def _restored(assembly: Assembly, saved: Checkpoints, back: GoBack | None) -> tuple[TrainState, dict[str, Any]] | None:
    """Restore the newest complete state, or the newest before those that the run goes back from; None without one."""
    if back is not None:
        step = max((one for one in saved.steps if one < back.before), default=None)
        return None if step is None else saved.restore(assembly.abstract_state(), step)
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
            if visit.health.leaves_out(visit.progress.done + 1):  # the run went back from it
                state, metrics = visit.health.without_step(state), None
            else:
                state, metrics = train_step(state, batch)
            visit.after(state, batch, metrics)
    return state
