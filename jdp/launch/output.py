"""The output of the processes: all lines, with their process' number, on one stream, and a log file per process.

A process writes stdout and stderr into one pipe, so its lines stay in order; they appear on this process' stdout as
`[0] line`. With `clean` (for `--json`) stdout is process 0's, byte for byte, and everything else goes to stderr with
its prefix.

A log file has the output of the process unchanged. A restarted process gets a new log file. The previous log becomes
`rank-00000.1.log`, its predecessor `rank-00000.2.log`, up to `KEPT_LOGS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import sys
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

LOGS = "logs"
"""The folder of the log files in a run's folder; it may exist before the run claims its folder."""
LAST_LINES = 20
KEPT_LOGS = 9
_GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks[^\[]*")  # dropped: printed for every new group


def say(text: str) -> None:
    """Print lines of `jdp launch` itself on stderr."""
    print(f"jdp launch: {text}", file=sys.stderr, flush=True)


@dataclass
class Stream:
    """One output pipe of a process, and the stream that its lines go to."""

    pipe: IO[bytes]  # the pipe that the process writes to
    target: IO[bytes]  # the stream that people see
    prefix: bytes  # start of each line there; empty: output is passed on unchanged
    tail: deque[bytes]  # the last lines, shared by the streams of a process
    log: Log | None  # the process' log file, if any, also shared
    unfinished: bytes = b""

    def write(self, data: bytes) -> None:
        """Write whole lines with their prefix and keep an unfinished one; empty `data` is the end of the stream."""
        if self.log is not None:
            self.log.write(data)
        if not self.prefix:
            self.target.write(data)
        else:
            *lines, self.unfinished = (self.unfinished + data).split(b"\n")
            if not data and self.unfinished:
                lines.append(self.unfinished)
            lines = [kept for line in lines if (kept := _GLOO.sub(b"", line)) or not line]
            self.tail.extend(lines)
            self.target.write(b"".join(self.prefix + line + b"\n" for line in lines))
        self.target.flush()


@dataclass(frozen=True)
class Outputs:
    """The streams of all processes; with `clean` process 0's stdout goes unchanged to stdout, all else to stderr."""

    clean: bool = False
    log_dir: Path | None = None

    def separate(self, rank: int) -> bool:
        """Return True if stdout and stderr of this process go to different streams."""
        return self.clean and rank == 0

    def streams(self, rank: int, pipes: list[IO[bytes]]) -> list[Stream]:
        """Return the streams of a new process: stdout, and stderr if it is separate."""
        tail = deque[bytes](maxlen=LAST_LINES)
        log = None if self.log_dir is None else Log(self.log_dir / f"rank-{rank:05}.log")
        shared = sys.stderr.buffer if self.clean else sys.stdout.buffer
        streams = [Stream(pipe, shared, f"[{rank}] ".encode(), tail, log) for pipe in pipes]
        if self.separate(rank):
            streams[0].target, streams[0].prefix = sys.stdout.buffer, b""
        return streams


class Log:
    """The log file of one process. A disk error is reported once; the process then continues without a log."""

    def __init__(self, file: Path) -> None:
        """Make and lock the file; those of earlier starts get the next number, and the oldest is replaced."""
        self._file = file
        self._stream: FileIO | None = None
        names = [file, *(file.with_suffix(f".{number}.log") for number in range(1, KEPT_LOGS + 1))]
        with self._reporting():
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists() and _is_locked(file):
                say(f"{file} is being written by another jdp launch: this process runs without a log")
                return
            for number in reversed(range(KEPT_LOGS)):
                if names[number].exists():
                    names[number].replace(names[number + 1])
            self._stream = file.open("xb", buffering=0)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes) -> None:
        with self._reporting():
            while self._stream is not None and data:
                data = data[self._stream.write(data) :]

    def close(self, status: str) -> None:
        """Write `status` as the last line, and close the file."""
        self.write(f"jdp launch: {time.strftime('%Y-%m-%d %H:%M:%S')} {status}\n".encode())
        if self._stream is not None:
            self._stream.close()

    @contextlib.contextmanager
    def _reporting(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            say(f"{self._file} cannot be written: {error.strerror}; the process runs without a log")
            if self._stream is not None:
                self._stream.close()
            self._stream = None


def _is_locked(file: Path) -> bool:
    """Return True if another launcher has the lock of this log."""
    with file.open("ab") as log:  # on NFS an exclusive lock takes a file that may be written
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # on a file system without locks it is another error
            return isinstance(error, BlockingIOError | PermissionError)
    return False
