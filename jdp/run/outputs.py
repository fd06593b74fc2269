"""What a run shows and writes beside its metrics: lines and a progress bar, a trace of some steps, samples of text."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jdp.base.errors import UserError
from jdp.base.formatting import escaped, format_bytes, format_rate, wrapped
from jdp.base.toml import cut
from jdp.core.sharding.mesh import tracing_on
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.models.decode import Draw, continued
from jdp.run.metrics import SAMPLES, replace_file

_BETWEEN = "  "
_NO_BREAK = "\xa0"  # within an item, which a narrow terminal does not break


class Display:
    """A plain line per log, on a terminal above a progress bar; process 0 only."""

    def __init__(self, steps: int, *, done: int = 0, to_stderr: bool = False) -> None:
        self._steps = steps
        self._started: tuple[int, float] | None = None
        self._speed = ""
        self._speaks = jax.process_index() == 0
        stream = sys.stderr if to_stderr else sys.stdout
        self._console = Console(file=stream, highlight=False, emoji=False, soft_wrap=True)
        self._is_terminal = self._speaks and self._console.is_terminal
        first, last = "step {task.completed:.0f}/{task.total:.0f}", "{task.fields[pace]}"
        columns = (TextColumn(first), BarColumn(), TextColumn(last))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done, pace="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int) -> None:
        """Move the bar to a step that is done, or queued on the devices. Reads nothing from the devices."""
        if self._started is None:  # the first step of a process compiles; the pace is measured after it
            self._started = (step, time.monotonic())
        pace = _BETWEEN.join(filter(None, (*self._time_to_go(step), self._speed)))
        self._bar.update(self._task, completed=step, pace=pace)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show metrics, such as loss, lr and tokens_per_second, in this order."""
        items = [_shown(name, value) for name, value in values.items()]
        self._speed = next((item for item in items if item.endswith("/s")), self._speed)
        items = [f"step {step:>{len(str(self._steps))}}/{self._steps}", *items, *self._time_to_go(step)]
        self.say(_BETWEEN.join(item.replace(" ", _NO_BREAK) for item in items))

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        text = wrapped(escaped(text), self._console.width) if self._is_terminal else text
        self._print(text.replace(_NO_BREAK, " "))

    def show_text(self, title: str, text: str) -> None:
        """Print a model's text above the bar; on a terminal without control characters."""
        self.say(f"{title}:")
        self._print(escaped(text) if self._is_terminal else text)

    def _print(self, text: str) -> None:
        if self._speaks:
            self._console.print(text, markup=False)

    def _time_to_go(self, step: int) -> list[str]:
        if self._started is None or step <= self._started[0] or step >= self._steps:
            return []
        first, since = self._started
        seconds = (time.monotonic() - since) / (step - first) * (self._steps - step)
        return [f"{clock(seconds)} to go"]


