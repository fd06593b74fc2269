"""How a run looks while it goes on: a progress bar on a terminal, a plain line per log elsewhere; process 0 only."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jdp.base.formatting import format_rate


class Display:
    """Shows the progress of a run."""

    def __init__(self, steps: int, *, done: int = 0, to_stderr: bool = False) -> None:
        self._steps, self._first = steps, done
        self._started: tuple[int, float] | None = None
        self._speaks = jax.process_index() == 0
        self._console = Console(
            file=sys.stderr if to_stderr else sys.stdout, highlight=False, emoji=False, soft_wrap=True
        )
        self._bar: Progress | None = None
        if self._speaks and self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[shown]}"))
            self._bar = Progress(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task("", total=steps, completed=done, shown="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int) -> None:
        """Move the bar to a step that is done, or queued on the devices. Reads nothing from them."""
        if self._started is None:  # the first step of a process compiles; the pace is measured after it
            self._started = (step, time.monotonic())
        if self._bar:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show metrics, such as loss, lr and tokens_per_second, in the order given."""
        shown = "  ".join([*(_shown(name, value) for name, value in values.items()), *self._time_to_go(step)])
        if self._bar:
            self._bar.update(self._task, completed=step, shown=shown)
        else:
            self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {shown}")

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._speaks:
            self._console.print(text, markup=False)

    def _time_to_go(self, step: int) -> list[str]:
        if self._started is None or step <= self._started[0] or step >= self._steps:
            return []
        first, since = self._started
        seconds = (time.monotonic() - since) / (step - first) * (self._steps - step)
        return [f"{clock(seconds)} to go"]


def clock(seconds: float) -> str:
    """Return seconds as a clock shows them: 75 is "1:15", 3700 is "1:01:40"."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def _shown(name: str, value: float) -> str:
    if name.endswith("_per_second"):
        return f"{format_rate(value)} {name.removesuffix('_per_second')}/s"
    return f"{name} {value:.2e}" if name == "lr" else f"{name} {value:.4g}"
