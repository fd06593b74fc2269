"""Horizontal bars for a page: one bar a row, cut into classes, against a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jdp.report.charts import FAINT, INK, PAPER, SETTINGS, inline
from jdp.report.page import Markup


@dataclass(frozen=True)
class Bar:
    """One bar: what its row is called, class -> amount, a label at its end, and the limit it is compared with."""

    name: str
    amounts: Mapping[str, float]
    label: str = ""
    limit: float | None = None
    total: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.amounts.values()))


def stacked_bars(
    bars: Sequence[Bar], colours: Mapping[str, str], unit: float, axis_label: str, described: str
) -> Markup:
    """Draw horizontal bars from the top down, each with its limit as a line, behind a break of the axis if far."""
    limits = [bar.limit / unit for bar in bars if bar.limit is not None]
    longest = max(bar.total for bar in bars) / unit
    is_far = bool(limits) and min(limits) > _FAR * longest > 0
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(10.5, 0.75 + 0.42 * len(bars)), layout="constrained")
        figure.patch.set_visible(False)  # the page shows through
        if is_far:
            axes, further = figure.subplots(1, 2, sharey=True, width_ratios=(12, 1))
            _draw_further(axes, further, limits)
        else:
            axes = further = figure.add_subplot()
        _dress(axes, bars, axis_label)
        for row, bar in enumerate(bars):
            if bar.limit is not None:
                further.vlines(bar.limit / unit, row - 0.5, row + 0.5, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
        axes.set_xlim(0, _ROOM * (longest if is_far else max(longest, *limits, 0.0)) or 1.0)
        _draw_bars(axes, bars, colours, unit)
        return inline(figure, described)


def binary_unit(most: float) -> tuple[float, str]:
    """Return the unit of an axis that reaches `most` bytes, and its name."""
    return next((each for each in ((2**30, "GiB"), (2**20, "MiB")) if most >= each[0]), (2**10, "KiB"))


_ROOM = 1.18  # for words, behind the longest bar
_FAR = 3.0  # times the longest bar: a limit beyond that is behind a break of the axis, so that bars can be seen


def _draw_bars(axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str], unit: float) -> None:
    for row, bar in enumerate(bars):
        begin = 0.0
        for name, colour in colours.items():
            width = bar.amounts.get(name, 0) / unit
            if width:
                axes.barh(row, width, 0.66, begin, color=colour, edgecolor=PAPER, linewidth=0.6)
            begin += width
        limit = math.inf if bar.limit is None else bar.limit / unit
        behind = (
            limit if begin <= limit < begin + (1 - 1 / _ROOM) * axes.get_xlim()[1] else begin
        )  # not across the line
        axes.annotate(bar.label, (behind, row), (6, 0), textcoords="offset points", va="center", color=INK)


def _draw_further(axes: Axes, further: Axes, limits: Sequence[float]) -> None:
    """Draw the limits, on the part of the axis behind the break."""
    further.set_xlim(0.97 * min(limits), 1.03 * max(limits))
    further.set_xticks(sorted(set(limits)), [f"{limit:.3g}" for limit in sorted(set(limits))])
    further.tick_params(axis="x", colors=FAINT)
    further.tick_params(axis="y", left=False, labelleft=False)
    _only_bottom(further)
    for side, at in ((axes, 1), (further, 0)):
        (mark,) = side.plot([at], [0], transform=side.transAxes, color=FAINT, linestyle="none", clip_on=False)
        mark.set(marker=[(-1, -2), (1, 2)], markersize=9)


def _dress(axes: Axes, bars: Sequence[Bar], axis_label: str) -> None:
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_xlabel(axis_label, color=FAINT)
    axes.tick_params(axis="x", colors=FAINT)
    axes.tick_params(axis="y", colors=INK, length=0)
    _only_bottom(axes)


def _only_bottom(axes: Axes) -> None:
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
