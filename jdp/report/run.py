"""One run for its page, and its events in words: visits, their ends, skipped steps, bad losses.

A page takes plain values; `jdp report` reads them from the folders of runs, and compiles the step again for memory and
timeline.
"""

from __future__ import annotations

import datetime
import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp.core.sharding.placement import Placement
    from jdp.foresight.forecast import Estimate

Row = Mapping[str, float]
History = Sequence[Mapping[str, Any]]

_BEGINS, _MOST = ("started", "resumed"), 60
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
        """The share of a median step that waits for data; a row with compilation hardly moves a median."""
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
        """Its end in words, or that it goes on."""
        if not self.history:
            return "not known"
        last = self.history[-1]
        words = {
            "finished": "stopped early" if last.get("stopped_early") else "finished",
            "stopped": f"stopped by {last.get('signal', 'a signal')}",
            "failed": "failed",
        }
        return words.get(last["event"], "goes on, or was killed")

    @property
    def why_no_step(self) -> str | None:
        """A sentence: why there is no compiled step; None if there is one."""
        if self.step is None:
            return self.no_step
        error = self.step.estimate.error
        return None if error is None else f"The step did not compile: {error}"

    @property
    def happened(self) -> list[Happened]:
        """Events in order of time; of very many skips, the first."""
        incidents = [*_skips(self.rows), *_not_finite(self.rows)]
        if left := incidents[_MOST:]:
            incidents[_MOST:] = [Happened(left[0].time, left[0].step, f"and {len(left):,} more like these", "bad")]
        return sorted([*_visits(self.history), *incidents], key=lambda each: (each.time or 0.0, each.step))


@dataclass(frozen=True)
class Happened:
    """One event: Unix seconds (None: unknown), batches consumed, words."""

    time: float | None
    step: float
    words: str
    kind: str = ""  # "bad", or nothing

    @property
    def cells(self) -> list[str]:
        """The cells of a table: the time in UTC, as "2026-11-22 06:42:26", the step, and the words."""
        try:
            clock = "–" if self.time is None else f"{datetime.datetime.fromtimestamp(self.time, datetime.UTC):%F %T}"
        except (ValueError, OverflowError, OSError):  # an impossible year
            clock = "–"
        return [clock, f"{self.step:,.0f}", self.words]


def _visits(history: History) -> Iterator[Happened]:
    before = ""
    for event in history:
        what: str = event["event"]
        at, step = event.get("time"), event["step"]
        at = at if isinstance(at, int | float) else None
        if what in _BEGINS and before in _BEGINS:
            yield Happened(
                at, step, "the previous visit recorded no end: it was killed, or its machine was lost", "bad"
            )
        words: dict[str, str] = {
            **{begin: f"{begin} on {_devices(event)}" for begin in _BEGINS},
            "failed": f"failed: {event.get('error', '')}",
            "stopped": f"stopped by {event.get('signal', 'a signal')}",
            "finished": "stopped early: evaluations no longer improved" if event.get("stopped_early") else "finished",
        }
        yield Happened(at, step, words.get(what, what), "bad" if what == "failed" else "")
        before = what


def _devices(event: Mapping[str, Any]) -> str:
    count, processes = event.get("devices", "?"), event.get("processes", 1)
    joined = f" in {processes} processes" if processes != 1 else ""
    versions = f"(jax {event.get('jax', '?')}, Python {event.get('python', '?')})"
    changed = "".join(f"; {key} changed" for key in event.get("changed") or {})
    return f"{count} × {event.get('device', 'devices')}{joined} {versions}{changed}"


def _skips(rows: Sequence[Row]) -> Iterator[Happened]:
    """Yield the skipped steps; consecutive rows with skips are one event."""
    counted: list[Row] = [{"step": 0, "skipped": 0}, *(row for row in rows if "skipped" in row)]
    pairs = itertools.pairwise(counted)
    for skips, streak in itertools.groupby(pairs, lambda pair: pair[1]["skipped"] > pair[0]["skipped"]):
        (start, end), *others = streak
        if not skips:
            continue
        end = others[-1][1] if others else end
        count, first, last = end["skipped"] - start["skipped"], start["step"] + 1, end["step"]
        which = f"step {last:,.0f}" if first == last else f"{count:,.0f} of the steps {first:,.0f} to {last:,.0f}"
        verb = "was" if count == 1 else "were"
        yield Happened(end.get("time"), last, f"{which} {verb} skipped: gradients or updates were not finite", "bad")


def _not_finite(rows: Sequence[Row]) -> Iterator[Happened]:
    """Yield losses that were not finite; consecutive rows of a loss are one event."""
    for name in dict.fromkeys(name for row in rows for name in row if name.endswith("loss")):
        logged = [(math.isfinite(row[name]), row) for row in rows if name in row]
        for is_finite, streak in itertools.groupby(logged, operator.itemgetter(0)):
            (_, first), *others = streak
            if not is_finite:
                until = f" up to step {others[-1][1]['step']:,.0f}" if others else ""
                yield Happened(first.get("time"), first["step"], f"{name} was {first[name]}{until}", "bad")
