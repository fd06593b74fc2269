"""The display of a run: a plain line per log, on a terminal above a progress bar; process 0 only."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import jax
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from jdp.base.formatting import escaped, format_rate, wrapped

_BETWEEN = "  "
_SHORTEST_BAR, _LONGEST_BAR = 8, 40


class Display:
    """Shows the progress of a run."""

    def __init__(self, steps: int, *, done: int = 0, to_stderr: bool = False) -> None:
        self._steps, self._first = steps, done
        self._started: tuple[int, float] | None = None
        self._speed = ""
        self._speaks = jax.process_index() == 0
        self._console = Console(
            file=sys.stderr if to_stderr else sys.stdout, highlight=False, emoji=False, soft_wrap=True
        )
        self._bar: Progress | None = None
        if self._speaks and self._console.is_terminal:
            self._bar = Progress(_Line(self), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int) -> None:
        """Move the bar to a step that is done, or queued on the devices. Reads nothing from the devices."""
        if self._started is None:  # the first step of a process compiles; the pace is measured after it
            self._started = (step, time.monotonic())
        if self._bar:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show metrics, such as loss, lr and tokens_per_second, in this order."""
        if self._bar:
            self._bar.update(self._task, completed=step)
        items = [_shown(name, value) for name, value in values.items()]
        self._speed = next((item for item in items if item.endswith("/s")), self._speed)
        items = [f"step {step:>{len(str(self._steps))}}/{self._steps}", *items, *self._time_to_go(step)]
        self._print(_BETWEEN.join(items) if self._bar is None else _in_lines(items, self._console.width))

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self._print(text if self._bar is None else wrapped(escaped(text), self._console.width))

    def show_text(self, title: str, text: str) -> None:
        """Print a model's text above the bar; on a terminal without control characters."""
        self.say(f"{title}:")
        self._print(text if self._bar is None else escaped(text))

    def bar(self, done: int) -> str:
        """Return the bar, at most as wide as the terminal: the step, a bar, speed and time to go.

        Items that do not fit are dropped, the last first; no number is cut.
        """
        width = self._console.width - 1
        items = [f"step {done}/{self._steps}"]
        for item in (*self._time_to_go(done), self._speed):
            if item and len(_BETWEEN.join([*items, item])) <= width:
                items.append(item)
        room = width - len(_BETWEEN.join(items)) - len(_BETWEEN)
        if room >= _SHORTEST_BAR:
            items.insert(1, self._drawn(done, min(room, _LONGEST_BAR)))
        return _BETWEEN.join(items)

    def _drawn(self, done: int, width: int) -> str:
        full, empty = "#-" if self._console.options.ascii_only else "━╌"
        filled = width * min(done, self._steps) // self._steps
        return full * filled + empty * (width - filled)

    def _print(self, text: str) -> None:
        if self._speaks:
            self._console.print(text, markup=False)

    def _time_to_go(self, step: int) -> list[str]:
        if self._started is None or step <= self._started[0] or step >= self._steps:
            return []
        first, since = self._started
        seconds = (time.monotonic() - since) / (step - first) * (self._steps - step)
        return [f"{clock(seconds)} to go"]


class _Line(ProgressColumn):
    """The only column of a progress bar, which knows the total width."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        """Return the line of the bar."""
        return Text(self._display.bar(int(task.completed)), no_wrap=True)


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
