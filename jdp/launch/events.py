"""The log of events of each process of a run, in a file that outlives it.

One JSON object a line, each with "time" (Unix seconds) and "event". A process of the run writes
`events/rank-00000.jsonl` of the run's folder:

| event         | when                                          | further keys                                        |
|---------------|-----------------------------------------------|-----------------------------------------------------|
| start         | the process joined the run                    | rank, of, pid, host, began                          |
| started       | its first step follows                        | step, devices and versions                          |
| resumed       | the same, after some steps                    | the same; changed: key -> [before, now]             |
| begin         | a long activity begins                        | doing, step                                         |
| end           | it ended                                      | doing, step, seconds                                |
| step          | a step of the loop ended                      | step, seconds, its parts data, dispatch, wait, host |
| bad step      | no finite gradient                            | step, words                                         |
| corrupt       | a device's copy of the state differs          | step, words                                         |
| late          | the host that delays all others has changed   | step, words                                         |
| alive         | nothing else happened for a while             | doing, step                                         |
| signal        | a signal came                                 | signal                                              |
| deadline      | an activity did not end in time               | doing, step, words, behind, stack                   |
| finished      | all steps are done                            | step, stopped_early                                 |
| stopped       | a signal                                      | step, signal, code                                  |
| failed        | an error                                      | step, error, at, lost_peer                          |
| nothing to do | the run was finished before                   | step                                                |
| before        | the first line of a file that follows another | the account and the history of the earlier files    |

The supervisor of a node (`jdp launch`) writes `events/node-00000.jsonl` when a process has failed:

| event         | when                                          | further keys                                        |
|---------------|-----------------------------------------------|-----------------------------------------------------|
| ended         | a process failed first, or after a signal     | rank, pid, host, lost_peer, words                   |
| restart       | all processes are started again               | words                                               |
| given up      | they are not                                  | words                                               |

Each line goes to the operating system at once, so it survives SIGKILL. A file that has grown to `LIMIT_BYTES` replaces
`rank-00000.old.jsonl`: a process keeps at least the last ten thousand steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdp.base.notices import warn

EVENT_LOGS = "events"
"""The folder of the logs, in the folder of a run."""
LIMIT_BYTES = 2**20
_MOST_KEPT = 400
"""Largest number of incidents, and of other events, that a file takes over from its predecessor."""
BEGINNINGS, ENDS = ("started", "resumed"), ("finished", "stopped", "failed", "nothing to do")
"""Events of a visit's first step, and of its end."""
Event = dict[str, Any]


class EventLog:
    """Appends the events of this process to a file; `account` sums up those of a file that is set aside."""

    def __init__(
        self,
        file: Path,
        *,
        account: Callable[[Sequence[Event]], Mapping[str, Any]] = lambda events: {},
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.file = file
        self._account, self._limit, self._size = account, limit_bytes, 0
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_closed = False
        self.last = time.monotonic()
        with self._reporting():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def event(self, event: str, **values: Any) -> None:
        """Append an event. If the disk cannot be written, the event is lost and the run continues."""
        line = json.dumps({"time": round(time.time(), 4), "event": event, **values}, default=str) + "\n"
        self.last = time.monotonic()
        with self._lock, self._reporting():
            if self._is_closed:
                return
            descriptor = self._open() if self._descriptor is None else self._descriptor
            self._size += os.write(descriptor, line.encode())
            if self._size > self._limit:
                self._set_aside()

    @property
    def is_writing(self) -> bool:
        """True while an event is being written, for as long as the disk hangs."""
        return self._lock.locked()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor, self._is_closed = None, True

    def _open(self) -> int:
        """Open the file, and complete the half-written last line of a killed process."""
        self._descriptor = descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = os.fstat(descriptor).st_size
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
            self._size += os.write(descriptor, b"\n")
        return descriptor

    def _set_aside(self) -> None:
        """Begin a new file, whose first line has the account of the earlier files."""
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None
        events = read(self.file)
        told = history(events)
        incidents, visits = ([event for event in told if ("words" in event) == own] for own in (True, False))
        newest = {id(event) for event in (*incidents[-_MOST_KEPT:], *visits[-_MOST_KEPT:])}
        kept = {**self._account(events), "history": [event for event in told if id(event) in newest]}
        self.file.replace(_old(self.file))
        descriptor = self._open()
        line = json.dumps({"time": round(time.time(), 4), "event": "before", **kept}) + "\n"
        self._size += os.write(descriptor, line.encode())

    @contextlib.contextmanager
    def _reporting(self) -> Any:
        """Turn a disk error into a notice; the next event reopens the file."""
        try:
            yield
        except OSError as error:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
            self._descriptor = None
            warn(f"{self.file} cannot be written ({error.strerror}): events are lost until it can, the run goes on")


def read(file: Path) -> list[Event]:
    """Return the events of a file in order, without damaged lines; no events without a file."""
    events: list[Event] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for line in file.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events += [event] if type(event.get("time")) in (int, float) else []
    return events


def history(events: Sequence[Event]) -> list[Event]:
    """Return the first and last event of each visit with steps to take, and those between that tell something.

    A killed visit has no last event.
    """
    found, begun = list[Event](), False
    for event in events:
        match event:
            case {"event": "start"}:  # an end before a visit's first step does not end the previous visit
                begun = False
            case {"event": "before", "history": list(kept)}:
                found += history([each for each in kept if isinstance(each, dict)])
                begun = bool(found) and found[-1]["event"] not in ENDS
            case {"event": "started" | "resumed", "step": int()}:
                found.append(event)
                begun = True
            case {"event": "finished" | "stopped" | "failed", "step": int()} if begun:
                found.append(event)
                begun = False
            case {"event": "bad step" | "corrupt" | "late" | "deadline", "step": int(), "words": str()} if begun:
                found.append(event)
            case _:
                pass
    return found


def read_logs(folder: Path, kind: str) -> dict[int, list[Event]]:
    """Return number -> the events of each process of a run, oldest first; `kind` is "rank", or "node" (supervisors)."""
    logs: dict[int, list[Event]] = {}
    for file in sorted(folder.glob(f"{kind}-*.jsonl")):
        number = file.name.removeprefix(f"{kind}-").partition(".")[0]
        if number.isdecimal() and len(number) < 10 and not file.name.endswith(".old.jsonl"):
            newer = read(file)
            logs[int(number)] = [*read(_old(file)), *(event for event in newer if event["event"] != "before")]
    return logs


def _old(file: Path) -> Path:
    return file.with_name(f"{file.stem}.old.jsonl")
