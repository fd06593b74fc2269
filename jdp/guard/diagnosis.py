"""Why a run is slow, hung or dead, and which process caused it: from the logs of events of all processes.

1. Each log is cut into visits. The last visits of all processes are examined together, earlier visits in short.
2. The end of the visit is the first of: a process that failed by itself, a process that ended silently, a deadline, a
   signal, the normal end. A process that reports the loss of another is never the cause.
   Among processes that ended silently, the supervisors' events decide which was first, else the last events.
3. If it continues: whether any process has moved lately, and which is behind.
4. Where its steps spend time, and on which process; the goodput of all visits; the largest cost.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdp.base.formatting import format_seconds
from jdp.base.machine import text_of
from jdp.guard.deadline import Position, capital, whereabouts
from jdp.guard.time_account import Account, account, cause, pace
from jdp.guard.watch import ALIVE_SECONDS, DOING, born
from jdp.launch.events import ENDS, EVENT_LOGS, read, read_logs
from jdp.launch.output import LOGS

ERRORS = f"Messages by their text, each with cause and command: {Path(__file__).with_name('errors.md')}"
"""The line of a diagnosis that names the guide's page of errors."""
_HUNG_SECONDS, _MEDIANS = 60.0, 10.0
_MOST_VISITS, _MOST_LINES = 5, 5
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run."""

    state: str  # "finished", "stopped", "failed", "killed", "deadline", "hung", "running" or "unknown"
    began: int | None  # the process that caused it, if any is known
    words: list[str]  # sentences, the most important first
    pace: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])  # medians, in seconds
    goodput: Account = field(default_factory=Account)  # where all time went
    slow: str | None = None  # the largest cause of a slow run, in words; None if nothing costs much


@dataclass(frozen=True)
class Seen:
    """One visit of one process."""

    rank: int
    events: Events
    supervised: Mapping[str, Any]  # its supervisor's event of its end; {} without one

    @property
    def count(self) -> int:
        of = self.start.get("of", 1)
        return of if isinstance(of, int) else 1

    @property
    def start(self) -> Mapping[str, Any]:
        return self.events[0]

    @property
    def last(self) -> float:
        """Unix seconds of its last event."""
        return self.events[-1]["time"]

    @property
    def step(self) -> int:
        """The last complete step."""
        done = [event for event in self.events if event.get("doing") != "compile"]  # that step has not ended
        return max((event["step"] for event in done if isinstance(event.get("step"), int)), default=0)

    @property
    def left(self) -> Mapping[str, Any]:
        """The event of its exit; {} without one."""
        return next((event for event in reversed(self.events) if event["event"] in ENDS), {})

    @property
    def how(self) -> str | None:
        """How it ended, one of `ENDS`; None without such an event."""
        return self.left.get("event")

    @property
    def doing(self) -> str:
        """Its last activity, in words."""
        open_: list[str] = []
        for event in self.events:
            if event["event"] == "begin":
                open_.append(str(event.get("doing")))
            elif event["event"] in ("end", "step"):
                open_ = open_[:-1]
        if self.events[-1]["event"] == "alive":
            return str(self.events[-1].get("doing"))
        return DOING.get(open_[-1], open_[-1]) if open_ else "training"

    @property
    def moved(self) -> float:
        """Unix seconds of the last event with progress."""
        own = (event["time"] for event in self.events if event["event"] not in ("alive", "signal", *ENDS))
        return max(own, default=self.start["time"])


def diagnose(
    folder: Path, *, now: float | None = None, lives: Callable[[Seen, float], bool] | None = None
) -> Diagnosis:
    now, lives = time.time() if now is None else now, lives or _lives
    logs, nodes = read_logs(folder / EVENT_LOGS, "rank"), read_logs(folder / EVENT_LOGS, "node")
    supervised = sorted((event for events in nodes.values() for event in events), key=lambda event: event["time"])
    ranks = {rank: _visits(rank, events, supervised) for rank, events in logs.items() if events}
    if not ranks:
        spoken = [f"jdp launch: {event.get('words')}." for event in supervised[-_MOST_LINES:]]
        unknown = (
            f"{folder / EVENT_LOGS} has no log of a process: none began its loop there, all failed before a step was "
            "logged, or the disk could not be written."
        )
        failed = [event["rank"] for event in supervised if isinstance(event.get("rank"), int)]
        return Diagnosis("unknown", None, [unknown, *spoken, *(_log(folder, failed[-1]) if failed else [])])
    first = min(ranks)
    visits = _together(ranks)
    last = visits[-1]
    failed = any(seen.how == "failed" for seen in last)
    goes_on = not failed and any(lives(seen, now) for seen in last if not seen.left)
    state, began, words = _going_on(last, now) if goes_on else _ended(last, now)
    if began is not None:
        words += _log(folder, began)
    spoken = (each for each in last[0].events if each["event"] != "deadline" and isinstance(each.get("words"), str))
    words += [str(each["words"]) for each in spoken]
    medians, slow = pace({seen.rank: seen.events for seen in last})
    total = account(read(folder / EVENT_LOGS / f"rank-{first:05}.jsonl"))
    earlier = [seen for seen in reversed(visits[-_MOST_VISITS - 1 : -1]) if seen[0].how != "nothing to do"]
    told = [f"The visit that began {_clock(seen[0].start['time'])}: {_ended(seen)[2][0]}" for seen in earlier]
    words += [*slow, *told, f"{capital(total.words())}."]
    return Diagnosis(state, began, words, medians, total, cause(medians, total))


def _visits(rank: int, events: Events, supervised: Events) -> list[Seen]:
    """Cut events at each "start", and add the supervisor's event if the visit's process was the first that failed.

    Events before the first start are dropped, unless there is none: the log of a long visit has lost its beginning.
    """
    visits: list[Seen] = []
    starts = [i for i, event in enumerate(events) if event["event"] == "start"] or [0]
    for i, j in zip(starts, [*starts[1:], len(events)], strict=True):
        until = events[j]["time"] if j < len(events) else math.inf
        who = {name: events[i].get(name) for name in ("host", "pid")}
        later = [event for event in supervised if events[j - 1]["time"] <= event["time"] < until]
        ends = [event for event in later if event["event"] == "ended" and event.items() >= who.items()]
        visits.append(Seen(rank, events[i:j], ends[0] if ends else {}))
    return visits


def _together(ranks: Mapping[int, Sequence[Seen]]) -> list[list[Seen]]:
    """Return each visit of the first process, oldest first, with the simultaneous visits of the others.

    A process may have fewer visits if it was killed before its log began, or if the run continued without it.
    """
    own = ranks[min(ranks)]
    together = [{one.rank: one} for one in own]
    for rank, visits in sorted(ranks.items()):
        for seen in visits if rank != min(ranks) else ():
            shared = [min(one.last, seen.last) - max(one.start["time"], seen.start["time"]) for one in own]
            at = shared.index(max(shared))
            if rank < own[at].count:
                together[at][rank] = seen  # the latest wins
    return [list(each.values()) for each in together]


def _ended(last: Sequence[Seen], now: float | None = None) -> tuple[str, int | None, list[str]]:
    """Return state, cause and explanation of a visit that has ended; `now` is None for an earlier one."""
    alone = len(last) == 1
    errors = sorted((seen.left["time"], seen.rank, seen) for seen in last if seen.how == "failed")
    causes = [seen for _, _, seen in errors if not seen.left.get("lost_peer")]
    if causes:
        seen = causes[0]
        who = "It failed" if alone else f"Process {seen.rank} failed first"
        words = [f"{who}, after step {seen.step:,}, at {_clock(seen.left['time'])}: {seen.left.get('error')}"]
        return "failed", seen.rank, words + [f"It was raised in {frame}." for frame in (seen.left.get("at") or [])[-1:]]
    events = sorted(((seen.rank, event) for seen in last for event in seen.events), key=lambda pair: pair[1]["time"])
    deadlines = [(rank, event) for rank, event in events if event["event"] == "deadline"]
    if deadlines:
        rank, event = deadlines[0]
        behind = [one for one in event.get("behind") or [] if isinstance(one, int)]
        words, frames = [f"It hung: {event.get('words')}"], [str(frame) for frame in event.get("stack") or []]
        own = next((frame for frame in frames[1:] if "jax/" not in frame and "<" not in frame), None)
        words += [f"Process {rank} was in {frames[0]}, called from {own}."] if own else []
        return "deadline", behind[0] if behind else None, words
    silent = [seen for seen in last if not seen.left]
    if silent:
        seen = min(silent, key=lambda seen: (seen.supervised.get("lost_peer") is not False, seen.last))
        return "killed", seen.rank, _killed(seen, alone, now)
    if errors:
        words = "Every process reports that another one exited, and none reports why. Look at all logs."
        return "failed", None, [words]
    stopped = next((seen for seen in last if seen.how == "stopped"), None)
    if stopped is None:
        return "finished", None, [f"It finished after step {last[0].step:,}."]
    signals = [(rank, str(event.get("signal"))) for rank, event in events if event["event"] == "signal"]
    by = signals[0][1] if signals else "a signal"
    who = f", which process {signals[0][0]} got first," if signals and not alone else ""
    saved = any(event["event"] == "end" and event.get("doing") == "wait" for event in stopped.events)
    how = "and saved. Run again: it resumes" if saved else "at once, without saving. Run again"
    words = f"It was stopped by {by}{who} after step {stopped.step:,}, {how}."
    return "stopped", signals[0][0] if signals else None, [words]


def _killed(seen: Seen, alone: bool, now: float | None) -> list[str]:
    who, others = ("It", "") if alone else (f"Process {seen.rank}", " It was the first: the others lost it.")
    ago = "" if now is None else f", {_ago(now - seen.last)} ago"
    return [
        f"{who} ended without a message after step {seen.step:,}, while {seen.doing}; its last event was at "
        f"{_clock(seen.last)}{ago}.{others}",
        *([f"jdp launch: {seen.supervised.get('words')}."] if seen.supervised else []),
        "A killed process (SIGKILL) ends like this: for lack of memory (see dmesg), by a scheduler's limit, by a "
        "person, or with its machine. Run again: it resumes from its last checkpoint.",
    ]


def _going_on(last: Sequence[Seen], now: float) -> tuple[str, int | None, list[str]]:
    quiet = now - max(seen.moved for seen in last)
    medians, _ = pace({seen.rank: seen.events for seen in last})
    usual = max((own["seconds"] for own in medians.values()), default=0.0)
    compiles = not any(event["event"] == "step" for seen in last for event in seen.events)
    if quiet < max(_HUNG_SECONDS, _MEDIANS * usual) or (compiles and quiet < 60 * _HUNG_SECONDS):
        seen = last[0]
        return "running", None, [f"It runs: step {seen.step:,}, {seen.doing}, {_ago(quiet)} after its last event."]
    answers = {seen.rank: Position(seen.step, seen.doing, seen.last) for seen in last}
    hears = {rank: position for rank, position in answers.items() if now - position.at < 3 * ALIVE_SECONDS}
    if last[0].count == 1:
        return "hung", 0, [f"It has hung for {_ago(quiet)}: step {last[0].step:,}, {last[0].doing}."]
    words, behind = whereabouts(last[0].count, hears, answers, now=now)
    return "hung", behind[0] if behind else None, [f"It has hung for {_ago(quiet)}: {words}"]


def _log(folder: Path, rank: int) -> list[str]:
    lines = text_of(folder / LOGS / f"rank-{rank:05}.log").splitlines()
    tail = [line for line in lines if line.strip()][-_MOST_LINES:]
    return ["\n    ".join([f"The last lines of {LOGS}/rank-{rank:05}.log:", *tail])] if tail else []


def _lives(seen: Seen, now: float) -> bool:
    """Return True if a process is alive: on this machine by its number, elsewhere by its last event."""
    pid, host, began = seen.start.get("pid"), seen.start.get("host"), seen.start.get("began")
    if host == socket.gethostname() and isinstance(pid, int) and isinstance(began, int | float):
        return Path(f"/proc/{pid}").exists() and abs(born(pid) - began) < 3
    return now - seen.last < 6 * ALIVE_SECONDS


def _clock(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))


def _ago(seconds: float) -> str:
    return format_seconds(max(seconds, 0.0)) if seconds < 120 else f"{seconds / 60:,.0f} minutes"
