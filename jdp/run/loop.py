"""The training loop of `jdp train`, read top to bottom.

1. Assemble the run, claim its folder, make the state or restore the newest checkpoint.
2. Step. Reading and transfer run ahead of the devices, and so does Python, by `AHEAD` steps. Every `log_every` steps
   write a row of metrics, every `eval_every` evaluate, every `checkpoint_every` save a checkpoint in the background.
   `health` looks at every step; after too many bad ones in a row it has the run go back to 1, and leave them out.
3. Leave, at the end or early at a signal, with a checkpoint of the last step.

`step` in metrics and checkpoints counts batches consumed: the optimizer's steps and the skipped ones.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jdp.base.formatting import finite_or_none
from jdp.base.notices import notice
from jdp.checkpoint import Checkpoints
from jdp.core.compiling.persistent_cache import kept_in
from jdp.core.state import TrainState
from jdp.core.update.noise_scale import hint, ratio
from jdp.data.feed import Feed
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import to_toml
from jdp.experiment.memory_check import check_state, check_weights_and_batch
from jdp.experiment.optimizer import learning_rate, peak_rate
from jdp.experiment.plugins import folder_of, names_used
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.guard.bad_steps import RollBack
from jdp.guard.deadline import Deadline
from jdp.guard.watch import Watch, watching
from jdp.run.bad_steps import Health, went_back
from jdp.run.evaluation import Best, coverage, evaluate
from jdp.run.folder import SUMMARY, changed, claimed, record, record_summary, writing
from jdp.run.in_bucket import at_hand
from jdp.run.initial_weights import check_init_from
from jdp.run.outputs import trackers
from jdp.run.outputs.history import devices_of, recorded
from jdp.run.outputs.metrics import Metrics, json_safe, numbers
from jdp.run.outputs.profiler import Profile
from jdp.run.outputs.terminal import Display
from jdp.run.progress import Progress
from jdp.run.resume import open_checkpoints, start
from jdp.run.signals import Stopped, StopRequest
from jdp.run.summary import summary


def run(
    experiment: Experiment,
    *,
    root: Path,
    quiet: bool = False,
    profile: range | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, or resume, an experiment in `root`/NAME, and return its summary, which is also in its summary.json."""
    trackers.check_installed(**experiment.track.model_dump())
    with StopRequest() as stop:  # from here on a signal is never lost; until the first step it leaves at once
        assembly = Assembly.on_devices(experiment)
        check_weights_and_batch(assembly)
        _ = assembly.config, assembly.eval_sets  # errors of model and data come before anything is written
        check_init_from(experiment)
        check_state(assembly)
        return _visit(assembly, stop, root=root, quiet=quiet, profile=profile, settings=settings)


def _visit(
    assembly: Assembly,
    stop: StopRequest,
    *,
    root: Path,
    quiet: bool,
    profile: range | None,
    settings: Sequence[str],
) -> dict[str, Any]:
    """Claim the run's folder, train in it until the end or a stop, and return the summary. Raises as `run` does."""
    experiment, progress = assembly.experiment, Progress()
    limits = Deadline(experiment.guard.deadline_seconds, experiment.guard.first_deadline_seconds)
    with (
        at_hand(root, experiment.name) as here,
        claimed(experiment, here) as folder,
        writing(folder),
        watching(folder, limits, devices_of(assembly.mesh), done=lambda: progress.done) as watch,
    ):
        for line in settings:
            notice(line)
        stop.on_signal = lambda number: watch.flight.event("signal", signal=number.name)
        back: RollBack | None = None
        while True:
            with open_checkpoints(experiment, folder) as saved:
                with watch.during("restore"):
                    state, progress, weights_read = start(assembly, saved, back)
                display = Display(experiment.train.steps, done=progress.done, to_stderr=quiet)
                said = [went_back(back, progress.done)] if back else _introduction(assembly)
                for line in filter(None, (*said, weights_read, _resumed(progress, experiment, folder))):
                    display.say(line)
                try:
                    return _train(assembly, state, progress, folder, profile, display, saved, stop, watch)
                except RollBack as error:
                    back = error.with_traceback(None)  # its frames hold the state
                    if stop.signal:
                        display.say(f"stopped by {stop.signal.name} while going back ({back}); run again to resume")
                        summed = summary(assembly, progress, folder) | {"stopped": stop.signal.name}
                        raise Stopped(stop.exit_code, summed) from None


