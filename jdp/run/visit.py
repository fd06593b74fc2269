"""The work around each step of a visit: reading, metrics, evaluations, checkpoints, signals, the trace, the watch.

The loop calls `before` and `after`.
"""

from __future__ import annotations

import contextlib
import time
import tomllib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from jdp.base.notices import end_of_start
from jdp.checkpoint import Checkpoints
from jdp.checkpoint.errors import is_passing
from jdp.checkpoint.retrying import retried
from jdp.core.state import TrainState
from jdp.core.types import Batch
from jdp.data.feed import Feed
from jdp.experiment.assembly import Assembly
from jdp.experiment.samples import Writer
from jdp.guard.watch import Watch
from jdp.run.bad_steps import Health
from jdp.run.evaluation import evaluate
from jdp.run.export import export
from jdp.run.folder import SUMMARY, Claim, changed, record, record_summary
from jdp.run.outputs import samples, trackers
from jdp.run.outputs.history import recorded
from jdp.run.outputs.metrics import Metrics, json_safe, numbers
from jdp.run.outputs.profiler import Profile
from jdp.run.outputs.terminal import Display
from jdp.run.progress import Progress
from jdp.run.signals import Stopped, StopRequest
from jdp.run.summary import ending, introduction, summary


class Visit:
    """A visit of a run from a restored state on: its folder, outputs, checkpoints, stop request, trace and watch.

    Attributes:
        assembly: the objects of the run.
        progress: how far the run is.
        ended: whether the last step of the visit is done.
    """

    metrics: Metrics
    profile: Profile

    def __init__(
        self,
        assembly: Assembly,
        progress: Progress,
        claim: Claim,
        checkpoints: Checkpoints,
        stop: StopRequest,
        watch: Watch,
        *,
        quiet: bool,
    ) -> None:
        self.assembly, self.progress, self.folder, self._claim = assembly, progress, claim.folder, claim
        self.checkpoints, self.stop, self.watch = checkpoints, stop, watch
        self.experiment = assembly.experiment
        self.ended = progress.finished(self.experiment)
        self._writer = Writer(assembly)
        self.display = Display(self.experiment.train.steps, done=progress.done, to_stderr=quiet)
        self.health = Health(assembly, progress, watch, self.display.say)
        self._clock = Clock(assembly)
        self._feed: Feed
        self._started = 0.0

    # The beginning and the end.

    def introduce(self, weights_read: str | None) -> None:
        """Print the first lines of the visit."""
        done, train = self.progress.done, self.experiment.train
        resumed = f"resumed after step {done}" if done else None
        if self.ended:
            early = ", stopped early" if done < train.steps else ""
            resumed = f"{self.folder} has all of its {done} steps{early}: nothing to do (--name NEW starts another run)"
        for line in filter(None, (*introduction(self.assembly), weights_read, resumed)):
            self.display.say(line)

    @contextlib.contextmanager
    def recorded(self, profile: range | None) -> Generator[None]:
        """Open the outputs while in `with`: metrics, trackers, progress bar, trace and history."""
        experiment, folder, done, toml = self.experiment, self.folder, self.progress.done, self.assembly.toml
        resumes = done > 0 and not self.ended
        differing = changed(folder, toml) if resumes and jax.process_index() == 0 else {}
        if not self.ended:
            record(toml, folder)
        wandb = None if self.ended else experiment.train.wandb
        tracked = trackers.start(folder, tomllib.loads(toml), wandb=wandb, resumed_step=done)
        with (
            Metrics(folder, resumed_step=done, trackers=tracked, patiently=self._write) as self.metrics,
            self.display,
            Profile(profile, folder, self.display, done=done) as self.profile,
            recorded(folder, experiment, self.progress, self.assembly.mesh, differing),
        ):
            self._started = time.perf_counter()
            yield

    @contextlib.contextmanager
    def feed(self) -> Generator[None]:
        """Read batches ahead while in `with`, if there are steps to take."""
        if self.ended:
            yield
            return
        done = self.progress.done
        with self.assembly.train_feed(done, self.progress.samples) as self._feed:
            self.watch.resumed(done)
            self._clock.restart(done, self._feed)
            yield
        self.progress.seconds = time.perf_counter() - self._started

    def stopped(self, when: str) -> Stopped:
        """Print that a signal stopped the run, and return the exception that ends the process."""
        assert self.stop.signal is not None
        name = self.stop.signal.name
        self.display.say(f"stopped by {name} {when}; run again to resume")
        return Stopped(self.stop.exit_code, summary(self.assembly, self.progress, self.folder) | {"stopped": name})

    def finish(self, state: TrainState) -> dict[str, Any]:
        """Print the sample, export the model, and return the summary, which is written if this visit took steps.

        The state is given up.
        """
        progress, say = self.progress, self.display.say
        self._sample(state, "sample")
        results = summary(self.assembly, progress, self.folder)
        if progress.done > progress.resumed_from or not (self.folder / SUMMARY).exists():
            record_summary(json_safe(results), self.folder)
        if self.experiment.train.export is not None:
            with self.watch.during("export"):
                say(export(self.assembly, state, progress, self.checkpoints, self.folder))
        for line in ending(self.assembly, progress, self.folder):
            say(line)
        return results

    # A step.

    def before(self, state: TrainState) -> Batch:
        """Return the batch of the next step, with everything ready for it."""
        step = self.progress.done + 1
        if self.profile.begin(step, state):
            self._clock.restart(self.progress.done, self._feed)
        batch = next(self._feed)
        self.watch.mark("data")
        self.health.before()
        return batch

    def after(self, state: TrainState, batch: Batch, values: Any) -> None:
        """Log, evaluate and save after a step, as each is due; `values` are its metrics."""
        progress, train, step = self.progress, self.experiment.train, self.progress.done + 1
        self.health.taken(batch, values, step)
        self.stop.under_way()
        self.watch.mark("dispatch")
        self.health.after(state, step)
        progress.done, progress.samples = step, progress.samples + train.batch_size
        self.display.step(step)
        end_of_start()
        last = self.stop.at_step(step) or step == train.steps
        may_stop = 0 < train.stop_after <= progress.watched.waiting + 1 and self._evaluation_due()
        row_due = last or step % train.log_every == 0 or may_stop  # a run's last step has a row
        self._clock.tick(step, values, self._feed, row_due)
        if row_due:
            self._log(step, values)
        self.watch.mark("wait")
        profiled = self.profile.end(step, state)
        self.watch.step(step)
        made = self.stop.signal is None and any([self.evaluate(state), self.sample(state)])
        if profiled or made:
            self._restart()
        stopping = self.stop.signal is not None
        self.ended = last or stopping or progress.stops_early(self.experiment)
        if (every := self.experiment.guard.keep_in_memory) and step % every == 0 and not self.ended:
            self._keep_in_memory(state)  # also where it is saved: until that is in storage a restart needs it
        best = progress.kept is not None and progress.kept.step == step
        if self.ended or best or (train.checkpoint_every and step % train.checkpoint_every == 0):
            self._save(state, ended=self.ended and not stopping)
        if self.ended:
            with self.watch.during("wait"):
                self._save_patiently(state, wait=True)

    def _log(self, step: int, values: Any) -> None:
        """Write and show a row: the metrics of this step, and times as means over the steps since the last row."""
        hosts = self.health.row(values)
        row, progress = numbers(values), self.progress
        progress.loss, progress.skipped = row["loss"], int(row["skipped"])
        row["skipped"] = progress.skipped
        row |= self._clock.row(step, self._feed, progress, hosts)
        self.metrics.write(step, row)
        speed = self._clock.speed
        shown = (
            "loss",
            "accuracy",
            "lr",
            "grad_norm",
            speed,
            "mfu",
            *["skipped"] * (progress.skipped > 0),
        )
        self.display.log(step, {name: row[name] for name in shown if name in row})
        self._clock.restart(step, self._feed)

    def _save(self, state: TrainState, *, ended: bool) -> None:
        self.health.check_all(state, ended=ended)
        with self.watch.during("save"):
            self._claim.check()
            self._save_patiently(state)
        self.health.restart()

    def _keep_in_memory(self, state: TrainState) -> None:
        self.health.check_all(state)
        with self.watch.during("save"):
            self.checkpoints.save_in_memory(state, self.progress.record(), step=self.progress.done)
        self.health.restart()

    def _save_patiently(self, state: TrainState, *, wait: bool = False) -> None:
        """Save in the background, or wait for it to end; after passing trouble save this state, and wait.

        The error of a save may be that of the one before, whose state is gone. Several processes are not in step after
        an error: they end, to be started again.
        """
        progress = self.progress
        measured = progress.evals if progress.evaluated == progress.done and progress.kept is not None else None

        def save(again: bool) -> None:
            self.checkpoints.save(state, progress.record(), measured)  # once it is saved this waits
            if again or wait:
                self.checkpoints.wait()

        if jax.process_count() > 1:
            save(False)
        else:
            self._patient(save)

    def _write(self, action: Callable[[], None]) -> None:
        """Write a row of metrics, again while the disk is full."""

        def write(_: bool) -> None:
            try:
                action()
            except OSError as error:  # of an open file, which it does not name
                raise OSError(error.errno, error.strerror, str(self.folder)) from error

        self._patient(write)

    def _patient(self, action: Callable[[bool], None]) -> None:
        retried(action, passes=is_passing, say=self.display.say, stops=lambda: self.stop.heard)

    def _restart(self) -> None:
        """Leave what was no step out of the steps' times."""
        self._clock.restart(self.progress.done, self._feed)
        self.health.restart()

    # An evaluation.

    def evaluate(self, state: TrainState) -> bool:
        """Evaluate if it is due after this step and was not done yet; return True if it was now."""
        progress, done = self.progress, self.progress.done
        if not self._evaluation_due() or progress.evaluated == done:
            return False
        with self.watch.during("eval"):
            row = evaluate(self.assembly, state, self._goes_on)
        if row is None:
            return False
        progress.evals, progress.evaluated = row, done
        progress.watched.seen(done, row)
        if progress.kept is not None and done not in self.checkpoints.steps:  # a saved step cannot become the best
            progress.kept.seen(done, row, newest=True)
        made_up = done == progress.resumed_from  # perhaps not for the first time: the checkpoint precedes it
        (self.metrics.replace_evaluation if made_up else self.metrics.write)(done, row)
        self.display.log(done, row)
        if progress.stops_early(self.experiment):
            self.display.say(f"stopped early: {progress.watched.no_improvement()}")
            self.ended = True
        return True

    def sample(self, state: TrainState) -> bool:
        """Write text if it is due after this step and the run goes on; return True if it was written.

        After a restart it is written again.
        """
        table, done = self.experiment.sample, self.progress.done
        if table is None or not table.every or not done or done % table.every or self.ended:
            return False
        if self.stop.signal is not None or self.progress.finished(self.experiment):
            return False  # the resume does it, or `finish`
        self._sample(state, f"sample of step {done}")
        return True

    def _sample(self, state: TrainState, title: str) -> None:
        """Have the model write, and show and keep the text."""
        done = self.progress.done
        with self.watch.during("sample"):
            rows = self._writer.rows(state, done)
        self._write(lambda: samples.write(self.folder, done, rows))
        for row in rows:
            self.display.show_text(title, row["text"])

    def _evaluation_due(self) -> bool:
        """Return whether this step is followed by an evaluation."""
        done, train = self.progress.done, self.experiment.train
        return done > 0 and (done >= train.steps or bool(train.eval_every and done % train.eval_every == 0))

    def _goes_on(self) -> bool:
        """Return whether an evaluation continues after a batch."""
        self.watch.batch()
        return not self.stop.poll()


