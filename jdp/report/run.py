"""One run for its page, and its events in words: visits, their ends, and the events between.

A page takes plain values; `jdp report` reads them from runs, and compiles the step again for memory and timeline.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jdp.launch.events import BEGINNINGS

if TYPE_CHECKING:
    from jdp.core.sharding.placement import Placement
    from jdp.foresight.foresee import Estimate

Row = Mapping[str, float]
History = Sequence[Mapping[str, Any]]

_MOST = 60
_SPEEDS = ("tokens_per_second", "examples_per_second")


@dataclass(frozen=True)
class CompiledStep:
    """A run's step, compiled again: its target, the estimate, leaves at rest, and notes."""

    target: str
    estimate: Estimate
    placements: Sequence[Placement] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Run:
    """One run on a page."""

    name: str  # unique among the runs
    rows: Sequence[Row]  # of metrics, each with "step", "time" and numbers; NaN and infinities restored
    history: History = ()  # the events of its visits
    toml: str = ""  # the experiment as run
    # its dotted keys, and their values as TOML; empty if it cannot be parsed
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    checkpoints: Sequence[int] = ()  # steps with a checkpoint
    notes: Sequence[str] = ()  # damaged or missing files, a sentence each
    step: CompiledStep | None = None  # the compiled step; None with the reason in `no_step`
    no_step: str = "The step was not compiled."  # why `step` is None
    samples: Sequence[Mapping[str, Any]] = ()  # rows with "step", "prompt" and "text"
    goodput: str | None = None  # the useful share of its time, and the losses; None without events

    def values(self, metric: str) -> list[float]:
        return [row[metric] for row in self.rows if metric in row]

    def last(self, metric: str) -> float | None:
        return next((row[metric] for row in reversed(self.rows) if metric in row), None)

    def median(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.median(values) if values else None

    @property
    def speed(self) -> str | None:
        """The metric of speed, such as "tokens_per_second"; None if none was logged."""
        return next((name for name in _SPEEDS if any(name in row for row in self.rows)), None)

    @property
    def slow_step(self) -> float | None:
        """The 95th percentile of seconds a step; None if none were logged."""
        seconds = sorted(self.values("step_seconds"))
        return seconds[min(len(seconds) - 1, len(seconds) * 95 // 100)] if seconds else None

    @property
    def waiting(self) -> float | None:
        """The share of a median step that waits for data. A row with a compilation hardly changes a median."""
        waited, step = self.median("data_wait_seconds"), self.median("step_seconds")
        return waited / step if waited is not None and step else None

    @property
    def newest_evaluation(self) -> dict[str, float]:
        """The newest value of each metric of evaluations, without "eval_"."""
        return {name.removeprefix("eval_"): row[name] for row in self.rows for name in row if name.startswith("eval_")}

    @property
    def resumes(self) -> list[float]:
        """The steps after which the run resumed."""
        return [float(event["step"]) for event in self.history if event["event"] == "resumed"]

    @property
    def devices(self) -> str:
        """The devices of the last visit."""
        known = [event for event in self.history if "devices" in event]
        return f"{known[-1]['devices']} × {known[-1].get('device', '?')}" if known else "–"

    @property
    def state(self) -> str:
        """How the run ended, in words, or that it continues."""
        last = next((event for event in reversed(self.history) if "words" not in event), None)
        if last is None:
            return "not known"
        return "running, or killed" if last["event"] in BEGINNINGS else _ended(last)

    @property
    def why_no_step(self) -> str | None:
        """A sentence: why there is no compiled step; None if there is one."""
        if self.step is None:
            return self.no_step
        error = self.step.estimate.error
        return None if error is None else f"The step did not compile: {error}"

    @property
    def happened(self) -> list[tuple[list[str], str]]:
        """The events in order of time: (cells of a table, "bad" or ""), with at most `_MOST` events inside visits."""
        told = [(event, event["words"], "bad") for event in self.history if "words" in event]
        if left := told[_MOST:]:
            told[_MOST:] = [(left[0][0], f"and {len(left):,} more like these", "bad")]
        visits = _visits([event for event in self.history if "words" not in event])
        rows = sorted([*visits, *told], key=lambda row: (_seconds(row[0]) or 0.0, row[0]["step"]))
        return [([_clock(event), f"{event['step']:,.0f}", words], kind) for event, words, kind in rows]


def _visits(history: History) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Yield (event, words, kind) for the beginning and the end of each visit."""
    before = ""
    for event in history:
        what: str = event["event"]
        if what in BEGINNINGS and before in BEGINNINGS:
            yield event, "the previous visit recorded no end: it was killed, or its machine was lost", "bad"
        words = f"{what} on {_devices(event)}" if what in BEGINNINGS else _ended(event)
        if what == "failed":
            words += f": {event.get('error', '')}"
        yield event, words, "bad" if what == "failed" else ""
        before = what


def _seconds(event: Mapping[str, Any]) -> float | None:
    at = event.get("time")
    return at if isinstance(at, int | float) else None


def _clock(event: Mapping[str, Any]) -> str:
    """Return an event's time in UTC, as "2026-11-22 06:42:26"."""
    try:
        return f"{datetime.datetime.fromtimestamp(_seconds(event) or math.nan, datetime.UTC):%F %T}"
    except (ValueError, OverflowError, OSError):  # unknown, or an impossible year
        return "–"


def _ended(event: Mapping[str, Any]) -> str:
    """Return the end of a visit in words; else the event's name."""
    name: str = event["event"]
    words = {"finished": "stopped early" if event.get("stopped_early") else "finished"}
    words["stopped"] = f"stopped by {event.get('signal', 'a signal')}"
    return words.get(name, name)


def _devices(event: Mapping[str, Any]) -> str:
    count, processes = event.get("devices", "?"), event.get("processes", 1)
    joined = f" in {processes} processes" if processes != 1 else ""
    versions = f"(jax {event.get('jax', '?')}, Python {event.get('python', '?')})"
    changed = "".join(f"; {key} changed" for key in event.get("changed") or {})
    return f"{count} × {event.get('device', 'devices')}{joined} {versions}{changed}"
