"""The training loop of `jdp train`, read top to bottom.

1. Assemble the run, claim its folder, make the state or restore the newest checkpoint.
2. Step. Reading and transfer run ahead of it; so does Python, by two steps at most. Every `log_every` steps a row of
   metrics, every `eval_every` an evaluation, every `checkpoint_every` a checkpoint in the background.
3. Leave: at the end, or early at a signal, always with a checkpoint of the last step.

`step` in metrics and checkpoints counts batches consumed: the optimizer's steps and the skipped ones.
"""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jdp.checkpoint import Checkpoints
from jdp.core.state import TrainState
from jdp.data.feed import Feed
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, to_toml
from jdp.experiment.memory_check import check_state, check_weights_and_batch
from jdp.experiment.optimizer import learning_rate, peak_rate
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.models import ModelConfig, parameter_count
from jdp.run.evaluation import Best, coverage, evaluate
from jdp.run.folder import SUMMARY, claimed, record, record_summary, writing
from jdp.run.initial_weights import check_init_from
from jdp.run.outputs import trackers
from jdp.run.outputs.metrics import Metrics, json_safe
from jdp.run.outputs.profiler import Profile
from jdp.run.outputs.terminal import Display
from jdp.run.resume import Progress, open_checkpoints, start
from jdp.run.signals import Stopped, StopRequest
from jdp.run.summary import sample, summary, unit, units_per_step

AHEAD = 2
"""Steps that may be queued on the devices before the loop waits."""


def run(experiment: Experiment, *, root: Path, quiet: bool = False, profile: range | None = None) -> dict[str, Any]:
    """Train, or resume, an experiment in `root`/NAME, and return a summary, which is in its summary.json too.

    Args:
        experiment: validated, and checked against the devices.
        root: the folder that holds the runs.
        quiet: keep stdout free: progress goes to stderr.
        profile: steps to trace into the run's folder.

    Raises:
        ExperimentError: the folder belongs to another experiment or cannot be written, the data does not fit the model
            or changed, what it needs does not fit into memory, or a tracker does not start.
        Diverged: too many steps in a row had non-finite gradients, or the last ones.
        Stopped: by a signal, after saving: exit code 130 for SIGINT, 75 (try again) for SIGTERM.
    """
    trackers.check_installed(**experiment.track.model_dump())
    assembly = Assembly.on_devices(experiment)
    check_weights_and_batch(assembly)
    config, _ = assembly.config, assembly.eval_sets  # whatever is wrong with them is said before anything is written
    check_init_from(experiment)
    check_state(assembly)
    with (
        claimed(experiment, root) as folder,
        StopRequest() as stop,
        writing(folder),
        open_checkpoints(experiment, folder) as saved,
    ):
        state, progress, read = start(assembly, saved)
        display = Display(experiment.train.steps, done=progress.done, to_stderr=quiet)
        for line in (*_introduction(assembly, config), read, _resumed(progress, experiment, folder)):
            if line:
                display.say(line)
        if progress.done and not progress.finished(experiment):
            record(experiment, folder)
        tracked = _trackers(experiment, folder, progress)
        with (
            Metrics(folder, resumed_step=progress.done, trackers=tracked) as metrics,
            display,
            Profile(profile, folder, display, done=progress.done) as profiled,
        ):
            state = _loop(assembly, state, progress, Outputs(display, metrics, saved, stop, profiled))
            if stop.signal:
                display.say(f"stopped by {stop.signal.name} after step {progress.done}, saved; run again to resume")
                raise Stopped(stop.exit_code, summary(assembly, progress, folder) | {"stopped": stop.signal.name})
        text = sample(assembly, state)
        if text is not None:
            display.say(f"sample:\n{text}")
        made = summary(assembly, progress, folder)
        if progress.done > progress.resumed_from or not (folder / SUMMARY).exists():
            record_summary(json_safe(made), folder)
    return made


def _trackers(experiment: Experiment, folder: Path, progress: Progress) -> list[trackers.BackgroundTracker]:
    """W&B and MLflow, where the experiment asks for them and there is something to tell them."""
    wanted = {} if progress.finished(experiment) else experiment.track.model_dump()
    return trackers.start(folder, tomllib.loads(to_toml(experiment)), resumed_step=progress.done, **wanted)


def _introduction(assembly: Assembly, config: ModelConfig) -> list[str | None]:
    """What a visit starts with, a line each."""
    experiment = assembly.experiment
    first = f"{experiment.name}: {parameter_count(config):,} parameters, {assembly.plan}"
    if assembly.wrt is not None:
        first += f"; {assembly.trained_count:,} are trained, the others frozen"
    return [first, str(assembly.data), coverage(assembly), _scaled_rate(experiment)]


def _resumed(progress: Progress, experiment: Experiment, folder: Path) -> str | None:
    """Where this visit goes on, in words."""
    if not progress.finished(experiment):
        return f"resumed after step {progress.done}" if progress.done else None
    early = ", stopped early" if progress.done < experiment.train.steps else ""
    return f"{folder} has all of its {progress.done} steps{early}: nothing to do (--name NEW starts another run)"


