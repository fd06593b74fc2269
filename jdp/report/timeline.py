"""A timeline as two lanes of rectangles, few enough for a page.

1. `blocks` makes a lane's events into blocks: neighbours too short to be distinguished become one, and rounds of a loop
   that one event represents stay one block.
2. `waits` finds when the compute lane is idle: in the model of `timing.timeline`, what is not computing there
   is exposed communication.
3. `lanes` draws them: an SVG that is stretched to whatever width there is, and words laid over it, which are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jdp.base.formatting import format_bytes, format_seconds
from jdp.foresight.program.collectives import KINDS
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, Event, Timeline
from jdp.report.page import Markup, element, joined

KIND_CLASSES = {"all-gather": "all-gather", "reduce-scatter": "reduce-scatter", "all-reduce": "all-reduce"}
"""Kind of collective -> CSS class; the others share "other"."""

_WIDTH = 10_000  # units of the drawing across the axis
_FINEST = 4000  # stretches of the axis that are distinguished where there are rectangles enough
_TOP = {COMPUTE: 2, COMMUNICATION: 28}
_HEIGHT = 22
_LABELLED = 0.03  # share of the axis from which a block has room for "× n"


@dataclass(frozen=True)
class Block:
    """One rectangle."""

    lane: str  # the one it is drawn on
    start: float  # when it begins
    seconds: float  # how wide it is drawn
    kind: str  # CSS class
    title: str  # what the reader sees who points at it
    times: int = 1  # rounds of a loop that it represents
    busy: float = 1.0  # the share of `seconds` in which the lane is busy: how high it is filled

    @property
    def end(self) -> float:
        return self.start + self.seconds


def lanes(timeline: Timeline, axis_seconds: float, most: int) -> Markup:
    """Draw the two lanes of a step."""
    waiting = waits(timeline)
    drawn = [*_few_enough(timeline, axis_seconds, most, waiting), *_waiting_blocks(waiting, most // 4)]
    picture = element(
        "svg",
        *(_rectangles(block, axis_seconds) for block in drawn),
        viewBox=f"0 0 {_WIDTH} 52",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Timeline of a step of {format_seconds(timeline.step_seconds)}",
    )
    over = [*_ticks(axis_seconds), *_labels(drawn, axis_seconds)]
    names = element("div", element("span", "compute"), element("span", "communication"), class_="names")
    strip = element("div", picture, *over, class_="strip")
    return element("div", names, element("div", strip, class_="scroll", tabindex=0), class_="lanes")


# Blocks.


def blocks(events: Iterable[Event], finest: float) -> list[Block]:
    """Return a lane's events as blocks; those shorter than `finest` seconds that begin in the same `finest` are one."""
    return [_merged(run) for run in _runs(sorted(events, key=_start), finest)]


def _start(event: Event) -> float:
    return event.start


def _runs(ordered: Iterable[Event], finest: float) -> list[list[Event]]:
    runs, shared = list[list[Event]](), None
    for event in ordered:
        cell = math.floor(event.start / finest) if event.seconds < finest and event.times == 1 else None
        if cell is not None and cell == shared:
            runs[-1].append(event)
        else:
            runs.append([event])
        shared = cell
    return runs


def _few_enough(
    timeline: Timeline, axis_seconds: float, most: int, waiting: Sequence[tuple[float, float]]
) -> list[Block]:
    """Return the blocks of both lanes, coarser until there are at most `most` (or a few of each lane)."""
    ordered = sorted(timeline.events, key=_start)
    lanes_of = [[e for e in ordered if e.lane == lane] for lane in (COMPUTE, COMMUNICATION)]
    cells = _FINEST
    while True:
        runs = [run for events in lanes_of for run in _runs(events, axis_seconds / cells)]
        if len(runs) <= most or cells <= 10:
            merged = [_merged(run) for run in runs]
            return [_spread(block, merged, waiting) for block in merged]
        cells //= 2


def _block(event: Event) -> Block:
    title = [tail(event.what.removeprefix("jit(train_step)/"), 90)]
    title[:0] = [] if event.name in title[0] else [tail(event.name, 60)]
    title.append(format_seconds(event.seconds))
    if event.lane == COMMUNICATION and event.bytes and event.times == 1:
        title.append(format_bytes(event.bytes))
    title += [tail(event.source, 60)] if event.source else []
    return Block(event.lane, event.start, event.seconds, _class_of(event), ", ".join(title), event.times)


