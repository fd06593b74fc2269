"""Curves over a run's steps, for a page: thinned without losing what stands out, smoothed, drawn in the one look.

A chart is small, and its font is not: side by side on a wide window, one below the other on a phone, readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from jdp.base.formatting import format_rate
from jdp.report.charts import FAINT, INK, SERIES, SETTINGS, chart, inline
from jdp.report.page import Markup, element

MOST_POINTS = 2000
"""Of one curve."""
FEWEST_TO_SMOOTH = 30
_MOST_SMOOTHED = 100.0  # rows: a longer mean would lag behind a loss that falls
_LOG = 100.0  # times the smallest: a curve that spans more is drawn on a logarithmic axis
_DENSE = 500  # values of a chart's width: more are a band
Numbers = Sequence[float] | np.ndarray
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: int  # number of the run, which has a colour
    steps: Sequence[float]  # in order
    values: Sequence[float]  # as many; those that are not finite leave gaps
    kind: str = "line"  # "line"; "smoothed", a pale line under its running mean; "points", joined by a thin line


@dataclass(frozen=True)
class Chart:
    """What is drawn in one picture."""

    title: str  # above it
    curves: Sequence[Curve]  # one or more
    unit: str = ""  # "", "percent" or "per second"
    from_zero: bool = False  # whether the axis begins at 0
    may_be_log: bool = True  # whether the axis is logarithmic where the curves span orders of magnitude
    per_step: tuple[float, str] | None = None  # units a step for a second axis, such as (16384, "tokens")
    x_label: str = "step"  # of the axis
    moments: Sequence[tuple[int, float]] = ()  # (run, step) of vertical lines
    large: bool = False  # twice as wide and high as the others, where there is room
    note: str = ""  # text below it


def colour(run: int) -> str:
    """Return the colour of a run's curves; the eighth run has the first's, dashed."""
    return SERIES[run % len(SERIES)]


def swatch(run: int, name: str) -> Markup:
    """Return the entry of a run in a legend."""
    dashes = _DASHES[run // len(SERIES) % len(_DASHES)]
    pattern = None if isinstance(dashes, str) else " ".join(f"{3 * length:g}" for length in dashes[1])
    line = element("line", x1=0, y1=5, x2=28, y2=5, stroke=colour(run), stroke_width=3, stroke_dasharray=pattern)
    return element("span", element("svg", line, viewBox="0 0 28 10", aria_hidden="true"), name, class_="key run")


def thinned(steps: Numbers, values: Numbers, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return about `most` points of a curve: its ends, and the least and greatest of every stretch; gaps stay."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), most // 2 - 1):
        finite = stretch[np.isfinite(y[stretch])]
        kept |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])} if len(finite) else {stretch[0]}
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def smoothed(values: Sequence[float], over: float) -> np.ndarray:
    """Return the exponentially weighted mean of the values so far, without bias at the beginning."""
    keep, total, weight = 1 - 1 / max(over, 1.0), 0.0, 0.0
    means = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means[i] = total / weight if weight else math.nan
    return means


def smoothing(rows: int) -> float:
    """Return over how many rows of a run its loss is smoothed; 1: as it is."""
    return min(rows / 40, _MOST_SMOOTHED) if rows >= FEWEST_TO_SMOOTH else 1.0


def draw(drawn: Chart) -> Markup:
    """Return a chart as a figure of a page."""
    with mpl.rc_context(SETTINGS):
        figure = _draw(drawn)
    picture = inline(figure, f"{drawn.title} over {drawn.x_label}s; the tables have numbers.")
    title = element("figcaption", element("strong", drawn.title))
    note = [element("figcaption", drawn.note)] if drawn.note else []
    return element("figure", title, picture, *note, class_="large" if drawn.large else None)


def _draw(drawn: Chart) -> Figure:
    figure, [axes] = chart(width=5.2, height=3.1)
    most = max(200, MOST_POINTS * 8 // max(8, len(drawn.curves)))
    for curve in drawn.curves:
        _draw_curve(axes, curve, most)
    alone = len({curve.run for curve in drawn.curves}) == 1
    for run, step in drawn.moments:
        axes.axvline(step, color=FAINT if alone else colour(run), linewidth=1.0, linestyle=(0, (1, 2)), zorder=0)
    finite = [value for curve in drawn.curves for value in curve.values if math.isfinite(value)]
    _dress(axes, drawn, finite)
    return figure


def _draw_curve(axes: Axes, curve: Curve, most: int) -> None:
    hue, dashes = colour(curve.run), _DASHES[curve.run // len(SERIES) % len(_DASHES)]
    values = np.where(np.isfinite(np.asarray(curve.values, float)), np.asarray(curve.values, float), np.nan)
    if curve.kind == "points":
        axes.plot(*thinned(curve.steps, values, most), color=hue, linewidth=0.8, linestyle=dashes, alpha=0.7)
        axes.plot(*thinned(curve.steps, values, most // 4), color=hue, linestyle="none", marker="o", markersize=4.5)
        return
    over = smoothing(len(values)) if curve.kind == "smoothed" else 1.0
    if over > 1:
        axes.plot(
            *thinned(curve.steps, values, most), color=hue, linewidth=0.6, alpha=0.45 if len(values) < _DENSE else 0.22
        )
        values = smoothed(values.tolist(), over)
    marker = "o" if len(values) == 1 else None
    axes.plot(*thinned(curve.steps, values, most), color=hue, linewidth=1.6, linestyle=dashes, marker=marker)


def _dress(axes: Axes, drawn: Chart, finite: Sequence[float]) -> None:
    axes.set_xlabel(drawn.x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(visible=True, axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    if drawn.per_step is not None:
        count, name = drawn.per_step
        above = axes.secondary_xaxis("top", functions=(lambda x: np.multiply(x, count), lambda x: np.divide(x, count)))
        above.set_xlabel(name)
        above.xaxis.set_major_formatter(lambda value, _: format_rate(value) if value else "0")
    if drawn.may_be_log and finite and min(finite) > 0 and max(finite) > _LOG * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif drawn.unit == "percent":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    elif drawn.unit == "per second" or (finite and 1e4 <= max(map(abs, finite)) < 1e15):
        axes.yaxis.set_major_formatter(lambda value, _: format_rate(value) if value else "0")
    elif finite and max(map(abs, finite)) >= 1e15:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    if drawn.from_zero and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0, top=1.08 * max(finite, default=1.0) or 1.0)
    if not finite:
        axes.text(0.5, 0.5, "no finite value", color=INK, ha="center", transform=axes.transAxes)
        axes.set_yticks([])
