"""Where a run's steps spend time, and on which process, in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_percent, format_seconds
from jdp.guard.time_account import Account

PARTS = ("data", "dispatch", "wait", "host")
_DATA_SHARE, _HOST_SHARE, _BEHIND_SHARE, _LONG = 0.1, 0.25, 0.05, 3.0
_FEWEST = 3
_CAUSE_SHARE, _ONCE_SHARE = 0.1, 0.25


def pace(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the medians of each process' steps in seconds, and sentences about the causes of slow steps.

    Excluded are each process' first step, which compiles, and processes with few steps.
    """
    steps = {rank: [event for event in own if event["event"] == "step"][1:] for rank, own in events.items()}
    medians = {rank: _medians(own) for rank, own in steps.items() if len(own) >= _FEWEST}
    if not medians:
        return {}, []
    first = min(medians)
    costs = [cost.sentence for cost in _step_costs(medians) if cost.share > cost.least]
    return medians, [_overview(medians[first], len(steps[first])), *costs, *_long_steps(steps[first])]


def cause(medians: Mapping[int, Mapping[str, float]], total: Account) -> str | None:
    """Return the largest cost of a run besides its steps' own work, and its share; None if no cost reaches a tenth.

    The cost of the first start, which a longer run spreads over more steps, counts only without another cost.
    """
    if total.total <= 0 or not total.step_count:
        return None
    starts = total.start + total.restore + total.compile
    once = starts / max(total.visits, 1)
    steps = (total.steps + total.data) / total.total
    costs = [(cost.share * steps, cost.cause) for cost in _step_costs(medians)] if medians else []
    for seconds, words in (
        (total.save, "saving: the loop waits {share} of the time for checkpoints"),
        (total.eval, "evaluations: they take {share} of the time"),
        (starts - once + total.lost + total.idle, "restarts: they take {share} of the time, with steps done again"),
    ):
        costs.append((seconds / total.total, words.format(share=format_percent(seconds / total.total))))
    most, words = max(costs)
    if most >= _CAUSE_SHARE:
        return words
    share = once / total.total
    return f"starting: with compiling it takes {format_percent(share)} of the time" if share >= _ONCE_SHARE else None


@dataclass(frozen=True)
class _Cost:
    """A cause for which the devices wait in a step, on the process with the longest wait.

    Attributes:
        share: share of a step.
        least: share from which it is reported.
        cause: the cause in a line.
        sentence: the cause and the fix.
    """

    share: float
    least: float
    cause: str
    sentence: str


def _step_costs(medians: Mapping[int, Mapping[str, float]]) -> list[_Cost]:
    """Return the costs of a run's steps besides their own work."""
    costs: list[_Cost] = []
    for part, least, waits, does in (
        (
            "data",
            _DATA_SHARE,
            "input: the devices wait up to {share} of a step for batches",
            "waits for data {share} of its time: reading or decoding is too slow for the devices",
        ),
        (
            "host",
            _HOST_SHARE,
            "python: the devices wait up to {share} of a step for Python between steps",
            "spends {share} of its time in Python between steps: log, evaluate or save more rarely",
        ),
    ):
        shares = {rank: own[part] / (own["seconds"] or 1.0) for rank, own in medians.items()}
        rank = max(shares, key=shares.__getitem__)
        share, most = format_percent(shares[rank]), f", most in process {rank}" if len(medians) > 1 else ""
        who = f"Process {rank}" if len(medians) > 1 else "It"
        costs.append(_Cost(shares[rank], least, waits.format(share=share) + most, f"{who} {does.format(share=share)}."))
    return costs if (late := _holds_up(medians)) is None else [*costs, late]


def _holds_up(medians: Mapping[int, Mapping[str, float]]) -> _Cost | None:
    """Return the cost of a process whose host works much longer than the others before its devices can begin."""
    own = {rank: one["data"] + one["dispatch"] + one["host"] for rank, one in medians.items()}
    slowest = max(own, key=own.__getitem__)
    others = [seconds for rank, seconds in own.items() if rank != slowest]
    step = medians[slowest]
    if not others or own[slowest] - statistics.median(others) <= _BEHIND_SHARE * (step["seconds"] or 1.0):
        return None
    usual = statistics.median(others)
    share = (own[slowest] - usual - step["data"] - step["host"]) / (step["seconds"] or 1.0)  # these are counted already
    return _Cost(
        share,
        -math.inf,
        f"process {slowest}: the others wait {format_percent(share)} of a step for its host",
        f"Process {slowest} holds the others up: before its devices can begin it works {format_seconds(own[slowest])} "
        f"a step, the others {format_seconds(usual)}.",
    )


def _medians(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median duration, and each part's mean share of it."""
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


def _long_steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about the steps that took far longer than the others."""
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
