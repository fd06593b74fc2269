"""The training loop of `jdp train`, read top to bottom.

1. Assemble the run, claim its folder, make the state or restore the newest checkpoint.
2. Step. Reading and transfer run ahead of it; so does Python, by two steps at most. Every `log_every` steps a row of
   metrics, every `eval_every` an evaluation, every `checkpoint_every` a checkpoint in the background.
3. Leave: at the end, or early at a signal, always with a checkpoint of the last step.

`step` in metrics and checkpoints counts batches consumed: the optimizer's steps and the skipped ones.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jdp.assemble import Assembly
from jdp.checkpoint import Checkpoints
from jdp.data import decode, encode, global_batches
from jdp.data.feed import Feed, process_rows, shard_batches
from jdp.experiment import ExperimentError, learning_rate
from jdp.metrics import Metrics
from jdp.models import generate, parameter_count
from jdp.progress import Display
from jdp.run_folder import claim, record
from jdp.schema import Experiment
from jdp.signals import StopRequest
from jdp.state import TrainState
from jdp.types import Batch

AHEAD = 2
"""Steps that may be queued on the devices before the loop waits."""


def run(experiment: Experiment, *, root: Path, quiet: bool = False) -> dict[str, Any]:
    """Train, or resume, an experiment in `root`/NAME, and return a summary.

    Args:
        experiment: validated, and checked against the devices.
        root: the folder that holds the runs.
        quiet: keep stdout free: progress goes to stderr.

    Raises:
        ExperimentError: the folder belongs to another experiment, the data changed, or too many steps in a row had
            non-finite gradients.
        SystemExit: stopped by a signal, after saving: 130 for SIGINT, 75 (try again) for SIGTERM.
    """
    parts = Assembly.on_devices(experiment)
    config, data = parts.config, parts.data  # whatever is wrong with them is said before anything is written
    folder = claim(experiment, root)
    with StopRequest() as stop, Checkpoints(folder / "checkpoints", keep=experiment.train.keep_checkpoints) as saved:
        state, progress = _start(parts, saved)
        display = Display(experiment.train.steps, done=progress.done, to_stderr=quiet)
        display.say(f"{experiment.name}: {parameter_count(config):,} parameters, {parts.plan}")
        display.say(str(data))
        if progress.done >= experiment.train.steps:
            display.say(f"{folder} has all of its {progress.done} steps: nothing to do (--name NEW starts another run)")
        elif progress.done:
            display.say(f"resumed after step {progress.done}")
            record(experiment, folder)
        with Metrics(folder, resumed_step=progress.done) as metrics, display:
            state = _loop(parts, state, progress, Outputs(display, metrics, saved, stop))
        if stop.signal:
            display.say(f"stopped by {stop.signal.name} after step {progress.done}, saved; run again to resume")
            raise SystemExit(stop.exit_code)
        text = _sample(parts, state)
        if text is not None:
            display.say(f"sample:\n{text}")
    return _summary(parts, progress, folder)


@dataclass
class Progress:
    """How far a run is. The first six are saved with each checkpoint.

    Attributes:
        done: batches consumed.
        skipped: of these, steps skipped because of gradients that were not finite.
        loss: at the last row of metrics, in nats a token.
        eval_loss: of the last evaluation, in nats a token.
        evaluated: the step of that evaluation.
        fingerprint: of the text.
        resumed_from: batches consumed before this visit.
        seconds: of this visit's loop.
        waited, steady_seconds, steady_tokens: of this visit's steps, compilation and evaluation left out.
        skips_in_a_row, skips_seen: up to the step that was looked at last.
    """

    done: int = 0
    skipped: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    evaluated: int = 0
    fingerprint: str = ""
    resumed_from: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    steady_seconds: float = 0.0
    steady_tokens: int = 0
    skips_in_a_row: int = 0
    skips_seen: int = 0

    def add_times(self, seconds: float, waited: float, tokens: int) -> None:
        self.steady_seconds += seconds
        self.waited += waited
        self.steady_tokens += tokens

    def record(self) -> dict[str, Any]:
        kept = ("done", "skipped", "loss", "eval_loss", "evaluated", "fingerprint")
        return {name: _finite(getattr(self, name)) for name in kept}


@dataclass(frozen=True)
class Outputs:
    """Where a run's results go, and where the wish to stop comes from."""

    display: Display
    metrics: Metrics
    checkpoints: Checkpoints
    stop: StopRequest
    started: float = field(default_factory=time.perf_counter)


def _start(parts: Assembly, saved: Checkpoints) -> tuple[TrainState, Progress]:
    """A fresh state, or the newest checkpoint's on this plan."""
    fingerprint = parts.data.fingerprint
    if saved.latest is None:
        return parts.state(), Progress(fingerprint=fingerprint)
    state, record = saved.restore(parts.abstract_state())
    if record["fingerprint"] != fingerprint:
        raise ExperimentError(
            f"{saved.directory.parent} was trained on other text (fingerprint {record['fingerprint']}, now "
            f"{fingerprint}): restore data.source as it was, or choose another `name`. The standard library's text "
            "differs between Python versions."
        )
    skipped = int(jax.device_get(state.skipped))
    progress = Progress(**record, skips_seen=skipped, resumed_from=record["done"])
    progress.skipped = skipped
    return state, progress