class Clock:
    """Measures the steps since the last row of metrics.

    The first step of a process compiles, and so does the first of another batch size or length. Only a row of its own
    includes it, which is left out of the summary's speed.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.speed = f"{assembly.unit}_per_second"
        self._rate, self._units_per_step = assembly.learning_rate, assembly.units_per_step
        self._at_peak = assembly.seconds_at_peak
        self._from: tuple[int, float, float] = (0, 0.0, 0.0)
        self._first, self._compiled = True, False

    def tick(self, done: int, values: Any, feed: Feed, row_due: bool) -> None:
        """Wait for a step that compiles, and count from there on unless it gets a row; others pass."""
        if not self._first:
            return
        self._first, self._compiled = False, row_due
        jax.block_until_ready(values)
        if not row_due:
            self.restart(done, feed)

    def restart(self, done: int, feed: Feed) -> None:
        """Count from step `done` and from now on."""
        self._from = (done, time.perf_counter(), feed.wait_seconds)

    def row(self, done: int, feed: Feed, progress: Progress, hosts: Mapping[str, float]) -> dict[str, float]:
        """Return a row's learning rate, times, `hosts` and speed; its times count in the visit's."""
        since, start, waited = self._from
        steps, seconds, wait = done - since, time.perf_counter() - start, feed.wait_seconds - waited
        rate = float(jax.device_get(self._rate(max(done - progress.skipped - 1, 0))))
        row = {"lr": rate, "step_seconds": seconds / steps, "data_wait_seconds": wait / steps, **hosts}
        units = self._units_per_step * steps
        row[self.speed] = units / seconds
        at_peak = None if self._at_peak is None else self._at_peak * steps
        if at_peak is not None:
            row["mfu"] = at_peak / seconds
        if not self._compiled:
            progress.steady_seconds += seconds
            progress.waited += wait
            progress.steady_units += units
            progress.steady_at_peak += at_peak or 0.0
        self._compiled = False
        return row
