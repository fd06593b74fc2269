"""The reports of a training loop to its log of events and its deadline."""

from __future__ import annotations

import _thread
import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jdp.base.notices import note_progress
from jdp.base.toml import cut
from jdp.core.cluster.barrier import joined_as
from jdp.core.cluster.initialize import is_lost_peer
from jdp.guard.deadline import DEVICES, Deadline
from jdp.guard.time_account import account
from jdp.launch.events import EVENT_LOGS, EventLog

ALIVE_SECONDS = 5.0
"""After this long without an event, the log notes that the process is alive."""
_LONGEST_ERROR, _MOST_FRAMES = 1000, 8
_NEXT = {
    "data": "in its step",  # dispatched, or compiled
    "dispatch": DEVICES,
    "wait": "finishing its step",
}
"""A part of a step -> the next activity."""


class Watch:
    """Reports the loop's activity to a log of events and a deadline."""

    def __init__(self, log: EventLog, deadline: Deadline) -> None:
        self.log, self.deadline = log, deadline
        self._step = 0
        self._first = True
        self.begun = False  # whether the visit has steps to take
        self._restart()
        deadline.on_tick = self._alive
        deadline.on_expired = lambda event: log.event("deadline", **event)

    def resumed(self, step: int, **facts: Any) -> None:
        """Report, also to the supervisor, that the loop begins after this step, with facts about the visit."""
        note_progress(step)
        self._step, self.begun = step, True
        self._restart()
        self.log.event("resumed" if step else "started", step=step, **facts)
        self.deadline.says("waiting for data")

    def mark(self, part: str) -> None:
        """Report the end of a part of the step: "data", "dispatch" or "wait"."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._mark
        self._mark = now
        if self._first and part == "data":
            self.log.event("begin", doing="compile", step=self._step + 1)
            self.deadline.says(DOING["compile"])
        else:
            self.deadline.says(_NEXT[part])

    def step(self, step: int) -> None:
        """Report the end of a step: its seconds and their parts, data, dispatch, wait, host."""
        seconds = time.perf_counter() - self._start - self._aside
        parts = {"seconds": seconds, **self._parts, "host": max(seconds - sum(self._parts.values()), 0.0)}
        self.log.event("step", step=step, **{name: round(value, 6) for name, value in parts.items()})
        self.deadline.step(step, "waiting for data")
        self._step, self._first = step, False
        self._restart()

    @contextlib.contextmanager
    def during(self, doing: str) -> Generator[None]:
        """Report the work in `with`, such as "eval", "save", "restore"; its time does not count for the step."""
        start = time.perf_counter()
        self.log.event("begin", doing=doing, step=self._step)
        with self.deadline.during(DOING.get(doing, doing)):
            yield
        now = time.perf_counter()
        self.log.event("end", doing=doing, step=self._step, seconds=round(now - start, 6))
        self._aside += now - start
        self._mark = now

    def _restart(self) -> None:
        self._start = self._mark = time.perf_counter()
        self._parts, self._aside = dict[str, float](), 0.0

    def _alive(self) -> None:
        """Log that the process is alive, in a thread, because the disk may hang."""
        if time.monotonic() - self.log.last > ALIVE_SECONDS and not self.log.is_writing:
            position = self.deadline.position
            _thread.start_new_thread(self.log.event, ("alive",), {"doing": position.doing, "step": position.step})


DOING = {
    "eval": "evaluating",
    "save": "saving",
    "restore": "restoring",
    "wait": "waiting for a save to be written",
    "compile": "compiling or taking its first step",
    "sample": "writing a sample",
    "export": "exporting the model",
}
"""An activity in the log of events -> its words."""


@contextlib.contextmanager
def watching(folder: Path, deadline: Deadline, at_end: Callable[[], Mapping[str, Any]]) -> Generator[Watch]:
    """Record a visit of a run while in `with`, and its end, under a deadline; `at_end` returns facts about the end."""
    rank, count = joined_as() or (0, 1)
    file = folder / EVENT_LOGS / f"rank-{rank:05}.jsonl"
    log = EventLog(file, account=lambda events: asdict(account(events)))
    log.event("start", rank=rank, of=count, pid=os.getpid(), host=socket.gethostname(), began=born())
    try:
        watch = Watch(log, deadline)
        with deadline:
            yield watch
        log.event("finished" if watch.begun else "nothing to do", **at_end())
    except SystemExit as leaving:
        log.event("stopped", code=leaving.code, **at_end())
        raise
    except BaseException as error:
        at = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        text = cut(f"{type(error).__name__}: {error}".removesuffix(": "), _LONGEST_ERROR)
        log.event("failed", error=text, at=at[-_MOST_FRAMES:], lost_peer=is_lost_peer(error), **at_end())
        raise
    finally:
        log.close()


def born(process: int | str = "self") -> float:
    """Return the start of a process of this machine in Unix seconds; the current time if unknown."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
