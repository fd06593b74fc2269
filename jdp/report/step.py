"""The compiled step on a page: a device's memory as bars by class, and its timeline as two lanes of rectangles.

Both have their numbers beside them as tables. Of the timeline:

1. `_blocks` turns the events of a step into blocks, few enough for a page. Neighbours too short to distinguish are
   merged. Rounds of a loop in one event stay one block, in each lane as long as that lane is busy.
2. `waits` finds when the compute lane is idle. In the model of `timing.timeline`, idle time is exposed communication.
3. `_drawing` turns blocks into rectangles and words for the template.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from jdp.base.formatting import format_bytes, format_seconds
from jdp.foresight.foresee import Estimate
from jdp.foresight.memory import CLASSES, Memory
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, Event, Timeline
from jdp.report.charts import FAINT, INK, PAPER, SETTINGS, chart, inline
from jdp.report.page import COLOURS, without_roots

# Memory.

Held = Sequence[tuple[str, Estimate, Memory]]

_HUES = ("blue", "green", "purple", "grey", "orange", "pale")
_COLOURS = {name: COLOURS[hue] for name, hue in zip(CLASSES, _HUES, strict=True)}
_FITS = {True: ", fits", False: ", does not fit", None: ""}
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FAR = 3.0  # times the longest bar: limits beyond it are not drawn, to keep bars visible
_ROOM = 1.18  # for words after the longest bar


def memory_section(estimates: Sequence[tuple[str, Estimate]]) -> dict[str, Any] | None:
    """Return the values of the template's macro `memory`; None if no candidate compiled."""
    held = [(name, each, each.memory) for name, each in estimates if each.memory and each.memory.total]
    if not held:
        return None
    longest = max(memory.total for _, _, memory in held)
    limit = held[0][1].available_bytes
    line = "" if limit is None else "; dashed: " if limit <= _FAR * longest else "; beyond the axis: "
    classes = [name for name in CLASSES if any(memory.by_class()[name] for _, _, memory in held)]
    counts: list[tuple[str, list[int | None], str]] = [
        *((CLASSES[name], [memory.by_class()[name] for _, _, memory in held], "") for name in classes),
        ("total", [memory.total for _, _, memory in held], "total"),
        ("at rest beside it", [memory.outside for _, _, memory in held], ""),
        ("memory for a step", [each.available_bytes for _, each, _ in held], ""),
    ]
    counts = [(words, row, kind) for words, row, kind in counts if any(row)]
    rooms = [(name, each.headroom) for name, each, _ in held if each.headroom is not None]
    return {
        "picture": _bars(held, longest),
        "legend": [(CLASSES[name], _COLOURS[name]) for name in classes],
        "limit": "" if limit is None else f"{line}the memory for a step, {format_bytes(limit)}",
        "tight": [f"{name} {room.words}." for name, room in rooms if room.fraction or not room.fits],
        "names": [name for name, _, _ in held],
        "rows": [
            [words, *("?" if count is None else format_bytes(count) for count in row)] for words, row, _ in counts
        ],
        "kinds": [kind for _, _, kind in counts],
    }