def _scaled_rate(experiment: Experiment) -> str | None:
    """The peak learning rate in words, where the batch size changed it."""
    chosen, batch = experiment.optimizer, experiment.train.batch_size
    if chosen.lr_scaling == "none":
        return None
    return (
        f"learning rate {peak_rate(experiment):.4g}: {chosen.lr:.4g} for {chosen.base_batch_size} samples a step, "
        f"scaled to {batch} ({chosen.lr_scaling})"
    )


@dataclass(frozen=True)
class Outputs:
    """Where a run's results go, and where the wish to stop comes from."""

    display: Display
    metrics: Metrics
    checkpoints: Checkpoints
    stop: StopRequest
    profile: Profile
    started: float = field(default_factory=time.perf_counter)


def _loop(assembly: Assembly, state: TrainState, progress: Progress, out: Outputs) -> TrainState:
    """Steps until the end, an early stop or a signal; the state returned is saved."""
    experiment, settings, clock = assembly.experiment, assembly.experiment.train, Clock(assembly)
    skips = Skips(progress, settings.max_skips_in_a_row)
    _evaluate_if_due(assembly, state, progress, out)  # a signal may have come between a step and its evaluation
    if progress.finished(experiment):
        return state
    batches = assembly.feed(
        assembly.data.train, seed=experiment.seed, shuffle=experiment.data.shuffle, start=progress.done
    )
    with batches as feed:
        clock.restart(progress.done, feed)
        for done in range(progress.done + 1, settings.steps + 1):
            if out.profile.begin(done, state):
                clock.restart(done - 1, feed)
            state, values = assembly.train_step(state, next(feed))
            skips.after(values)
            progress.done = done
            out.display.step(done)
            stopping = out.stop.at_step(done)
            last = stopping or done == settings.steps
            row_due = last or done % settings.log_every == 0 or _may_stop_early(progress, settings)
            clock.tick(done, values, feed, row_due)
            if row_due:
                clock.log(done, values, feed, progress, out)
            profiled = out.profile.end(done, state)
            evaluated = not stopping and _evaluate_if_due(assembly, state, progress, out)
            if profiled or evaluated:
                clock.restart(done, feed)
            last = last or progress.stops_early(experiment)
            best = progress.kept is not None and progress.kept.step == done
            if last:
                skips.check_all(ended=not stopping)
            if last or best or (settings.checkpoint_every and done % settings.checkpoint_every == 0):
                _save(state, progress, out)
            if last:
                break
        out.checkpoints.wait()
    progress.seconds = time.perf_counter() - out.started
    return state


def _save(state: TrainState, progress: Progress, out: Outputs) -> None:
    """A checkpoint, in the background; with the metrics of this step's evaluation, if there was one."""
    metrics = progress.evals if progress.evaluated == progress.done and progress.kept is not None else None
    out.checkpoints.save(state, progress.record(), metrics)


def _evaluate_if_due(assembly: Assembly, state: TrainState, progress: Progress, out: Outputs) -> bool:
    """Evaluate after this step, if the experiment asks for it and it was not done; whether it did."""
    settings, done = assembly.experiment.train, progress.done
    if not _evaluation_due(done, settings) or progress.evaluated == done:
        return False
    row = evaluate(assembly, state)
    progress.evals, progress.evaluated = row, done
    progress.watched.seen(done, row, min_delta=settings.min_delta)
    if progress.kept is not None and done not in out.checkpoints.steps:  # what is saved already cannot become the best
        progress.kept.seen(done, row)
    out.metrics.write(done, row)
    out.display.log(done, row)
    if progress.stops_early(assembly.experiment):
        out.display.say(_stopped_early(progress.watched, settings))
    return True


def _evaluation_due(done: int, settings: Train) -> bool:
    """Whether step `done` is followed by an evaluation."""
    return done > 0 and (done >= settings.steps or bool(settings.eval_every and done % settings.eval_every == 0))


def _may_stop_early(progress: Progress, settings: Train) -> bool:
    """Whether the evaluation after this step may be the one that ends the run: its step gets a row of metrics first,
    as a run's last step has one."""
    return 0 < settings.stop_after <= progress.watched.waiting + 1 and _evaluation_due(progress.done, settings)


def _stopped_early(best: Best, settings: Train) -> str:
    """Why, in words."""
    if best.value is None:
        return f"stopped early: {best.metric} has not been finite in {best.waiting} evaluations"
    enough = f" by more than train.min_delta = {settings.min_delta:g}" if settings.min_delta else ""
    return (
        f"stopped early: {best.metric} has not improved{enough} in {best.waiting} evaluations; its best was "
        f"{best.value:.6g} at step {best.step}"
    )


