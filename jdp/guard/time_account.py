"""Goodput: the useful share of a run's time over all its visits, and where the rest went.

1. The time is from the start of the first process to the last event, including the time between visits.
2. Useful time is that of evaluations and of steps, without their wait for data and without the steps that a crash lost
   and a later visit repeated.
3. `other` is the time that no event explains: a visit's last moments, and the loop's work between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jdp.base.formatting import format_percent, format_seconds

_OF = {"eval": "eval", "save": "save", "wait": "save", "restore": "restore", "compile": "compile"}
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
        """All time, in seconds."""
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

    def as_record(self) -> dict[str, Any]:
        """Return the account as JSON."""
        return asdict(self)

    def as_summary(self) -> dict[str, Any]:
        """Return the account for a run's summary."""
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
    own = Account()
    durations: dict[int, float] = {}
    before = replace(own)
    for event in events:
        time, seconds, step = event["time"], _seconds(event), event.get("step")
        match event["event"]:
            case "before":
                known = {each.name: each.type for each in fields(Account)}
                own = Account(
                    **{name: value for name, value in event.items() if type(value).__name__ == known.get(name)}
                )
                continue
            case "nothing to do":
                own = before
                continue
            case "start":
                before = replace(own)
                _begin_visit(own, time, event)
            case "started" | "resumed" if isinstance(step, int):
                own.start += max(time - own.began - own.aside, 0.0) if own.visits else 0.0
                _give_up(own, step, durations)
            case "step" if isinstance(step, int):
                _count_step(own, step, seconds, min(_seconds(event, "data"), seconds), durations)
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


def _give_up(own: Account, step: int, durations: dict[int, float]) -> None:
    """Count the steps after the step from which a visit resumes as lost."""
    gone = max(own.at - step, 0)
    if gone and own.step_count:
        gone = min(gone, own.step_count)
        mean = own.steps / own.step_count
        seconds = min(sum(durations.pop(own.at - i, mean) for i in range(gone)), own.steps)
        own.steps, own.lost, own.step_count = own.steps - seconds, own.lost + seconds, own.step_count - gone
    own.at = step


def _count_step(own: Account, step: int, seconds: float, data: float, durations: dict[int, float]) -> None:
    """Count a step; a visit's first step compiles."""
    own.at = step
    own.data += data
    if not own.compiled:
        own.compiled = True
        own.compile += seconds - data
        return
    own.steps += seconds - data
    own.step_count += 1
    durations[step] = seconds - data


def _seconds(event: Mapping[str, Any], name: str = "seconds") -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0
