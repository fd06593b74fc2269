"""Shared by the lessons: options, tables with explanations, pictures."""

import argparse
import contextlib
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jdp.base.formatting import align_columns
from jdp.report.charts import SETTINGS, chart, inline
from jdp.report.page import page

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def parser(program: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with `--picture`, whose help is the lesson's docstring.

    Args:
        program: the lesson's `__file__`.
        documentation: its `__doc__`.
    """
    mpl.rcParams.update(SETTINGS)  # titles and legends take their look when they are added, after `chart`
    name = Path(program)
    formatter = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(name.name, description=documentation, formatter_class=formatter)
    path = Path("runs", "lessons", f"{name.stem}.svg")
    made.add_argument("--picture", type=picture_file, default=path, metavar="FILE", help=f"SVG; default: {path}")
    return made


def picture_file(text: str) -> Path:
    """Return an option's path if an SVG can be written there: checked before the lesson's work."""
    path = Path(text)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"takes a file that ends in .svg; given {text}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"takes a file that can be written; given {text}")
    return path


def positive(text: str) -> float:
    """Return an option's number; argparse turns the error into a message and exit code 2. Raises ValueError."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number above 0; given {text}")
    return number


@contextlib.contextmanager
def collected_notices() -> Iterator[list[str]]:
    """Collect jdp's reports, which would appear between a lesson's tables; an exception prints them."""
    messages, logger = list[str](), logging.getLogger("jdp")
    collector, before = logging.Handler(), (logger.level, logger.propagate)
    collector.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(collector), logger.setLevel(logging.INFO)
    logger.propagate = False  # a library may have given the root logger a handler, which would print them too
    try:
        yield messages
    except BaseException:
        print(*messages, sep="\n", end="\n" * bool(messages), file=sys.stderr)
        raise
    finally:
        logger.removeHandler(collector), logger.setLevel(before[0])
        logger.propagate = before[1]


def tell(lesson: Callable[[], None]) -> None:
    """Run a lesson, and print jdp's reports below its tables."""
    with collected_notices() as messages:
        lesson()
    if messages:
        print("\nReported by jdp:", *messages, sep="\n  ")


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], *said: str) -> None:
    """Print a table under its title, floats with four digits, and its explanations below, a paragraph each."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    print(f"\n{title}", *align_columns([headers, *cells]), sep="\n  ")
    for paragraph in said:
        print(textwrap.fill(" ".join(paragraph.split()), 110))


def curves(title: str, x: tuple[str, Sequence[float]], y: str, series: Mapping[str, Sequence[float]]) -> Figure:
    """Return a chart of one panel with a line for each of `series`, over x: (what it is, its values)."""
    figure, (panel,) = chart()
    for name, values in series.items():
        panel.plot(x[1], values, label=name, marker="o" if len(values) < 12 else None)
    panel.set(title=title, xlabel=x[0], ylabel=y)
    panel.legend()
    return figure


def stacked(panel: Axes, title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar for each of `names`, made of `parts`: a part's name -> its height in each bar."""
    below = [0.0] * len(names)
    for part, heights in parts.items():
        panel.bar(names, heights, bottom=below, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    panel.set(title=title)
    panel.legend()


_FILE_STYLE = (
    "svg { --ink: #1b1f24; --faint: #59636e; --paper: #fff; background: var(--paper); } "
    "@media (prefers-color-scheme: dark) { svg { --ink: #e4e8ec; --faint: #9aa5b1; --paper: #14171b; } }"
)


def keep(figure: Figure, path: Path, described: str) -> None:
    """Write a picture as a self-contained SVG file and print its path."""
    text = str(inline(figure, described)).replace("</title>", f"</title><style>{_FILE_STYLE}</style>", 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("xlink:href", "href"), encoding="utf-8")
    print(f"\nwrote {path}")


def write_page(path: Path, title: str, figure: Figure, described: str, tables: Sequence[Table]) -> None:
    """Write a self-contained page of a picture and tables: (title, headers, rows), all text."""
    values = {"lead": described, "picture": inline(figure, described), "tables": tables}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("picture.html", title=title, **values), "utf-8")
    print(f"\nwrote {path}")
