"""Where a step's time goes under each candidate, as a section of a page: seconds, timelines, longest operations."""

from __future__ import annotations

from collections.abc import Sequence

from jdp.base.formatting import format_percent, format_seconds
from jdp.foresight.forecast import Estimate
from jdp.foresight.timing.timeline import Event, Timeline
from jdp.report.page import CHOSEN, Markup, details, element, joined, table, tagged
from jdp.report.timeline import KIND_CLASSES, lanes

MOST_RECTANGLES = 2400
"""Of all timelines together: what keeps the page small, however long the programs are."""

_LONGEST = 12  # stretches of a timeline that are listed


def times(estimates: Sequence[tuple[str, Estimate]], chosen: str | None) -> Markup:
    """Return the section's body."""
    timed = [(name, estimate, estimate.timeline) for name, estimate in estimates if estimate.timeline is not None]
    if not timed:
        why = "these devices’ rates are not, or no candidate compiled and fits"
        return element("p", f"Step times are not known: {why}.")
    longest = max(timeline.step_seconds for _, _, timeline in timed) or 1e-9
    most = max(60, MOST_RECTANGLES // len(timed))
    slider = element("input", type="range", min=0, max=5, step="0.1", value=0)
    zoom = element("label", "Zoom ", slider, class_="zoom note", hidden=True)
    lane_keys = [element("span", element("i", class_=kind), text, class_="key") for kind, text in _LANES.items()]
    parts = [zoom, element("p", *lane_keys, class_="note"), element("p", _HOW_TO_READ, class_="note")]
    for names, estimate, timeline in _different(timed, chosen):
        parts += [
            element("h3", tagged(", ".join(names), CHOSEN if chosen in names else None)),
            element("p", _in_words(timeline, estimate)),
            lanes(timeline, longest, most),
            _stretches(timeline),
        ]
    return joined([_seconds_table(timed, chosen), element("div", *parts)])


_LANES = {"compute": "compute", "waiting": "waiting for communication", **KIND_CLASSES, "other": "other or mixed"}
_HOW_TO_READ = (
    "All timelines have the same scale. Pale blocks are neighbours too short to be drawn apart. “× n” is n more "
    "rounds of a loop, filled as high as the lane is busy in them. Point at a block for its name, seconds and source."
)


def _different(
    timed: Sequence[tuple[str, Estimate, Timeline]], chosen: str | None
) -> list[tuple[list[str], Estimate, Timeline]]:
    """Return candidates whose steps are the same as one, under all of their names, the chosen one first."""
    groups = list[tuple[list[str], Estimate, Timeline]]()
    for name, estimate, timeline in timed:
        same = next((names for names, _, other in groups if other == timeline), None)
        if same is None:
            groups.append(([name], estimate, timeline))
        else:
            same.insert(0 if name == chosen else len(same), name)
    return groups


def _in_words(timeline: Timeline, estimate: Estimate) -> str:
    text = f"{format_seconds(timeline.step_seconds)} a step: {format_seconds(timeline.compute_seconds)} computing"
    text += f" and {format_seconds(timeline.exposed_seconds)} waiting"
    if timeline.communication_seconds:
        text += (
            f", with {format_seconds(timeline.communication_seconds)} of communication, "
            f"{format_percent(1 - timeline.exposed_fraction)} of it hidden"
        )
    return f"{text}." if estimate.mfu is None else f"{text}. MFU {format_percent(estimate.mfu)}."


def _seconds_table(timed: Sequence[tuple[str, Estimate, Timeline]], chosen: str | None) -> Markup:
    rows = [
        [
            name,
            format_seconds(timeline.step_seconds),
            format_seconds(timeline.compute_seconds),
            format_seconds(timeline.communication_seconds),
            format_seconds(timeline.exposed_seconds),
            "–" if estimate.efficiency is None else format_percent(estimate.efficiency),
            format_seconds(timeline.matmul_seconds),
            f"{timeline.flops / 1e12:,.3g} TFLOP",
        ]
        for name, estimate, timeline in timed
    ]
    marked = ["chosen" if name == chosen else None for name, _, _ in timed]
    return table(_SECONDS, rows, classes=marked)


_SECONDS = (*("candidate", "step", "compute", "communication", "waiting", "T(1)/T(N)", "matrix products", "executed"),)


def _stretches(timeline: Timeline) -> Markup:
    """List the longest events, those of the same name and line together."""
    groups: dict[tuple[str, str, str | None], list[Event]] = {}
    for event in timeline.events:
        groups.setdefault((event.lane, event.what, event.source), []).append(event)
    ordered = sorted(groups.items(), key=lambda group: -sum(event.seconds for event in group[1]))
    rows = [
        [
            what.removeprefix("jit(train_step)/")[-200:],
            lane,
            format_seconds(seconds := sum(event.seconds for event in same)),
            format_percent(seconds / (timeline.step_seconds or 1.0)),
            f"{len(same)}",
            source or "–",
        ]
        for (lane, what, source), same in ordered[:_LONGEST]
    ]
    headers = ("operation", "lane", "seconds", "of the step", "blocks", "source")
    return details("The longest stretches", table(headers, rows, words=("lane", "source")))