def _train(
    assembly: Assembly,
    state: TrainState,
    progress: Progress,
    folder: Path,
    profile: range | None,
    display: Display,
    saved: Checkpoints,
    stop: StopRequest,
    watch: Watch,
) -> dict[str, Any]:
    """Train from `state` until the end or a stop, and return the summary. Raises as `run` does, and RollBack."""
    experiment = assembly.experiment
    resumes = progress.done > 0 and not progress.finished(experiment)
    differing = changed(experiment, folder) if resumes and jax.process_index() == 0 else {}
    if resumes:
        record(experiment, folder)
    config = tomllib.loads(to_toml(experiment))
    tracks = {} if progress.finished(experiment) else experiment.track.model_dump()
    tracked = trackers.start(folder, config, resumed_step=progress.done, **tracks)
    with (
        Metrics(folder, resumed_step=progress.done, trackers=tracked) as metrics,
        display,
        Profile(profile, folder, display, done=progress.done) as profiled,
        recorded(folder, experiment, progress, assembly.mesh, differing),
    ):
        state = _loop(assembly, state, progress, Outputs(display, metrics, saved, stop, profiled, watch))
        if stop.signal:
            display.say(f"stopped by {stop.signal.name} after step {progress.done}, saved; run again to resume")
            raise Stopped(stop.exit_code, summary(assembly, progress, folder) | {"stopped": stop.signal.name})
    with watch.during("sample"):
        text = assembly.sample(state)
    if text is not None:
        display.say(f"sample:\n{text}")
    results = summary(assembly, progress, folder)
    if assembly.experiment.train.noise_scale:
        measured = jax.device_get(state.sync["noise"])
        results["noise_scale"] = finite_or_none(float(ratio(measured)))
        display.say(hint(measured, assembly.unit))
    if progress.done > progress.resumed_from or not (folder / SUMMARY).exists():
        record_summary(json_safe(results), folder)
    return results


def _introduction(assembly: Assembly) -> list[str | None]:
    """Return the first lines of a visit: model and plan, data, evaluations, learning rate, compiled programs."""
    experiment = assembly.experiment
    first = f"{experiment.name}: {assembly.parameter_count:,} parameters, {assembly.plan}"
    if experiment.train.wrt is not None:
        first += f"; {assembly.trained_count:,} are trained, the others frozen"
    kept = f"compiled programs are kept in {folder} (--no-cache: not)" if (folder := kept_in()) else None
    return [first, _plugin(experiment), str(assembly.data), coverage(assembly), _scaled_rate(experiment), kept]


def _plugin(experiment: Experiment) -> str | None:
    """Return the line about a run's plug-in: where it is, and what of it is used; None for a run without."""
    if experiment.plugin is None:
        return None
    used = [f"{key} {name}" for key, name in names_used(experiment).items()]
    return f"plug-in {experiment.plugin} ({folder_of(experiment.plugin)}): {', '.join(used) or 'nothing of it is used'}"


def _resumed(progress: Progress, experiment: Experiment, folder: Path) -> str | None:
    """Return the line of a visit that goes on with a run; None for a new one."""
    if not progress.finished(experiment):
        return f"resumed after step {progress.done}" if progress.done else None
    early = ", stopped early" if progress.done < experiment.train.steps else ""
    return f"{folder} has all of its {progress.done} steps{early}: nothing to do (--name NEW starts another run)"


def _scaled_rate(experiment: Experiment) -> str | None:
    """Return the line about a peak learning rate that is scaled to the batch size; None for one that is not."""
    chosen, batch = experiment.optimizer, experiment.train.batch_size
    if chosen.lr_scaling == "none":
        return None
    return (
        f"learning rate {peak_rate(experiment):.4g}: {chosen.lr:.4g} for {chosen.base_batch_size} samples a step, "
        f"scaled to {batch} ({chosen.lr_scaling})"
    )


@dataclass(frozen=True)
class Outputs:
    """Where a run's results go, and where requests to stop come from."""

    display: Display
    metrics: Metrics
    checkpoints: Checkpoints
    stop: StopRequest
    profile: Profile
    watch: Watch
    started: float = field(default_factory=time.perf_counter)

    def goes_on(self) -> bool:
        """Return whether an evaluation goes on after a batch."""
        self.watch.batch()
        return not self.stop.poll()


def _loop(assembly: Assembly, state: TrainState, progress: Progress, out: Outputs) -> TrainState:
    """Step until the end, an early stop or a signal; return the state of the last step, which is saved."""
    experiment, settings, clock = assembly.experiment, assembly.experiment.train, Clock(assembly)
    watch, health = out.watch, Health(assembly, progress, out.watch, out.display.say)
    _evaluate_if_due(assembly, state, progress, out)  # a signal may have come between a step and its evaluation
    if progress.finished(experiment):
        return state
    batches = assembly.feed(
        assembly.data.train, seed=experiment.seed, shuffle=experiment.data.shuffle, start=progress.done
    )
    with batches as feed:
        watch.resumed(progress.done)
        clock.restart(progress.done, feed)
        for done in range(progress.done + 1, settings.steps + 1):
            if out.profile.begin(done, state):
                clock.restart(done - 1, feed)
            batch = next(feed)
            watch.mark("data")
            state, values = health.take(state, batch, done)
            out.stop.under_way()
            watch.mark("dispatch")
            health.after(state, done)
            progress.done = done
            out.display.step(done)
            stopping = out.stop.at_step(done)
            last = stopping or done == settings.steps
            row_due = last or done % settings.log_every == 0 or _may_stop_early(progress, settings)
            if values is not None:  # None: the step was left out
                clock.tick(done, values, feed, row_due)
                if row_due:
                    clock.log(done, values, feed, progress, out, health.row(values))
            watch.mark("wait")
            profiled = out.profile.end(done, state)
            watch.step(done)
            evaluated = not stopping and _evaluate_if_due(assembly, state, progress, out)
            if profiled or evaluated:
                clock.restart(done, feed)
                health.restart()
            stopping = out.stop.signal is not None
            last = last or stopping or progress.stops_early(experiment)
            best = progress.kept is not None and progress.kept.step == done
            if last or best or (settings.checkpoint_every and done % settings.checkpoint_every == 0):
                health.check_all(state, ended=last and not stopping)
                has_metrics = progress.evaluated == done and progress.kept is not None
                with watch.during("save"):
                    out.checkpoints.save(state, progress.record(), progress.evals if has_metrics else None)
                health.restart()
            if last:
                break
        with watch.during("wait"):
            out.checkpoints.wait()
    progress.seconds = time.perf_counter() - out.started
    return state