class Clock:
    """Times of the steps since the last row of metrics. The first step of a process compiles: only a row of its own
    includes it, and such a row is left out of the summary's speed.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._rate = learning_rate(assembly.experiment)
        self._speed, self._units_per_step = f"{unit(assembly)}_per_second", units_per_step(assembly)
        self._at_peak = assembly.seconds_at_peak
        self._from: tuple[int, float, float] = (0, 0.0, 0.0)
        self._first, self._compiled = True, False

    def tick(self, done: int, values: Any, feed: Feed, row_due: bool) -> None:
        """After each step."""
        if not self._first:
            return
        self._first, self._compiled = False, row_due
        jax.block_until_ready(values)
        if not row_due:
            self.restart(done, feed)

    def restart(self, done: int, feed: Feed) -> None:
        """Count from here on."""
        self._from = (done, time.perf_counter(), feed.wait_seconds)

    def log(self, done: int, values: Any, feed: Feed, progress: Progress, out: Outputs) -> None:
        """Write a row: the metrics of this step, times as means over the steps since the last row."""
        row = {name: float(value) for name, value in jax.device_get(values).items()}
        since, start, waited = self._from
        steps, seconds, wait = done - since, time.perf_counter() - start, feed.wait_seconds - waited
        progress.loss, progress.skipped = row["loss"], int(row["skipped"])
        row["skipped"] = progress.skipped
        row["lr"] = float(jax.device_get(self._rate(max(done - progress.skipped - 1, 0))))
        row |= {"step_seconds": seconds / steps, "data_wait_seconds": wait / steps}
        row[self._speed] = self._units_per_step * steps / seconds
        if self._at_peak is not None:
            row["mfu"] = self._at_peak * steps / seconds
        if not self._compiled:
            progress.add_times(seconds, wait, self._units_per_step * steps)
        self._compiled = False
        out.metrics.write(done, row)
        shown = ("loss", "accuracy", "lr", "grad_norm", self._speed, "mfu", *["skipped"] * (progress.skipped > 0))
        out.display.log(done, {name: row[name] for name in shown if name in row})
        self.restart(done, feed)


class Diverged(ExperimentError):
    """The gradients stopped being finite: on all processes alike."""


class Skips:
    """Watches for steps that were skipped because a gradient was not finite.

    Looking at a step waits for it, so each is looked at `AHEAD` steps later.
    """

    def __init__(self, progress: Progress, limit: int) -> None:
        self._progress, self._limit = progress, limit
        self._looked_at = progress.resumed_from
        self._pending: list[Any] = []

    def after(self, values: Any) -> None:
        """A step was queued; `values` are its metrics."""
        self._pending.append({name: values[name] for name in ("skipped", "loss", "weight")})
        if len(self._pending) > AHEAD:
            self._check(self._pending.pop(0))

    def check_all(self, *, ended: bool) -> None:
        """Look at all steps that were queued. A run that has `ended` must not have done so in a streak of skipped
        steps, however short the run: two in a row, or all but the first, whose update may be what broke the weights.
        """
        values: Any = None
        while self._pending:
            values = self._pending.pop(0)
            self._check(values)
        progress = self._progress
        streak, skipped = progress.skips_in_a_row, progress.skips_seen
        if ended and values is not None and streak and (streak > 1 or skipped >= progress.done - 1):
            raise Diverged(_skipped(streak, values, from_the_first=skipped == progress.done, last=True))

    def _check(self, values: Any) -> None:
        progress, skipped = self._progress, int(values["skipped"])
        self._looked_at += 1
        progress.skips_in_a_row = progress.skips_in_a_row + 1 if skipped > progress.skips_seen else 0
        progress.skips_seen = skipped
        if progress.skips_in_a_row >= self._limit:
            steps = progress.skips_in_a_row
            raise Diverged(_skipped(steps, values, from_the_first=skipped == self._looked_at))


def _skipped(steps: int, values: Any, *, from_the_first: bool, last: bool = False) -> str:
    """What is wrong when `steps` steps in a row were skipped; the `last` ones, or as many as the limit."""
    which = "and the run ended with them" if last else "train.max_skips_in_a_row"
    loss, weight = (float(value) for value in jax.device_get((values["loss"], values["weight"])))
    if weight == 0:
        return (
            f"the weights of the last of {steps} step{'s in a row' * (steps > 1)} that changed nothing ({which}) sum "
            "to 0, so it had no example to learn from: look at the data's weights, masks and padding"
        )
    said = f"the gradients of {steps} step{'s in a row' * (steps > 1)} were not finite ({which}), loss {loss:.4g}"
    if from_the_first:
        return (
            f"{said}: from the first step on, before any update, so it is not the learning rate. Look for NaN, "
            'infinity or huge numbers in the data, at weights from train.init_from, or try precision = "fp32"; no '
            "weights were changed"
        )
    return f"{said}: lower optimizer.lr, set optimizer.clip_norm, or look at the data; checkpoints stay as they are"
