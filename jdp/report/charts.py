"""The charts of pages: the style of every picture, and the metrics of runs drawn together, smoothed.

`chart` makes a matplotlib figure in that style. `inline` turns a figure into markup for a page: text stays text, and
colours follow the page, light or dark. `write` makes a file that does the same. The same figure gives the same text,
without references to anything outside.

A run's chart is small with a large font: side by side on a wide window, stacked on a phone, readable on both. Unknown
metrics get their own chart.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, LogFormatter, MaxNLocator

from jdp.report.page import COLOURS, visible
from jdp.report.run import Run

# Colours for matplotlib that stand in for the page's variables.
INK, FAINT, PAPER = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}

SERIES = tuple(COLOURS[name] for name in ("blue", "vermilion", "green", "orange", "purple", "sky", "grey"))
"""The colours of a chart's series, in order."""

SETTINGS: dict[Any, Any] = {
    **mpl.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False),
    "axes.prop_cycle": cycler(color=SERIES),
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


# The charts of runs.

_FEWEST_TO_SMOOTH = 30
_MOST_SMOOTHED = 100.0  # rows: a longer mean would lag behind a falling loss
_LOG = 100.0  # times the smallest: curves that span more get a logarithmic axis
_MOST_MARKERS = 500  # of one curve
_DASHES = ((), (5.0, 2.0), (1.5, 1.5))
_ELSEWHERE = {  # metrics that other charts and tables show, or that need no chart
    *("loss", "accuracy", "eval_loss", "eval_accuracy", "lr", "grad_norm", "mfu", "tokens_per_second"),
    *("examples_per_second", "step_seconds", "data_wait_seconds", "step", "time", "weight", "skipped"),
    "eval_bits_per_token",
}
_MOST_OTHERS = 24
_UP: dict[str, Any] = {"from_zero": True, "may_be_log": False}


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: int  # number of the run, which has a colour
    steps: Sequence[float]  # in order
    values: Sequence[float]  # as many; NaN and infinities leave gaps
    kind: str = "line"  # "line"; "smoothed", a pale line under its running mean; "points", joined by a thin line


@dataclass(frozen=True)
class Chart:
    """One picture."""

    title: str  # above it
    curves: Sequence[Curve]  # one or more
    unit: str = ""  # "", "percent" or "per second"
    from_zero: bool = False  # the axis begins at 0
    may_be_log: bool = True  # the axis is logarithmic if the curves span orders of magnitude
    moments: Sequence[tuple[int, float]] = ()  # (run, step) of vertical lines
    large: bool = False  # twice as wide and high as the others, if there is room
    note: str = ""  # text below it

    @property
    def picture(self) -> Markup:
        with mpl.rc_context(SETTINGS):
            figure, [axes] = chart(width=5.2, height=3.1)
            for curve in self.curves:
                _draw_curve(axes, curve)
            alone = len({curve.run for curve in self.curves}) == 1
            for run, step in self.moments:
                hue = FAINT if alone else _colour(run)
                axes.axvline(step, color=hue, linewidth=1.0, linestyle=(0, (1, 2)), zorder=0)
            axes.set_xlabel("step")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            _label_values(axes, self)
        return inline(figure, f"{self.title} over steps; the tables have numbers.")


# Which charts there are.


