"""The work around each step of a visit: reading, metrics, evaluations, checkpoints, signals, the trace, the watch.

The loop calls `before` and `after`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
import tomllib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jdp.base.notices import end_of_start
from jdp.checkpoint import Checkpoints
from jdp.checkpoint.errors import is_passing, retried
from jdp.core.state import TrainState
from jdp.core.types import Batch
from jdp.data.feed import Feed
from jdp.experiment.assembly import Assembly
from jdp.guard.watch import Watch
from jdp.run.bad_steps import Health
from jdp.run.evaluation import Evaluation
from jdp.run.folder import SUMMARY, Claim, changed, record
from jdp.run.metrics import Metrics, json_safe, numbers, replace_file, start_tracker
from jdp.run.outputs import Display, Profile, SampleWriter, write_samples
from jdp.run.progress import Progress, devices_of, ending, introduction, summary
from jdp.run.signals import Stopped, StopRequest
from jdp.run.weights import export


@dataclass(kw_only=True)
class Visit:
    """A visit of a run from a restored state on: its folder, outputs, checkpoints, stop request, trace and watch."""

    assembly: Assembly
    progress: Progress
    claim: Claim
    checkpoints: Checkpoints
    stop: StopRequest
    watch: Watch
    display: Display
    metrics: Metrics = field(init=False)
    profile: Profile = field(init=False)

    def __post_init__(self) -> None:
        self.experiment, self.folder = self.assembly.experiment, self.claim.folder
        self.ended = self.progress.finished(self.experiment)  # the last step of the visit is done
        self.health = Health(self.assembly, self.progress, self.watch, self.display.say)
        self._evaluation, self._writer = Evaluation(self.assembly), SampleWriter(self.assembly)
        self._clock: Clock
        self._feed: Feed

    # The beginning and the end.

    def introduce(self, weights_read: str | None) -> None:
        done, train = self.progress.done, self.experiment.train
        resumed = f"resumed after step {done}" if done else None
        if self.ended:
            early = ", stopped early" if done < train.steps else ""
            resumed = f"{self.folder} has all of its {done} steps{early}: nothing to do (--name NEW starts another run)"
        for line in filter(None, (*introduction(self.assembly, self._evaluation.coverage), weights_read, resumed)):
            self.display.say(line)

    @contextlib.contextmanager
    def recorded(self, profile: range | None) -> Generator[None]:
        """Open the outputs while in `with`: metrics, trackers, progress bar and trace."""
        experiment, folder, done, toml = self.experiment, self.folder, self.progress.done, self.assembly.toml
        facts = devices_of(self.assembly.mesh)
        if not self.ended:
            if done and jax.process_index() == 0 and (differing := changed(folder, toml)):
                facts["changed"] = differing
            record(toml, folder)
        wandb = None if self.ended else experiment.train.wandb
        tracker = start_tracker(folder, tomllib.loads(toml), wandb=wandb, resumed_step=done)
        with (
            Metrics(
                folder, resumed_step=done, evaluates=self._evaluation_due(), tracker=tracker, patiently=self._write
            ) as self.metrics,
            self.display,
            Profile(profile, folder, self.display, done=done) as self.profile,
        ):
            if not self.ended:
                self.watch.resumed(done, **facts)
            yield

    @contextlib.contextmanager
    def feed(self) -> Generator[None]:
        """Read batches ahead while in `with`."""
        start = time.perf_counter()
        with self.assembly.inputs.train_feed(self.progress.done, self.progress.samples) as self._feed:
            self._clock = Clock(self.assembly, self.progress, self._feed)
            yield
        self.progress.seconds = time.perf_counter() - start

    def stopped(self, number: signal.Signals) -> Stopped:
        """Print that a signal stopped the run, and return the exception that ends the process."""
        self.display.say(f"stopped by {number.name} after step {self.progress.done}, saved; run again to resume")
        return Stopped(number, summary(self.assembly, self.progress, self.folder))

    def finish(self, state: TrainState) -> dict[str, Any]:
        """Print the sample, export the model, and return the summary, which is written if this visit took steps.

        The state is deleted.
        """
        progress, say = self.progress, self.display.say
        self._sample(state, "sample")
        results = summary(self.assembly, progress, self.folder)
        took_steps = progress.done > progress.resumed_from or not (self.folder / SUMMARY).exists()
        if took_steps and jax.process_index() == 0:
            replace_file(self.folder / SUMMARY, json.dumps(json_safe(results), indent=2, allow_nan=False) + "\n")
        if self.experiment.train.export is not None:
            with self.watch.during("export"):
                say(export(self.assembly, state, progress, self.checkpoints, self.folder))
        for line in ending(self.assembly, progress, self.folder):
            say(line)
        return results

    # A step.

    def before(self, state: TrainState) -> Batch:
        """Prepare the next step and return its batch."""
        if self.profile.begin(self.progress.done + 1, state):
            self._clock.restart()
        batch = next(self._feed)
        self.watch.mark("data")
        self.health.before()
        return batch

    def after(self, state: TrainState, batch: Batch, values: Any) -> None:
        """Do the duties after a step, in order; `values` are its metrics."""
        step = self.progress.done + 1
        self._check(step, state, batch, values)
        self._count(step)
        self._log(step, values)
        self._end_step(step, state)
        self._keep_in_memory(step, state)
        self._save(step, state)

    def _check(self, step: int, state: TrainState, batch: Batch, values: Any) -> None:
        """Check for bad steps, and for devices that differ."""
        self.health.taken(batch, values, step)
        self.stop.began = True
        self.watch.mark("dispatch")
        self.health.after(state, step)

    def _count(self, step: int) -> None:
        """Count the step, and determine whether it is the last of the visit."""
        progress, train = self.progress, self.experiment.train
        progress.done, progress.samples = step, progress.samples + train.batch_size
        self.display.step(step)
        end_of_start()
        self.ended = self.stop.at_step(step) or step == train.steps

    def _log(self, step: int, values: Any) -> None:
        """Write and show a row if due: this step's metrics, and mean times since the last row."""
        progress, train = self.progress, self.experiment.train
        may_stop = 0 < train.stop_after <= progress.watched.waiting + 1 and self._evaluation_due()
        due = self.ended or step % train.log_every == 0 or may_stop  # a run's last step has a row
        self._clock.tick(values, due)
        if due:
            hosts = self.health.row(values)
            row = numbers(values)
            progress.loss, progress.skipped = row["loss"], int(row["skipped"])
            row |= {"skipped": progress.skipped} | self._clock.row(hosts)
            self.metrics.write(step, row)
            shown = ["loss", "accuracy", "lr", "grad_norm", self._clock.speed, "mfu"]
            shown += ["skipped"] * (progress.skipped > 0)
            self.display.log(step, {name: row[name] for name in shown if name in row})
            self._clock.restart()
        self.watch.mark("wait")

    def _end_step(self, step: int, state: TrainState) -> None:
        """End the step and its trace, then evaluate and sample if due; a signal or the result may end the visit."""
        if self.profile.end(step, state):
            self._restart()
        self.watch.step(step)
        if self.stop.signal is None and any([self.evaluate(state), self.sample(state)]):
            self._restart()
        self.ended |= self.stop.signal is not None

    def _keep_in_memory(self, step: int, state: TrainState) -> None:
        """Copy the state into the hosts' memory, even if it is saved: a restart needs it until the save is complete."""
        every = self.experiment.guard.keep_in_memory
        if not every or step % every or self.ended:
            return
        self.health.check_all(state)
        with self.watch.during("save"):
            self.checkpoints.save_in_memory(state, self.progress.record(), step=step)
        self.health.restart()

    def _save(self, step: int, state: TrainState) -> None:
        """Save the state if a checkpoint is due, it is the best, or the visit ends; the end waits for the save."""
        progress, every = self.progress, self.experiment.train.checkpoint_every
        best = progress.kept is not None and progress.kept.step == step
        if not (self.ended or best or (every and step % every == 0)):
            return
        self.health.check_all(state, ended=self.ended and self.stop.signal is None)
        with self.watch.during("save"):
            self.claim.check()
            self._save_patiently(state)
        self.health.restart()
        if self.ended:
            with self.watch.during("wait"):
                self._save_patiently(state, wait=True)

    def _save_patiently(self, state: TrainState, *, wait: bool = False) -> None:
        """Save in the background, or wait for the save; after a temporary error save this state, and wait.

        The error may come from the previous save, whose state is gone. After an error several processes are no longer
        in step, so they end, to be restarted.
        """
        progress = self.progress
        measured = progress.evals if progress.evaluated == progress.done and progress.kept is not None else None

        def save(again: bool) -> None:
            self.checkpoints.save(state, progress.record(), measured)  # waits if this step is already saved
            if again or wait:
                self.checkpoints.wait()

        if jax.process_count() > 1:
            save(False)
        else:
            self._patient(save)

    def _write(self, action: Callable[[], None]) -> None:
        """Write a row of metrics; repeat while the disk is full."""

        def write(_: bool) -> None:
            try:
                action()
            except OSError as error:  # does not name the open file
                raise OSError(error.errno, error.strerror, str(self.folder)) from error

        self._patient(write)

    def _patient(self, action: Callable[[bool], None]) -> None:
        retried(action, passes=is_passing, say=self.display.say, stops=lambda: self.stop.heard is not None)

    def _restart(self) -> None:
        """Exclude work between steps from the steps' times."""
        self._clock.restart()
        self.health.restart()

    # An evaluation.

    def evaluate(self, state: TrainState) -> bool:
        """Evaluate if due after this step and not yet done; return True if evaluated."""
        progress, done = self.progress, self.progress.done
        if not self._evaluation_due():
            return False

        def goes_on() -> bool:
            self.watch.deadline.beat("evaluating")
            return not self.stop.poll()

        with self.watch.during("eval"):
            row = self._evaluation.of(state, goes_on)
        if row is None:
            return False
        progress.evals, progress.evaluated = row, done
        progress.watched.seen(done, row)
        if progress.kept is not None and done not in self.checkpoints.steps:  # a saved step cannot become the best
            progress.kept.seen(done, row, newest=True)
        self.metrics.write(done, row)
        self.display.log(done, row)
        if progress.stops_early(self.experiment):
            self.display.say(f"stopped early: {progress.watched.no_improvement()}")
            self.ended = True
        return True

    def sample(self, state: TrainState) -> bool:
        """Write text if due after this step and the run continues; return True if written.

        After a restart it is written again.
        """
        table, done = self.experiment.sample, self.progress.done
        is_due = table is not None and table.every and done and done % table.every == 0
        if not is_due or self.ended or self.stop.signal is not None or self.progress.finished(self.experiment):
            return False  # if it is due, the resume does it, or `finish`
        self._sample(state, f"sample of step {done}")
        return True

    def _sample(self, state: TrainState, title: str) -> None:
        """Let the model write a text; show and store it."""
        done = self.progress.done
        with self.watch.during("sample"):
            rows = self._writer.rows(state, done)
        self._write(lambda: write_samples(self.folder, done, rows))
        for row in rows:
            self.display.show_text(title, row["text"])

    def _evaluation_due(self) -> bool:
        done, train = self.progress.done, self.experiment.train
        is_due = done >= train.steps or (train.eval_every and done % train.eval_every == 0)
        return 0 < done != self.progress.evaluated and bool(is_due)