def _merged(run: Sequence[Event]) -> Block:
    """Short events as one block, from the first's start to the last's end."""
    if len(run) == 1:
        return _block(run[0])
    end, longest = max(e.start + e.seconds for e in run), max(run, key=lambda e: e.seconds)
    busy = sum(e.seconds for e in run)
    title = f"{len(run)} short ones, {format_seconds(busy)} in all; the longest: {_block(longest).title}"
    kinds = {_class_of(e) for e in run}
    kind = kinds.pop() if len(kinds) == 1 else "other"
    return Block(run[0].lane, run[0].start, end - run[0].start, f"{kind} merged", title)


def _class_of(event: Event) -> str:
    if event.lane == COMPUTE:
        return COMPUTE
    kind = next((kind for kind in KINDS if kind in event.name or kind in event.what), None)
    return "other" if kind is None else KIND_CLASSES.get(kind, "other")


def tail(text: str, most: int) -> str:
    """Return the end of a long name: paths differ there."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _spread(block: Block, others: Sequence[Block], waiting: Sequence[tuple[float, float]]) -> Block:
    """Widen a loop's communication to its rounds, and fill it as high as the part in which it is busy.

    `foresight.timeline` gives the rounds it does not show as one event a lane, as long as that lane is busy.
    """
    if block.lane == COMPUTE or block.times == 1:
        return block
    partner = next(
        (b for b in others if b.lane == COMPUTE and b.times == block.times and b.start <= block.start < b.end), None
    )
    if partner is None:
        return block
    end = next((stop for start, stop in waiting if math.isclose(start, partner.end)), partner.end)
    wide = max(end - block.start, block.seconds)
    return Block(block.lane, block.start, wide, block.kind, block.title, block.times, block.seconds / wide)


# Waiting.


def waits(timeline: Timeline) -> list[tuple[float, float]]:
    """(from, to) of each stretch in which the compute lane waits, in order.

    The longest gaps of the lane, until they add up to what the step waits for other devices and for the host. Of a long
    program only the longest events are kept, and the gaps that the others leave are no waiting.
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


def _waiting_blocks(waiting: Iterable[tuple[float, float]], most: int) -> list[Block]:
    """Return the longest waits as blocks, in order."""
    longest = sorted(waiting, key=lambda gap: gap[0] - gap[1])[:most]
    return [
        Block(COMPUTE, start, end - start, "waiting", f"waiting for communication, {format_seconds(end - start)}")
        for start, end in sorted(longest)
    ]


# Drawing.


def _rectangles(block: Block, axis_seconds: float) -> Markup:
    scale = _WIDTH / axis_seconds
    left = round(block.start * scale)
    width = max(round(block.end * scale) - left, 1)
    title = element("title", block.title)
    high = max(round(block.busy * _HEIGHT), 1)
    top = _TOP[block.lane]
    filled = element("rect", title, class_=block.kind, x=left, y=top + _HEIGHT - high, width=width, height=high)
    if high == _HEIGHT:
        return filled
    return joined([element("rect", title, class_="rest", x=left, y=top, width=width, height=_HEIGHT), filled])


def _ticks(axis_seconds: float) -> Iterator[Markup]:
    """Times below the lanes; finer ones for those who zoom in, and every second is left out on a phone."""
    step = round_step(axis_seconds)
    finer = round_step(axis_seconds / 8)
    times = {round(number * finer, 12): "fine tick" for number in range(_steps_within(axis_seconds / finer) + 1)}
    coarse = range(_steps_within(axis_seconds / step) + 1)
    times |= {round(number * step, 12): "tick odd" if number % 2 else "tick" for number in coarse}
    for at, kind in times.items():
        place = f"left:{_percent(at / axis_seconds)}"
        yield element("span", format_seconds(at) if at else "0", class_=kind, style=place)


def _steps_within(times: float) -> int:
    """Return how many steps end before the axis does: a time at its very end would be cut off."""
    return math.ceil(times * (1 - 1e-9)) - 1


def round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, five to twelve of which make up `span`."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= span / 5 * (1 + 1e-9))


def _labels(drawn: Iterable[Block], axis_seconds: float) -> Iterator[Markup]:
    """ "× n" over the blocks that represent n rounds, if wide enough."""
    for block in drawn:
        if block.times > 1 and block.seconds >= _LABELLED * axis_seconds:
            place = f"left:{_percent(block.start / axis_seconds)};top:{_TOP[block.lane]}px"
            yield element("span", f"× {block.times}", class_="times", style=place)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3f}%"
