"""Tables and progress for people: with colour on a terminal, plain elsewhere."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from jdp.foresight.foresee import PlanReport


class Progress(Bar):
    """Shows compilation progress on stderr: a bar on a terminal, else lines. Stdout is for the result."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self.add_task("")

    def compiling(self, done: int, total: int | None, name: str) -> None:
        """Show that `done` of `total` steps (None: unknown) are compiled, and that `name` is next."""
        is_last = total is not None and done >= total
        self._show(done, total, "" if is_last else f"compiling {name}, or finding it in the cache")

    def running(self, done: int, total: int, name: str) -> None:
        """Show that `done` of `total` runs are done, and that `name` is next."""
        self._show(done, total, f"running {name}" if done < total else "")

    def _show(self, done: int, total: int | None, text: str) -> None:
        self.update(self._bar, description=text, total=total, completed=done)
        if text and not self.console.is_terminal:
            number = f"[{done + 1}/{total}] " if total is not None and total > 1 else ""
            print(f"{number}{text}", file=sys.stderr, flush=True)


def show_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> None:
    """Print a table with the row `marked` in bold. A narrow terminal gets the transposed table."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=250)
    table = _table(title, headers, rows)
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        transposed = list(zip(headers, *rows, strict=True))
        table = _table(title, transposed[0], transposed[1:])
        if marked is not None:
            table.columns[marked + 1].style = "bold green"
    elif marked is not None:
        table.rows[marked].style = "bold green"
    console.print(table)


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def show_plan(report: PlanReport, name: str, described: str) -> None:
    """Print a report's tables, then its sentences."""
    marked = None if report.choice is None else report.estimates.index(report.choice)
    print(f"{name} on {report.devices} devices ({report.target}): {described}; per device and step\n")
    tables = {"Memory at the peak": report.memory_table(), "Traffic and time (simulated)": report.speed_table()}
    for title, (headings, *rows) in tables.items():
        show_table(title, headings, rows, marked=marked)
        print()
    print(*report.sentences, sep="\n")