def _bars(held: Held, longest: int) -> Markup:
    unit, unit_name = next((each for each in _SIZES if longest >= each[0]), _SIZES[-1])
    limits = {row: each.available_bytes for row, (_, each, _) in enumerate(held) if each.available_bytes is not None}
    near = {row: limit / unit for row, limit in limits.items() if limit <= _FAR * longest}
    with mpl.rc_context(SETTINGS):
        figure, [axes] = chart(height=0.75 + 0.42 * len(held))
        axes.set_xlim(0, _ROOM * max(longest / unit, *near.values(), 0.0))
        axes.set_ylim(len(held) - 0.5, -0.5)
        axes.set_yticks(range(len(held)), [name for name, _, _ in held])
        axes.tick_params(axis="y", colors=INK, length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(unit_name, color=FAINT)
        for row, (_, estimate, memory) in enumerate(held):
            begin = 0.0
            for name, count in memory.by_class().items():
                width = count / unit
                if width:
                    axes.barh(row, width, 0.66, begin, color=_COLOURS[name], edgecolor=PAPER, linewidth=0.6)
                begin += width
            limit = near.get(row, -1.0)
            if limit >= 0:
                axes.vlines(limit, row - 0.5, row + 0.5, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
            behind = limit if begin <= limit < begin + (1 - 1 / _ROOM) * axes.get_xlim()[1] else begin  # not across it
            label = f"{format_bytes(memory.total)}{_FITS[estimate.fits]}"
            axes.annotate(label, (behind, row), (6, 0), textcoords="offset points", va="center", color=INK)
        described = "Bytes of a device’s memory by class, for each candidate; the table below has the same numbers."
        return inline(figure, described)


# Time.

MOST_RECTANGLES = 2400
"""Rectangles of all timelines together, to keep the page small for long programs."""

_LISTED = 12  # operations of a timeline
_DRAWN_KINDS = ("all-gather", "reduce-scatter", "all-reduce")  # of collectives; the others share "other"
_WIDTH = 10_000  # units of the drawing across the axis, as in the template
_FINEST = 4000  # distinct stretches of the axis, if there are enough rectangles
_TOP = {COMPUTE: 2, COMMUNICATION: 28}
_HEIGHT = 22
_LABELLED = 0.03  # share of the axis from which a block has room for "× n"


@dataclass(frozen=True)
class Block:
    """One rectangle of a lane."""

    lane: str
    start: float
    seconds: float  # its width
    kind: str  # CSS class
    title: str  # its tooltip
    times: int = 1  # rounds of a loop that it represents

    @property
    def end(self) -> float:
        return self.start + self.seconds


def times_section(estimates: Sequence[tuple[str, Estimate]]) -> dict[str, Any] | None:
    """Return the values of the template's macro `times`; None if no step's time is known."""
    timed = [(name, each, each.timeline) for name, each in estimates if each.timeline is not None]
    if not timed:
        return None
    longest = max(timeline.step_seconds for _, _, timeline in timed) or 1e-9
    most = max(60, MOST_RECTANGLES // len(timed))
    steps = list[tuple[Any, ...]]()
    for name, estimate, timeline in timed:
        operations: dict[tuple[str, str, str], list[float]] = {}  # operation, lane, source -> seconds of each event
        for event in timeline.events:
            operations.setdefault((event.what, event.lane, event.source or "–"), []).append(event.seconds)
        longest_first = sorted(operations.items(), key=lambda operation: -sum(operation[1]))
        steps.append((name, estimate, timeline, _drawing(timeline, longest, most), longest_first[:_LISTED]))
    return {"candidates": timed, "steps": steps}


# Blocks.


def _blocks(timeline: Timeline, axis_seconds: float, most: int) -> list[Block]:
    """Return the blocks of both lanes, merged until there are at most `most` (or a few in each lane)."""
    ordered = sorted(timeline.events, key=lambda event: (event.lane != COMPUTE, event.start))
    stretches: list[list[Event]] = []
    for halvings in range(9):
        stretches = _stretches_of(ordered, axis_seconds / (_FINEST >> halvings))
        if len(stretches) <= most:
            break
    longest = sorted(waits(timeline), key=lambda gap: gap[0] - gap[1])[: most // 4]
    idle = [
        Block(COMPUTE, start, end - start, "waiting", f"waiting for communication, {format_seconds(end - start)}")
        for start, end in sorted(longest)
    ]
    return [*map(_merged, stretches), *idle]


def _stretches_of(ordered: Iterable[Event], finest: float) -> list[list[Event]]:
    """Return the events in order, grouping short neighbours that begin in the same `finest` seconds."""
    numbers = itertools.count()

    def cell(event: Event) -> tuple[str, int | None, int]:
        is_short = event.seconds < finest and event.times == 1
        return (event.lane, math.floor(event.start / finest), -1) if is_short else (event.lane, None, next(numbers))

    return [list(events) for _, events in itertools.groupby(ordered, cell)]


def _merged(events: Sequence[Event]) -> Block:
    """Return one event, or a group of short events from first start to last end, as a block."""
    first, longest = events[0], max(events, key=lambda event: event.seconds)
    kinds = {
        next((kind for kind in _DRAWN_KINDS if kind in event.name or kind in event.what), "other") for event in events
    }
    kinds = {COMPUTE} if first.lane == COMPUTE else kinds
    kind = kinds.pop() if len(kinds) == 1 else "other"
    if len(events) == 1:
        return Block(first.lane, first.start, first.seconds, kind, _title(first), first.times)
    end, busy = max(event.start + event.seconds for event in events), sum(event.seconds for event in events)
    title = f"{len(events)} short operations, {format_seconds(busy)} in all; the longest: {_title(longest)}"
    return Block(first.lane, first.start, end - first.start, f"{kind} merged", title)


def _title(event: Event) -> str:
    parts = [tail(event.what.removeprefix("jit(train_step)/"), 90)]
    if event.name not in parts[0]:
        parts.insert(0, tail(event.name, 60))
    parts.append(format_seconds(event.seconds))
    if event.lane == COMMUNICATION and event.bytes and event.times == 1:
        parts.append(format_bytes(event.bytes))
    if event.source:
        parts.append(tail(without_roots(event.source), 60))
    return ", ".join(parts)


def tail(text: str, most: int) -> str:
    """Return the end of a long name, where paths differ."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def waits(timeline: Timeline) -> list[tuple[float, float]]:
    """Return (start, end) of each wait of the compute lane, in order.

    These are the longest gaps of the lane, until they add up to the step's waiting for other devices and the host.
    """
    computing = sorted((e.start, e.start + e.seconds) for e in timeline.events if e.lane == COMPUTE)
    gaps, free = list[tuple[float, float]](), 0.0
    for start, end in [*computing, (timeline.step_seconds, timeline.step_seconds)]:
        if start > free:
            gaps.append((free, start))
        free = max(free, end)
    left, waiting = 1.001 * (timeline.exposed_seconds + timeline.host_wait_seconds), list[tuple[float, float]]()
    rounding = 1e-9 * timeline.step_seconds
    for start, end in sorted(gaps, key=lambda gap: gap[0] - gap[1]):
        if rounding < end - start <= left:
            waiting.append((start, end))
            left -= end - start
    return sorted(waiting)


# Drawing.


def _drawing(timeline: Timeline, axis_seconds: float, most: int) -> dict[str, Any]:
    blocks, scale = _blocks(timeline, axis_seconds, most), _WIDTH / axis_seconds
    rectangles: list[tuple[str, int, int, int, int, str]] = []  # kind, x, y, width, height, title
    for block in blocks:
        left = round(block.start * scale)
        width = max(round(block.end * scale) - left, 1)
        rectangles.append((block.kind, left, _TOP[block.lane], width, _HEIGHT, block.title))
    return {
        "rectangles": rectangles,
        "ticks": _ticks(axis_seconds),
        "labels": [
            (block.start / axis_seconds, _TOP[block.lane], block.times)
            for block in blocks
            if block.times > 1 and block.seconds >= _LABELLED * axis_seconds
        ],
    }


def _ticks(axis_seconds: float) -> list[tuple[str, float, str]]:
    """Return (kind, place, time) of ticks below the lanes: finer for a zoom, fewer on a phone."""

    def places(most: int) -> list[float]:
        """Return shares of the axis, which end before a label would be cut off."""
        ticks = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(0.0, axis_seconds)
        return [share for tick in ticks if 0 <= (share := round(tick / axis_seconds, 9)) < 1]

    kinds = dict.fromkeys(places(80), "fine tick")
    kinds |= {at: "tick odd" if number % 2 else "tick" for number, at in enumerate(places(10))}
    return [(kind, at, format_seconds(at * axis_seconds) if at else "0") for at, kind in kinds.items()]
