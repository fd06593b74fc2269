"""Where the time of a run went: its goodput, the useful share of all time, and the parts of a step, in words.

1. The time is from the start of the first process to the last event, including the time between visits.
2. Useful time is that of evaluations and of steps, without their wait for data and without the steps that a crash lost
   and a later visit repeated.
3. `other` is the time that no event explains: a visit's last moments, and the loop's work between steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jdp.base.formatting import format_percent, format_seconds

_OF = {"eval": "eval", "save": "save", "wait": "save", "restore": "restore"}
"""The activity of a process -> the kind of time."""


@dataclass
class Account:
    """Where the time of a run went, in seconds."""

    steps: float = 0.0  # useful steps, without their wait for data
    eval: float = 0.0  # evaluations
    compile: float = 0.0  # each visit's first step
    data: float = 0.0  # steps waiting for data
    save: float = 0.0  # the loop waiting for a checkpoint
    restore: float = 0.0  # making the state, or reading it from a checkpoint
    start: float = 0.0  # a visit's time before its loop, without restoring
    lost: float = 0.0  # steps that were repeated
    idle: float = 0.0  # between visits
    first: float = 0.0  # Unix seconds of the first process' start; 0: nothing happened
    last: float = 0.0  # Unix seconds of the last event
    visits: int = 0  # number of visits
    step_count: int = 0  # the steps in `steps`
    began: float = 0.0  # Unix seconds of the start of the last visit's process
    aside: float = 0.0  # seconds of `start` that are counted elsewhere
    at: int = 0  # the last step
    compiled: bool = False  # True after the last visit's first step

    @property
    def total(self) -> float:
        return max(self.last - self.first, 0.0)

    @property
    def goodput(self) -> float | None:
        """The useful share of all time; None before any event."""
        return min((self.steps + self.eval) / self.total, 1.0) if self.total > 0 else None

    @property
    def parts(self) -> dict[str, float]:
        """Kind of time -> seconds, `other` included; they add up to `total`."""
        known = {name: getattr(self, name) for name in KINDS}
        return {**known, "other": max(self.total - sum(known.values()), 0.0)}

    def words(self) -> str:
        """Return goodput and the larger of the other parts: "goodput 91.2 % of 1.2 h; compile 5.1 %, …"."""
        if self.goodput is None:
            return "goodput is not known"
        left = {name: seconds for name, seconds in self.parts.items() if name not in ("steps", "eval")}
        shown = sorted(((s, name) for name, s in left.items() if s >= 0.005 * self.total), reverse=True)
        where = ", ".join(f"{_WORDS[name]} {format_percent(seconds / self.total)}" for seconds, name in shown)
        share = f"goodput {format_percent(self.goodput)} of {format_seconds(self.total)}"
        return f"{share}; {where}" if where else share

    def as_summary(self) -> dict[str, Any]:
        return {"share": self.goodput, "seconds": self.total, "visits": self.visits, **self.parts}


KINDS = ("steps", "eval", "compile", "data", "save", "restore", "start", "lost", "idle")
_WORDS = {
    "compile": "compiling",
    "data": "waiting for data",
    "save": "saving",
    "restore": "making or restoring the state",
    "start": "starting",
    "lost": "steps done again",
    "idle": "between visits",
    "other": "other",
}


def account(events: Sequence[Mapping[str, Any]]) -> Account:
    """Return the account of a process' events."""
    own, before = Account(), Account()
    for event in events:
        time, seconds, step = event["time"], _seconds(event), event.get("step")
        match event["event"]:
            case "before":
                kinds = {each.name: each.type for each in fields(Account)}
                own = Account(**{key: value for key, value in event.items() if type(value).__name__ == kinds.get(key)})
                continue
            case "nothing to do":
                own = before
                continue
            case "start":
                before = replace(own)
                _begin_visit(own, time, event)
            case "started" | "resumed" if isinstance(step, int):
                own.start += max(time - own.began - own.aside, 0.0) if own.visits else 0.0
                gone = min(max(own.at - step, 0), own.step_count)  # the steps after this one were lost
                lost = gone * own.steps / max(own.step_count, 1)
                own.steps, own.lost, own.step_count = own.steps - lost, own.lost + lost, own.step_count - gone
                own.at = step
            case "step" if isinstance(step, int):
                data = min(_seconds(event, "data"), seconds)
                own.at = step
                own.data += data
                if own.compiled:
                    own.steps += seconds - data
                    own.step_count += 1
                else:  # a visit's first step compiles
                    own.compile += seconds - data
                    own.compiled = True
            case "end" if (kind := _OF.get(str(event.get("doing")))) is not None:
                setattr(own, kind, getattr(own, kind) + seconds)
                own.aside += seconds
            case _:
                pass
        own.first = own.first or time
        own.last = max(own.last, time)
    return own


def _begin_visit(own: Account, time: float, event: Mapping[str, Any]) -> None:
    """Begin a visit; its process started before it joined the run."""
    began = event.get("began", time)
    own.began = began if own.last <= began <= time else time
    if own.visits:
        own.idle += max(own.began - own.last, 0.0)
    else:
        own.first = own.began
    own.visits += 1
    own.aside, own.compiled = 0.0, False


