"""What happened to a run, in words: its visits, how each ended, skipped steps, losses that were not finite."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, float]
History = Sequence[Mapping[str, Any]]

_BEGINS, _MOST = ("started", "resumed"), 60


@dataclass(frozen=True)
class Happened:
    """One line of the list: Unix seconds (None: not known), batches consumed, what happened, whether that is bad."""

    time: float | None
    step: float
    words: str
    is_bad: bool = False

    @property
    def clock(self) -> str:
        """The time as "2026-11-22 06:42:26", in UTC."""
        try:
            return "–" if self.time is None else f"{datetime.datetime.fromtimestamp(self.time, datetime.UTC):%F %T}"
        except (ValueError, OverflowError, OSError):  # of a year that there is not
            return "–"


def happened(rows: Sequence[Row], history: History) -> list[Happened]:
    """Return what happened, in order of time; of very many skips, the first ones."""
    incidents = [*_skips(rows), *_not_finite(rows)]
    left = incidents[_MOST:]
    if left:
        incidents[_MOST:] = [Happened(left[0].time, left[0].step, f"and {len(left):,} more like these", True)]
    return sorted([*_visits(history), *incidents], key=lambda one: (one.time or 0.0, one.step))


def state(history: History, summary: Mapping[str, Any] | None) -> str:
    """Return how a run ended, or that it goes on, in words."""
    if not history:
        return "not known" if summary is None else "stopped early" if summary.get("stopped_early") else "finished"
    last = history[-1]
    match last["event"]:
        case "finished":
            return "stopped early" if last.get("stopped_early") else "finished"
        case "stopped":
            return f"stopped by {last.get('signal', 'a signal')}"
        case "failed":
            return "failed"
        case _:
            return "goes on, or was killed"


def resumes(history: History) -> list[float]:
    """Return the steps after which the run was resumed."""
    return [float(event["step"]) for event in history if event["event"] == "resumed"]


def _visits(history: History) -> Iterator[Happened]:
    before = ""
    for event in history:
        at, step, what = event.get("time"), event["step"], event["event"]
        at = at if isinstance(at, int | float) else None
        if what in _BEGINS:
            if before in _BEGINS:
                yield Happened(at, step, "the visit before left no end: it was killed, or its machine was lost", True)
            changed: Mapping[str, Any] = event.get("changed") or {}
            now = "".join(f"; {key} changed" for key in changed)
            yield Happened(at, step, f"{what} on {_devices(event)}{now}")
        elif what == "failed":
            yield Happened(at, step, f"failed: {event.get('error', '')}", True)
        elif what == "stopped":
            yield Happened(at, step, f"stopped by {event.get('signal', 'a signal')}, after saving")
        elif what == "finished":
            early = event.get("stopped_early")
            yield Happened(at, step, "stopped early: evaluations no longer improved" if early else "finished")
        else:
            yield Happened(at, step, what)
        before = what


def _devices(event: Mapping[str, Any]) -> str:
    count, processes = event.get("devices", "?"), event.get("processes", 1)
    joined = f" in {processes} processes" if processes != 1 else ""
    return (
        f"{count} × {event.get('device', 'devices')}{joined} (jax {event.get('jax', '?')}, "
        f"Python {event.get('python', '?')})"
    )


def _skips(rows: Sequence[Row]) -> Iterator[Happened]:
    """Yield the skipped steps; rows in a row that have some are one."""
    counted: list[Row] = [{"step": 0, "skipped": 0}, *(row for row in rows if "skipped" in row)]
    streak: list[tuple[Row, Row]] = []
    for before, row in itertools.pairwise([*counted, {"skipped": 0}]):
        if row["skipped"] > before["skipped"]:
            streak.append((before, row))
        elif streak:
            (start, _), (_, end) = streak[0], streak[-1]
            count, first, last = end["skipped"] - start["skipped"], start["step"] + 1, end["step"]
            were = "was" if count == 1 else "were"
            which = f"step {last:,.0f}" if first == last else f"{count:,.0f} of the steps {first:,.0f} to {last:,.0f}"
            yield Happened(end.get("time"), last, f"{which} {were} skipped: gradients or updates were not finite", True)
            streak = []


def _not_finite(rows: Sequence[Row]) -> Iterator[Happened]:
    """Yield losses that were not finite; rows in a row of the same one are one."""
    for name in dict.fromkeys(name for row in rows for name in row if name.endswith("loss")):
        streak: list[Row] = []
        for row in [*(row for row in rows if name in row), {name: 0.0}]:
            if not math.isfinite(row[name]):
                streak.append(row)
            elif streak:
                until = f" up to step {streak[-1]['step']:,.0f}" if len(streak) > 1 else ""
                words = f"{name} was {streak[0][name]}{until}"
                yield Happened(streak[0].get("time"), streak[0]["step"], words, True)
                streak = []