def clock(seconds: float) -> str:
    """Format seconds like a clock: 75 is "1:15", 3700 is "1:01:40"."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def _shown(name: str, value: float) -> str:
    if name.endswith("_per_second"):
        return f"{format_rate(value)} {name.removesuffix('_per_second')}/s"
    return f"{name} {value:.2e}" if name == "lr" else f"{name} {value:.4g}"


PROFILES = "profile"


def profiled_steps(text: str | None, of: int) -> range | None:
    """Parse `--profile`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18})\s*(?::\s*(\d{1,18})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= of:
        rule = f"--profile takes FIRST:LAST, or one step, from 1 to train.steps = {of}"
        raise UserError(f"{rule}; given {cut(repr(text))}: write it like 10:13")
    return range(first, last + 1)


class Profile:
    """Traces `steps` of a visit into RUN/profile; the loop calls `begin` before and `end` after every step.

    Only process 0 traces, because all devices do the same. The trace begins when all earlier work is done and ends when
    the last step's state is ready. `with` around the loop also stops it if a signal or an error ends the run.
    """

    def __init__(self, steps: range | None, folder: Path, display: Display, *, done: int = 0) -> None:
        self._folder, self._say = folder / PROFILES, display.say
        self._left = range(0) if steps is None else range(max(steps[0], done + 1), steps[-1] + 1)
        self._traced: list[int] = []
        self._running = False
        self._annotation = contextlib.ExitStack()
        if steps is not None and not self._left:
            display.say(f"nothing to profile: step {steps[-1]} is done, this visit starts after step {done}")
        if jax.process_index() != 0:
            self._left = range(0)

    def begin(self, step: int, state: Any) -> bool:
        """Call before `step` is queued. Returns True if tracing starts, after waiting for the earlier steps."""
        starts = step in self._left and not self._running
        if starts:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._running = True
        if self._running:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
        return starts

    def end(self, step: int, state: Any) -> bool:
        """Call after `step` is queued. Returns True if tracing ended, after waiting for the step."""
        if not self._running:
            return False
        self._annotation.close()
        self._traced.append(step)
        if step != self._left[-1]:
            return False
        jax.block_until_ready(state)
        self._stop()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._annotation.close()
            self._stop()

    def _stop(self) -> None:
        self._running, self._left = False, range(0)
        jax.profiler.stop_trace()
        files = sorted(self._folder.glob("plugins/profile/*/*"), key=lambda file: file.stat().st_mtime)
        newest = [file for file in files if file.parent == files[-1].parent]
        traces = [file for file in newest if file.name.endswith(".trace.json.gz")]
        opened = f": open {traces[0]} at https://ui.perfetto.dev, or" if traces else ":"
        steps = f"steps {self._traced[0]} to {self._traced[-1]}" if self._traced else "the step that failed"
        self._say(
            f"profiled {steps}, {format_bytes(sum(file.stat().st_size for file in newest))}{opened} "
            f"`pip install xprof && xprof --logdir {self._folder}`"
        )


def write_samples(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the texts of a step into a run's folder, completely or not at all; process 0 only."""
    if not rows or jax.process_index() != 0:
        return
    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(folder / SAMPLES / f"{step}.jsonl", text)


class SampleWriter:
    """Writes the text of [sample]; its program is compiled once, and the model stays sharded by the plan.

    Draws depend only on the run's seed, so sampling a step again gives the same text.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def rows(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Return a row for each prompt: step, prompt, and the text, which begins with the prompt.

        It uses the averaged parameters if the run has them. Tokens unknown to the tokenizer are left out.
        """
        if self._assembly.experiment.sample is None:
            return []
        rows, data = list[dict[str, Any]](), self._assembly.inputs.data
        state = self._assembly.training.averaged(state)
        for prompt, tokens in self._assembly.inputs.prompts.items():
            drawn = np.asarray(jax.device_get(self._continue(state, *tokens)))[0]
            shown = np.concatenate([data.tokenizer.encode(prompt), drawn])  # without the token that opens a text
            rows.append({"step": step, "prompt": prompt, "text": data.tokenizer.decode(shown[shown < data.vocab_size])})
        return rows

    @functools.cached_property
    def _continue(self) -> Callable[[TrainState, NDArray[np.int32], np.int32], jax.Array]:
        """The function that continues a prompt: `table.length` tokens, or as many as fit into the context, [1, n]."""
        training, table = self._assembly.training, self._assembly.experiment.sample
        assert table is not None
        rng = jax.random.fold_in(training.rng, 2)  # a constant: the same draws at every step

        @functools.partial(jax.jit, out_shardings=training.plan.replicated)
        def continue_prompt(state: TrainState, tokens: jax.Array, end: jax.Array) -> jax.Array:
            length = min(table.length, training.config.context - tokens.shape[1])
            with tracing_on(training.mesh):
                return continued(state.model, tokens, end, rng, length=length, draw=Draw())

        return continue_prompt