def _loop(parts: Assembly, state: TrainState, progress: Progress, out: Outputs) -> TrainState:
    """Steps until the end or a signal; the state returned is saved."""
    settings, clock = parts.experiment.train, Clock(parts.experiment)
    pending: list[Any] = []
    _evaluate_if_due(parts, state, progress, out)  # a signal may have come between a step and its evaluation
    with _training_batches(parts, progress.done) as feed:
        clock.restart(progress.done, feed)
        for done in range(progress.done + 1, settings.steps + 1):
            state, values = parts.train_step(state, next(feed))
            pending.append(values["skipped"])
            if len(pending) > AHEAD:
                _check_skips(pending.pop(0), progress, settings.max_skips_in_a_row)
            progress.done = done
            out.display.step(done)
            stopping = out.stop.at_step(done)
            last = stopping or done == settings.steps
            row_due = last or done % settings.log_every == 0
            clock.tick(done, values, feed, row_due)
            if row_due:
                clock.log(done, values, feed, progress, out)
            if not stopping and _evaluate_if_due(parts, state, progress, out):
                clock.restart(done, feed)
            if last or (settings.checkpoint_every and done % settings.checkpoint_every == 0):
                out.checkpoints.save(state, progress.record())
            if stopping:
                break
        out.checkpoints.wait()
    progress.seconds = time.perf_counter() - out.started
    return state


def _evaluate_if_due(parts: Assembly, state: TrainState, progress: Progress, out: Outputs) -> bool:
    """Evaluate after this step, if the experiment asks for it and it was not done; whether it did."""
    settings, done = parts.experiment.train, progress.done
    due = done >= settings.steps or (settings.eval_every and done % settings.eval_every == 0)
    if not due or not done or progress.evaluated == done:
        return False
    progress.eval_loss, progress.evaluated = _evaluate(parts, state), done
    row = {"eval_loss": progress.eval_loss, "eval_bits_per_token": progress.eval_loss / math.log(2)}
    out.metrics.write(done, row)
    out.display.log(done, row)
    return True


class Clock:
    """Times of the steps since the last row of metrics. The first step of a process compiles: only a row of its own
    includes it, and such a row is left out of the summary's speed.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._rate = learning_rate(experiment)
        self._tokens_per_step = experiment.train.batch_size * experiment.data.length
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
        row["tokens_per_second"] = self._tokens_per_step * steps / seconds
        if not self._compiled:
            progress.add_times(seconds, wait, self._tokens_per_step * steps)
        self._compiled = False
        out.metrics.write(done, row)
        shown = ("loss", "lr", "grad_norm", "tokens_per_second")
        out.display.log(done, {name: row[name] for name in shown})
        self.restart(done, feed)


def _training_batches(parts: Assembly, start: int) -> Feed:
    chosen, rows = parts.experiment, process_rows(parts.plan, parts.experiment.train.batch_size)
    batches = global_batches(
        parts.data.train,
        batch_size=chosen.train.batch_size,
        seed=chosen.seed,
        rows=rows,
        start=start,
        shuffle=chosen.data.shuffle,
    )
    return shard_batches(batches, parts.plan)


def _heldout_batches(parts: Assembly) -> Iterator[Batch]:
    settings, plan = parts.experiment.train, parts.plan
    rows = process_rows(plan, settings.batch_size)
    batches = global_batches(  # always the same samples, drawn from all of the held-out text
        parts.data.heldout, batch_size=settings.batch_size, seed=0, rows=rows, epochs=1
    )
    with shard_batches(itertools.islice(batches, settings.eval_batches), plan) as feed:
        yield from feed


def _evaluate(parts: Assembly, state: TrainState) -> float:
    """Σtotal / Σweight over the held-out batches, in nats a token."""
    total = weight = 0.0
    for batch in _heldout_batches(parts):
        values = jax.device_get(parts.eval_step(state, batch))
        total += float(values["loss"]) * float(values["weight"])
        weight += float(values["weight"])
    return total / weight


def _check_skips(skipped: jax.Array, progress: Progress, limit: int) -> None:
    """Count skipped steps in a row; reading this waits for a step that was queued `AHEAD` steps ago."""
    progress.skips_in_a_row = progress.skips_in_a_row + 1 if int(skipped) > progress.skips_seen else 0
    progress.skips_seen = int(skipped)
    if progress.skips_in_a_row >= limit:
        raise ExperimentError(
            f"the gradients of {limit} steps in a row were not finite (train.max_skips_in_a_row): lower optimizer.lr, "
            "set optimizer.clip_norm, or look at the data; weights and checkpoints are those from before"
        )


def _sample(parts: Assembly, state: TrainState) -> str | None:
    """Text that the model writes, prompt included; None if the experiment asks for none."""
    wanted = parts.experiment.sample
    if wanted is None:
        return None

    def write(state: TrainState, prompt: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(parts.rng, 2)  # 0 and 1 are the weights' and the steps'
        return generate(
            state.model, prompt, length=wanted.length, temperature=wanted.temperature, top_k=wanted.top_k, rng=rng
        )

    tokens = jax.jit(write, out_shardings=parts.plan.replicated)(state, encode(wanted.prompt)[None])
    return decode(jax.device_get(tokens)[0])


def _summary(parts: Assembly, progress: Progress, folder: Path) -> dict[str, Any]:
    chosen = parts.experiment
    speed = progress.steady_tokens / progress.steady_seconds if progress.steady_seconds else None
    waited = progress.waited / progress.steady_seconds if progress.steady_seconds else None
    bits = None if progress.eval_loss is None else progress.eval_loss / math.log(2)
    return {
        "name": chosen.name,
        "steps": progress.done,
        "final_loss": progress.loss,
        "final_eval_loss": progress.eval_loss,
        "final_eval_bits_per_token": bits,
        "seconds": progress.seconds,
        "tokens_per_second": speed,
        "data_wait_fraction": waited,
        "devices": parts.mesh.devices.size,
        "processes": jax.process_count(),
        "strategy": chosen.strategy,
        "partitioning": parts.train_step.partitioning,
        "parameters": parameter_count(parts.config),
        "skipped": progress.skipped,
        "resumed_from": progress.resumed_from,
        "folder": str(folder),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
