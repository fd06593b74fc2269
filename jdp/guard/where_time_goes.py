"""Where the time of a run's steps goes, and on which process, in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jdp.base.formatting import format_percent, format_seconds

PARTS = ("data", "dispatch", "wait", "host")
_DATA_SHARE, _HOST_SHARE, _BEHIND_SHARE, _LONG = 0.1, 0.25, 0.05, 3.0
_FEWEST = 3


def pace(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the medians of each process' steps in seconds, and sentences about the causes of slow ones.

    A process' first step, which compiles, is left out, and so are processes with few steps.
    """
    steps = {rank: [event for event in own if event["event"] == "step"][1:] for rank, own in events.items()}
    medians = {rank: _medians(own) for rank, own in steps.items() if len(own) >= _FEWEST}
    if not medians:
        return {}, []
    first = min(medians)
    return medians, [_overview(medians[first], len(steps[first])), *_causes(medians), *_long_steps(steps[first])]


def _medians(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median duration, and of each part its mean share of that."""
    middle = statistics.median(_number(step, "seconds") for step in steps)
    total = sum(_number(step, "seconds") for step in steps) or 1.0
    shares = {part: sum(_number(step, part) for step in steps) / total for part in PARTS}
    return {"seconds": middle, **{part: share * middle for part, share in shares.items()}}


def _overview(own: Mapping[str, float], count: int) -> str:
    seconds = own["seconds"] or 1.0
    shares = {part: own[part] / seconds for part in PARTS}
    return (
        f"A step takes {format_seconds(own['seconds'])} (median of {count:,}): {format_percent(shares['wait'])} "
        f"waiting for the devices, {format_percent(shares['data'])} waiting for data, "
        f"{format_percent(shares['dispatch'])} starting the step (on GPUs it also waits there when the devices have "
        f"enough to do), {format_percent(shares['host'])} in Python between steps."
    )


def _causes(medians: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return sentences about costly work of the hosts, and the process with most of it."""
    words: list[str] = []
    several = len(medians) > 1
    for part, least, text in (
        ("data", _DATA_SHARE, "waits for data {share} of its time: reading or decoding is too slow for the devices"),
        ("host", _HOST_SHARE, "spends {share} of its time in Python between steps: log, evaluate or save more rarely"),
    ):
        shares = {rank: own[part] / (own["seconds"] or 1.0) for rank, own in medians.items()}
        rank = max(shares, key=lambda one: shares[one])
        if shares[rank] > least:
            who = f"Process {rank}" if several else "It"
            words.append(f"{who} {text.format(share=format_percent(shares[rank]))}.")
    own = {rank: one["data"] + one["dispatch"] + one["host"] for rank, one in medians.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != slowest]
    if others:
        usual, step = statistics.median(others), medians[slowest]["seconds"] or 1.0
        if own[slowest] - usual > _BEHIND_SHARE * step:
            words.append(
                f"Process {slowest} holds the others up: before its devices can begin it works "
                f"{format_seconds(own[slowest])} a step, the others {format_seconds(usual)}."
            )
    return words


def _long_steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the steps that took far longer than the others."""
    middle = statistics.median(_number(step, "seconds") for step in steps)
    long = [step for step in steps if _number(step, "seconds") > _LONG * middle]
    if not long or not middle:
        return []
    worst = max(long, key=lambda step: _number(step, "seconds"))
    part = max(PARTS, key=lambda name: _number(worst, name))
    were = "1 step was" if len(long) == 1 else f"{len(long):,} steps were"
    return [
        f"{were} more than {_LONG:.0f} times as long; the longest, step {worst.get('step')}, took "
        f"{format_seconds(_number(worst, 'seconds'))}, most of it {_PART_WORDS[part]}."
    ]


_PART_WORDS = {
    "data": "waiting for data",
    "dispatch": "starting the step",
    "wait": "waiting for the devices",
    "host": "in Python between steps",
}


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