def learning(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of losses, the learning rate, the gradients' norm and accuracies."""
    moments = [(number, step) for number, run in enumerate(runs) for step in run.resumes]
    losses = ("loss", "smoothed"), ("eval_loss", "points")
    accuracies = ("accuracy", "smoothed"), ("eval_accuracy", "points")
    charts = [
        _chart(runs, "Loss", *losses, large=True, moments=moments, note=_about_loss(runs)),
        _chart(runs, "Learning rate", ("lr", "line"), **_UP),
        _chart(runs, "Norm of the gradients", ("grad_norm", "smoothed")),
        _chart(runs, "Accuracy", *accuracies, unit="percent", may_be_log=False),
    ]
    return [each for each in charts if each.curves]


def speed(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of throughput, the share of time that steps waited for data, and MFU."""
    waiting = ("data_wait_seconds", "smoothed")
    charts = [
        _chart(runs, "Tokens a second", ("tokens_per_second", "smoothed"), unit="per second", **_UP),
        _chart(runs, "Examples a second", ("examples_per_second", "smoothed"), unit="per second", **_UP),
        _chart(runs, "Share of a step spent waiting for data", waiting, per="step_seconds", unit="percent", **_UP),
        _chart(runs, "MFU", ("mfu", "smoothed"), unit="percent", **_UP),
    ]
    return [each for each in charts if each.curves]


def others(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each metric that the other sections do not show; NAME_weight is how much of it was counted."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    named = [name for name in names if name not in {*_ELSEWHERE, *(f"{each}_weight" for each in names)}][:_MOST_OTHERS]
    return [_chart(runs, name, (name, "points" if name.startswith("eval_") else "smoothed")) for name in named]


def _chart(runs: Sequence[Run], title: str, *metrics: tuple[str, str], per: str = "", **options: Any) -> Chart:
    curves = list[Curve]()
    for number, run in enumerate(runs):
        for name, kind in metrics:
            rows = [row for row in run.rows if name in row and (not per or row.get(per))]
            values = [row[name] / (row[per] if per else 1.0) for row in rows]
            curves += [Curve(number, [row["step"] for row in rows], values, kind)] if rows else []
    return Chart(title, curves, **options)


def _about_loss(runs: Sequence[Run]) -> str:
    rows = max((len(run.values("loss")) for run in runs), default=0)
    parts = list[str]()
    if round(over := _smoothing(rows)) > 1:
        parts.append(f"Pale: as logged; line: its running mean over about {over:.0f} rows.")
    if any(run.values("eval_loss") for run in runs):
        parts.append("Points: on held-out data.")
    if any(run.resumes for run in runs):
        parts.append("Dotted: resumed.")
    return " ".join(parts)


# Drawing.


def legend(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return each run's legend entry: name, colour, and dashes from the eighth run on."""
    patterns = [" ".join(f"{3 * length:g}" for length in _dashes(run)) for run in range(len(names))]
    return [(name, _colour(run), patterns[run]) for run, name in enumerate(names)]


def _colour(run: int) -> str:
    return SERIES[run % len(SERIES)]


def _dashes(run: int) -> tuple[float, ...]:
    return _DASHES[run // len(SERIES) % len(_DASHES)]


def _smoothed(values: Sequence[float], over: float) -> np.ndarray:
    """Return the exponentially weighted running mean, without bias at the beginning."""
    keep, total, weight = 1 - 1 / max(over, 1.0), 0.0, 0.0
    means = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means[i] = total / weight if weight else math.nan
    return means


def _smoothing(rows: int) -> float:
    """Return the number of rows over which a run's loss is smoothed; 1: no smoothing."""
    return min(rows / 40, _MOST_SMOOTHED) if rows >= _FEWEST_TO_SMOOTH else 1.0


def _draw_curve(axes: Axes, curve: Curve) -> None:
    hue, dashes = _colour(curve.run), (0, pattern) if (pattern := _dashes(curve.run)) else "-"
    values = np.asarray(curve.values, float)
    values = np.where(np.isfinite(values), values, np.nan)
    if curve.kind == "points":
        every = max(1, len(values) // _MOST_MARKERS)
        axes.plot(curve.steps, values, color=hue, linewidth=0.8, linestyle=dashes, alpha=0.7)
        axes.plot(curve.steps, values, color=hue, linestyle="none", marker="o", markersize=4.5, markevery=every)
        return
    over = _smoothing(len(values)) if curve.kind == "smoothed" else 1.0
    if over > 1:
        axes.plot(curve.steps, values, color=hue, linewidth=0.6, alpha=0.3)
        values = _smoothed(values.tolist(), over)
    marker = "o" if len(values) == 1 else None
    axes.plot(curve.steps, values, color=hue, linewidth=1.6, linestyle=dashes, marker=marker)


def _label_values(axes: Axes, drawn: Chart) -> None:
    axes.grid(visible=True, axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    finite = [value for curve in drawn.curves for value in curve.values if math.isfinite(value)]
    largest = max(map(abs, finite), default=0.0)
    if drawn.may_be_log and finite and min(finite) > 0 and max(finite) > _LOG * min(finite):
        axes.set_yscale("log")
    elif drawn.unit == "percent":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    elif drawn.unit == "per second" or largest >= 1e4:
        short = EngFormatter(sep="") if 1 <= largest < 1e15 else lambda value, _: f"{value:.2g}"
        axes.yaxis.set_major_formatter(short)
    if drawn.from_zero and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0, top=1.08 * max(finite, default=1.0) or 1.0)
    if not finite:
        axes.text(0.5, 0.5, "no finite value", color=INK, ha="center", transform=axes.transAxes)
        axes.set_yticks([])
