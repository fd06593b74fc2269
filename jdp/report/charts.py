"""The style of every picture, inside a page or in its own file.

`chart` makes a matplotlib figure in that style. `inline` turns a figure into markup for a page: text stays text, and
colours follow the page, light or dark. `write` makes a file that does the same. The same figure gives the same text,
without references to anything outside.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, LogFormatter

from jdp.report.page import COLOURS, visible

# Colours for matplotlib that stand in for the page's variables.
INK, FAINT, PAPER = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
_FILE_STYLE = (
    "svg { --ink: #1b1f24; --faint: #59636e; --paper: #fff; background: var(--paper); } "
    "@media (prefers-color-scheme: dark) { svg { --ink: #e4e8ec; --faint: #9aa5b1; --paper: #14171b; } }"
)

SERIES = tuple(COLOURS[name] for name in ("blue", "vermilion", "green", "orange", "purple", "sky", "grey"))
"""The colours of a chart's series, in order."""

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "svg.hashsalt": "jdp",  # reproducible ids
    "text.parse_math": False,  # names may hold dollar signs
    "text.usetex": False,
    "path.simplify": True,  # a long curve keeps the extremes of about every pixel
    "path.simplify_threshold": 1.0,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.prop_cycle": cycler(color=SERIES),
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "figure.facecolor": "none",
    "legend.frameon": False,
}


def chart(columns: int = 1, rows: int = 1, *, height: float = 3.6, width: float = 10.5) -> tuple[Figure, list[Axes]]:
    """Make a figure in the style of jdp's pages."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, rows * height), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
    return figure, list(panels.flat)


class _PlainLog(Formatter):
    """Labels the ticks of a logarithmic formatter with numbers; `SETTINGS` turn off the markup that it writes."""

    def __init__(self, marked: LogFormatter) -> None:
        self._marked = marked

    def set_locs(self, locs: Any) -> None:
        self._marked.set_locs(locs)

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.10g}" if self._marked(x, pos) else ""


def inline(figure: Figure, described: str) -> Markup:
    """Return a figure as an `<svg>` element for a page.

    matplotlib's XML head, ids of groups, style sheet (which would apply to the whole page) and list of fonts are
    removed. The other ids get a suffix of the picture: a browser uses the first element with an id, and none if that
    element is in a closed part.
    """
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(major := axis.get_major_formatter(), LogFormatter):
            axis.set_major_formatter(_PlainLog(major))
        if isinstance(minor := axis.get_minor_formatter(), LogFormatter):
            axis.set_minor_formatter(_PlainLog(minor))
    buffer = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context(SETTINGS):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", text)
    text = re.sub(r" (xmlns:xlink|version)=\"[^\"]*\"", "", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    for colour, variable in _PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"\s*\n\s*", " ", text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    text = re.sub(r'(?<=id=")\w+|(?<=url\(#)\w+|(?<=href="#)\w+', rf"\g<0>-{digest}", text)
    title = Markup("<title>{}</title>").format(visible(described))
    return Markup(re.sub(r"<svg [^>]*>", lambda head: f'{head[0][:-1]} role="img">{title}', text, count=1).strip())


def write(figure: Figure, path: Path, described: str) -> None:
    """Write a figure as a self-contained SVG file."""
    text = str(inline(figure, described)).replace("</title>", f"</title><style>{_FILE_STYLE}</style>", 1)
    text = text.replace("xlink:href", "href")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
