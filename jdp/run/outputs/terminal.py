"""The display of a run: a plain line per log, on a terminal above a progress bar; process 0 only."""

import sys
import time
from collections.abc import Mapping
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jdp.base.formatting import escaped, format_rate, wrapped

_BETWEEN = "  "


class Display:
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
        self._print(_in_lines(items, self._console.width) if self._is_terminal else _BETWEEN.join(items))

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self._print(wrapped(escaped(text), self._console.width) if self._is_terminal else text)

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


def _in_lines(items: list[str], width: int) -> str:
    """Put items into lines of at most `width`; later lines are indented."""
    lines = [items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}{_BETWEEN}{item}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"    {item}")
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    if name.endswith("_per_second"):
        return f"{format_rate(value)} {name.removesuffix('_per_second')}/s"
    return f"{name} {value:.2e}" if name == "lr" else f"{name} {value:.4g}"
