"""The time of a step: seconds, timelines as two lanes of rectangles, the longest operations.

1. `_blocks` turns the events of a step into blocks, few enough for a page. Neighbours too short to distinguish are
   merged; rounds of a loop in one event stay one block.
2. `waits` finds when the compute lane is idle. In the model of `timing.timeline`, idle time is exposed communication.
3. `_drawing` turns blocks into rectangles and words for the template.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jdp.base.formatting import format_bytes, format_seconds
from jdp.foresight.forecast import Estimate
from jdp.foresight.program.collectives import KINDS
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, Event, Timeline
from jdp.report.page import without_roots

MOST_RECTANGLES = 2400
"""Rectangles of all timelines together, to keep the page small for long programs."""

_LISTED = 12  # operations of a timeline
_DRAWN_KINDS = ("all-gather", "reduce-scatter", "all-reduce")  # of collectives; the others share "other"
_WIDTH = 10_000  # units of the drawing across the axis, as in the template
_FINEST = 4000  # distinct stretches of the axis, if there are enough rectangles
_TOP = {COMPUTE: 2, COMMUNICATION: 28}
_HEIGHT = 22
_LABELLED = 0.03  # share of the axis from which a block has room for "× n"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Block:
    """One rectangle of a lane."""

    lane: str
    start: float
    seconds: float  # its width
    kind: str  # CSS class
    title: str  # its tooltip
    times: int = 1  # rounds of a loop that it represents
    busy: float = 1.0  # the share of `seconds` in which the lane is busy: the height of its filling

    @property
    def end(self) -> float:
        return self.start + self.seconds


def times_section(estimates: Sequence[tuple[str, Estimate]], choice: str | None = None) -> dict[str, Any] | None:
    """Return the values of the template's macro `times`; None if no step's time is known."""
    timed = [(name, each, each.timeline) for name, each in estimates if each.timeline is not None]
    if not timed:
        return None
    longest = max(timeline.step_seconds for _, _, timeline in timed) or 1e-9
    most = max(60, MOST_RECTANGLES // len(timed))
    same_steps: list[tuple[list[str], Estimate, Timeline]] = []  # candidates with one timeline share a drawing
    for name, estimate, timeline in timed:
        names = next((names for names, _, other in same_steps if other == timeline), None)
        if names is None:
            same_steps.append(([name], estimate, timeline))
        else:
            names.insert(0 if name == choice else len(names), name)
    return {
        "candidates": timed,
        "steps": [
            (names, estimate, timeline, _drawing(timeline, longest, most), _stretches(timeline))
            for names, estimate, timeline in same_steps
        ],
    }


def _stretches(timeline: Timeline) -> list[tuple[tuple[str, str, str], list[float]]]:
    """Return the longest operations: (operation, lane, source), and the seconds of each event."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for event in timeline.events:
        groups.setdefault((event.what, event.lane, event.source or "–"), []).append(event.seconds)
    return sorted(groups.items(), key=lambda group: -sum(group[1]))[:_LISTED]


# Blocks.


def _blocks(timeline: Timeline, axis_seconds: float, most: int) -> list[Block]:
    """Return the blocks of both lanes, merged until there are at most `most` (or a few in each lane)."""
    ordered = sorted(timeline.events, key=lambda event: (event.lane != COMPUTE, event.start))
    stretches: list[list[Event]] = []
    for halvings in range(9):
        stretches = _stretches_of(ordered, axis_seconds / (_FINEST >> halvings))
        if len(stretches) <= most:
            break
    blocks, waiting = [*map(_merged, stretches)], waits(timeline)
    longest = sorted(waiting, key=lambda gap: gap[0] - gap[1])[: most // 4]
    idle = [
        Block(COMPUTE, start, end - start, "waiting", f"waiting for communication, {format_seconds(end - start)}")
        for start, end in sorted(longest)
    ]
    return [*(_spread(block, blocks, waiting) for block in blocks), *idle]


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
    kinds = {_kind(event) for event in events}
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


def _kind(event: Event) -> str:
    if event.lane == COMPUTE:
        return COMPUTE
    kind = next((kind for kind in KINDS if kind in event.name or kind in event.what), "other")
    return kind if kind in _DRAWN_KINDS else "other"


def tail(text: str, most: int) -> str:
    """Return the end of a long name, where paths differ."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _spread(block: Block, others: Sequence[Block], waiting: Sequence[tuple[float, float]]) -> Block:
    """Widen a loop's communication to its rounds, and fill it to the share of time in which it is busy.

    `timing.timeline` gives the remaining rounds as one event in each lane, as long as that lane is busy.
    """
    if block.lane == COMPUTE or block.times == 1:
        return block
    computing = (each for each in others if each.lane == COMPUTE and each.times == block.times)
    partner = next((each for each in computing if each.start <= block.start < each.end), None)
    if partner is None:
        return block
    end = next((stop for start, stop in waiting if math.isclose(start, partner.end)), partner.end)
    wide = max(end - block.start, block.seconds)
    return replace(block, seconds=wide, busy=block.seconds / wide)


def waits(timeline: Timeline) -> list[tuple[float, float]]:
    """Return (start, end) of each wait of the compute lane, in order.

    These are the longest gaps of the lane, until they add up to the step's waiting for other devices and the host. A
    long program keeps only its longest events, and the gaps that the others leave are not waits.
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
    """Return the values of the template's macro `lanes`."""
    blocks = _blocks(timeline, axis_seconds, most)
    return {
        "rectangles": [each for block in blocks for each in _rectangles(block, _WIDTH / axis_seconds)],
        "ticks": _ticks(axis_seconds),
        "labels": [
            (block.start / axis_seconds, _TOP[block.lane], block.times)
            for block in blocks
            if block.times > 1 and block.seconds >= _LABELLED * axis_seconds
        ],
    }


def _rectangles(block: Block, scale: float) -> list[tuple[str, int, int, int, int, str]]:
    """Return a block's rectangles (kind, x, y, width, height, title): two if it is partly filled."""
    left, filled, top = round(block.start * scale), max(round(block.busy * _HEIGHT), 1), _TOP[block.lane]
    width = max(round(block.end * scale) - left, 1)
    rest = [("rest", left, top, width, _HEIGHT, block.title)] if filled < _HEIGHT else []
    return [*rest, (block.kind, left, top + _HEIGHT - filled, width, filled, block.title)]


def _ticks(axis_seconds: float) -> list[tuple[str, float, str]]:
    """Return (kind, place, time) of ticks below the lanes: finer for a zoom, fewer on a phone."""
    unit, name = next((each for each in _UNITS if axis_seconds >= each[0]), _UNITS[-1])
    step, finer = _round_step(axis_seconds), _round_step(axis_seconds / 8)
    kinds = {round(number * finer, 12): "fine tick" for number in _within(axis_seconds / finer)}
    kinds |= {round(number * step, 12): "tick odd" if number % 2 else "tick" for number in _within(axis_seconds / step)}
    return [(kind, at / axis_seconds, f"{at / unit:.4g} {name}" if at else "0") for at, kind in kinds.items()]


def _within(steps: float) -> range:
    """Return the numbers of the steps that begin before the axis ends, where a label would be cut off."""
    return range(math.ceil(steps * (1 - 1e-9)))


def _round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten that divides `span` into five to twelve parts."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= span / 5 * (1 + 1e-9))
