"""The process that delays the others, in words, from the published positions of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jdp.core.cluster.barrier import named

DEVICES = "waiting for the devices"
"""The activity of a process that waits for another process."""


@dataclass(frozen=True)
class Position:
    """The position of a process: its last complete step, its activity, and the activity's seconds so far."""

    step: int
    doing: str
    seconds: float


Known = Mapping[int, tuple[Position, float]]
"""Process -> its position, and its publication time (Unix seconds)."""


def whereabouts(count: int, answers: Known, before: Known, *, now: float) -> tuple[str, list[int]]:
    """Return a sentence about the processes that are silent or behind, and their numbers.

    For example: "Process 17 is at step 4,211, all others at 4,212."
    """
    silent = [rank for rank in range(count) if rank not in answers]
    if silent:
        words = " ".join(_silent(rank, before, now) for rank in silent[:3])
        more = f" {len(silent) - 3} more do not answer." if silent[3:] else ""
        return words + more + _where(answers), silent
    steps = {rank: position.step for rank, (position, _) in answers.items()}
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(behind) == count:
        doing = {position.doing for position, _ in answers.values()}
        busy = [rank for rank, (position, _) in answers.items() if position.doing != DEVICES]
        if len(doing) == 1:
            where = f"All processes are at step {steps[0]:,}, {doing.pop()}"
            return f"{where}: the devices hang, or the network between them.", []
        return f"All processes are at step {steps[0]:,}: {_doing(answers)}.", busy if len(busy) < count else []
    doing = answers[behind[0]][0].doing
    verb = "is" if len(behind) == 1 else "are"
    ahead = sorted({*steps.values()} - {steps[behind[0]]})
    others = f"all others at {ahead[0]:,}" if len(ahead) == 1 else f"the others at {ahead[0]:,} to {ahead[-1]:,}"
    return f"{capital(named(behind))} {verb} at step {steps[behind[0]]:,} ({doing}), {others}.", behind


def _silent(rank: int, before: Known, now: float) -> str:
    if rank not in before:
        return f"Process {rank} does not answer, and never reported its position."
    position, at = before[rank]
    return (
        f"Process {rank} does not answer: {max(now - at, 0):.0f} seconds ago it was at step {position.step:,}, "
        f"{position.doing}."
    )


def _where(answers: Known) -> str:
    """Return the steps of the answering processes, in short."""
    steps = sorted({position.step for position, _ in answers.values()})
    if not steps:
        return ""
    if len(steps) == 1:
        return f" All others are at step {steps[0]:,}."
    return f" The others are at step {steps[0]:,} to {steps[-1]:,}."


def _doing(answers: Known) -> str:
    """Return the activity of each group of processes."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (position, _) in sorted(answers.items()):
        groups[position.doing].append(rank)
    ordered = sorted(groups.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {doing}" for doing, ranks in ordered)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