def _seconds(event: Mapping[str, Any], name: str = "seconds") -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


# The time of a step, and on which process.

_PARTS = {
    "wait": "waiting for the devices",
    "data": "waiting for data",
    "dispatch": "starting the step (on GPUs it also waits there when the devices have enough to do)",
    "host": "in Python between steps",
}
_WAITS = {  # a part of a step -> the line of its cause, and its sentence with the fix
    "data": (
        "input: the devices wait up to {} of a step for batches",
        "waits for data {} of its time: reading or decoding is too slow for the devices",
    ),
    "host": (
        "python: the devices wait up to {} of a step for Python between steps",
        "spends {} of its time in Python between steps: log, evaluate or save more rarely",
    ),
}
_LONG = 3.0  # medians from which a step is reported as long
_FEWEST = 3
_CAUSE_SHARE, _LATE_SHARE, _ONCE_SHARE = 0.1, 0.05, 0.25


def pace(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the medians of each process' steps in seconds, and sentences about the causes of slow steps.

    Excluded are each process' first step, which compiles, and processes with few steps.
    """
    steps = {rank: [event for event in own if event["event"] == "step"][1:] for rank, own in events.items()}
    medians: dict[int, dict[str, float]] = {}
    for rank, own in steps.items():
        if len(own) >= _FEWEST:  # the median duration, divided by each part's mean share
            middle, total = statistics.median(map(_seconds, own)), sum(map(_seconds, own)) or 1.0
            parts = {part: middle * sum(_seconds(step, part) for step in own) / total for part in _PARTS}
            medians[rank] = {"seconds": middle, **parts}
    if not medians:
        return {}, []
    first = min(medians)
    own, seconds = medians[first], medians[first]["seconds"]
    shares = ", ".join(f"{format_percent(own[part] / (seconds or 1.0))} {words}" for part, words in _PARTS.items())
    sentences = [f"A step takes {format_seconds(seconds)} (median of {len(steps[first]):,}): {shares}."]
    sentences += [sentence for _, _, sentence in _step_costs(medians) if sentence]
    if long := [step for step in steps[first] if _seconds(step) > _LONG * seconds > 0]:
        worst = max(long, key=_seconds)
        part = max(_PARTS, key=lambda name: _seconds(worst, name))
        sentences.append(
            f"{len(long):,} of these steps took more than {_LONG:.0f} times as long; the longest, step "
            f"{worst.get('step')}, took {format_seconds(_seconds(worst))}, most of it {_PARTS[part]}."
        )
    return medians, sentences


def _step_costs(medians: Mapping[int, Mapping[str, float]]) -> list[tuple[float, str, str]]:
    """Return each cause for which devices wait in a step, on the process where they wait longest.

    A cause is its share of a step, its line, and its sentence with the fix ("" if the share is small).
    """
    costs = list[tuple[float, str, str]]()
    for part, (line, words) in _WAITS.items():
        share, rank = max((own[part] / (own["seconds"] or 1.0), rank) for rank, own in medians.items())
        who, most = (f"Process {rank}", f", most in process {rank}") if len(medians) > 1 else ("It", "")
        sentence = f"{who} {words.format(format_percent(share))}." if share > _CAUSE_SHARE else ""
        costs.append((share, line.format(format_percent(share)) + most, sentence))
    hosts = [(own["data"] + own["dispatch"] + own["host"], rank) for rank, own in medians.items()]
    *others, (late, rank) = sorted(hosts)
    usual, step = statistics.median([seconds for seconds, _ in others] or [late]), medians[rank]
    if late - usual > _LATE_SHARE * step["seconds"]:
        share = (late - usual - step["data"] - step["host"]) / (step["seconds"] or 1.0)  # these are counted above
        line = f"process {rank}: the others wait {format_percent(share)} of a step for its host"
        takes = f"before its devices can begin it works {format_seconds(late)} a step"
        sentence = f"Process {rank} holds the others up: {takes}, the others {format_seconds(usual)}."
        costs.append((share, line, sentence))
    return costs


def cause(medians: Mapping[int, Mapping[str, float]], total: Account) -> str | None:
    """Return the largest cost of a run besides its steps' own work, and its share; None if no cost reaches a tenth.

    The cost of the first start, which a longer run spreads over more steps, counts only without another cost.
    """
    if total.total <= 0 or not total.step_count:
        return None
    starts = total.start + total.restore + total.compile
    once = starts / max(total.visits, 1)
    steps = (total.steps + total.data) / total.total
    costs = [(share * steps, line) for share, line, _ in _step_costs(medians)] if medians else []
    for seconds, words in (
        (total.save, "saving: the loop waits {} of the time for checkpoints"),
        (total.eval, "evaluations: they take {} of the time"),
        (starts - once + total.lost + total.idle, "restarts: they take {} of the time, with steps done again"),
    ):
        costs.append((seconds / total.total, words.format(format_percent(seconds / total.total))))
    most, words = max(costs)
    if most >= _CAUSE_SHARE:
        return words
    share = once / total.total
    return f"starting: with compiling it takes {format_percent(share)} of the time" if share >= _ONCE_SHARE else None