class Clock:
    """Measures the steps since the last row of metrics.

    The first step of a process compiles. Only a row for that step alone includes it; the summary's speed does not.
    """

    def __init__(self, assembly: Assembly, progress: Progress, feed: Feed) -> None:
        self.speed = f"{assembly.inputs.unit}_per_second"
        self._assembly, self._progress, self._feed = assembly, progress, feed
        self._first, self._compiled = True, False
        self.restart()

    def tick(self, values: Any, row_due: bool) -> None:
        """Wait for a step that compiles, and count from its end unless it gets a row; ignore other steps."""
        first, self._first = self._first, False
        self._compiled = first and row_due
        if first:
            jax.block_until_ready(values)
            if not row_due:
                self.restart()

    def restart(self) -> None:
        """Restart the count from the last step and the current time."""
        self._from = (self._progress.done, time.perf_counter(), self._feed.wait_seconds)

    def row(self, hosts: Mapping[str, float]) -> dict[str, float]:
        """Return a row's learning rate, times, `hosts` and speed; add its times to the visit's."""
        (since, start, waited), progress, assembly = self._from, self._progress, self._assembly
        steps, seconds, wait = progress.done - since, time.perf_counter() - start, self._feed.wait_seconds - waited
        rate = float(jax.device_get(assembly.training.learning_rate(max(progress.done - progress.skipped - 1, 0))))
        units, at_peak = assembly.inputs.units_per_step * steps, assembly.seconds_at_peak
        row = {"lr": rate, "step_seconds": seconds / steps, "data_wait_seconds": wait / steps, **hosts}
        row[self.speed] = units / seconds
        if at_peak is not None:
            row["mfu"] = at_peak * steps / seconds
        if not self._compiled:
            progress.steady_seconds += seconds
            progress.waited += wait
            progress.steady_units += units
            progress.steady_at_peak += (at_peak or 0.0) * steps
        return row