def _evaluate_if_due(assembly: Assembly, state: TrainState, progress: Progress, out: Outputs) -> bool:
    """Evaluate after this step if the experiment asks for it and it was not done yet; return True if it was now."""
    settings, done = assembly.experiment.train, progress.done
    if not _evaluation_due(done, settings) or progress.evaluated == done:
        return False
    with out.watch.during("eval"):
        row = evaluate(assembly, state, out.goes_on)
    if row is None:
        return False
    progress.evals, progress.evaluated = row, done
    progress.watched.seen(done, row, min_delta=settings.min_delta)
    if progress.kept is not None and done not in out.checkpoints.steps:  # what is saved already cannot become the best
        progress.kept.seen(done, row)
    out.metrics.write(done, row)
    out.display.log(done, row)
    if progress.stops_early(assembly.experiment):
        out.display.say(f"stopped early: {_no_improvement(progress.watched, settings)}")
    return True


def _evaluation_due(done: int, settings: Train) -> bool:
    """Return True if step `done` is followed by an evaluation."""
    return done > 0 and (done >= settings.steps or bool(settings.eval_every and done % settings.eval_every == 0))


def _may_stop_early(progress: Progress, settings: Train) -> bool:
    """Return True if the evaluation after this step may end the run: a run's last step has a row of metrics."""
    return 0 < settings.stop_after <= progress.watched.waiting + 1 and _evaluation_due(progress.done, settings)


def _no_improvement(best: Best, settings: Train) -> str:
    if best.value is None:
        return f"{best.metric} has not been finite in {best.waiting} evaluations"
    enough = f" by more than train.min_delta = {settings.min_delta:g}" if settings.min_delta else ""
    return (
        f"{best.metric} has not improved{enough} in {best.waiting} evaluations; its best was {best.value:.6g} at step "
        f"{best.step}"
    )


class Clock:
    """Measures the steps since the last row of metrics.

    The first step of a process compiles: only a row of its own includes it, which is left out of the summary's speed.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._rate = learning_rate(assembly.experiment)
        self._speed, self._units_per_step = f"{assembly.unit}_per_second", assembly.units_per_step
        self._at_peak = assembly.seconds_at_peak
        self._from: tuple[int, float, float] = (0, 0.0, 0.0)
        self._first, self._compiled = True, False

    def tick(self, done: int, values: Any, feed: Feed, row_due: bool) -> None:
        """Wait for the first step of a process, and count from there on unless it gets a row; others pass."""
        if not self._first:
            return
        self._first, self._compiled = False, row_due
        jax.block_until_ready(values)
        if not row_due:
            self.restart(done, feed)

    def restart(self, done: int, feed: Feed) -> None:
        """Count from step `done` and from now on."""
        self._from = (done, time.perf_counter(), feed.wait_seconds)

    def log(
        self, done: int, values: Any, feed: Feed, progress: Progress, out: Outputs, more: Mapping[str, float]
    ) -> None:
        """Write a row: the metrics of this step, times as means over the steps since the last row, and `more`."""
        row = numbers(values)
        since, start, waited = self._from
        steps, seconds, wait = done - since, time.perf_counter() - start, feed.wait_seconds - waited
        progress.loss, progress.skipped = row["loss"], int(row["skipped"])
        row["skipped"] = progress.skipped
        row["lr"] = float(jax.device_get(self._rate(max(done - progress.skipped - 1, 0))))
        row |= {"step_seconds": seconds / steps, "data_wait_seconds": wait / steps, **more}
        row[self._speed] = self._units_per_step * steps / seconds
        if self._at_peak is not None:
            row["mfu"] = self._at_peak * steps / seconds
        if not self._compiled:
            progress.steady_seconds += seconds
            progress.waited += wait
            progress.steady_units += self._units_per_step * steps
        self._compiled = False
        out.metrics.write(done, row)
        shown = ("loss", "accuracy", "lr", "grad_norm", self._speed, "mfu", *["skipped"] * (progress.skipped > 0))
        out.display.log(done, {name: row[name] for name in shown if name in row})
        self.restart(done, feed)
