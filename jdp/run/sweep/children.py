"""A run of a sweep as a separate process: memory, devices and crashes of one run do not affect the next.

It has its own process group, so that Ctrl-C reaches it once, through the sweep: a second one means "at once, without
saving". Its stderr is passed on, and the last line is kept as the reason of a failure.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, Any, Self

from jdp.launch.parent_death import ending_with_parent
from jdp.run.signals import EXIT_CODES
from jdp.run.sweep.grid import Member
from jdp.run.sweep.walk import Ended

_KEPT = 8192  # bytes of stderr


class Children:
    """Starts runs, one at a time; in `with`, signals are passed on to it, and end the sweep."""

    def __init__(self, command: Callable[[Member], Sequence[str]], *, quiet: bool) -> None:
        self._command, self._quiet = command, quiet
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, member: Member) -> Ended:
        """Run a member to its end."""
        if self._heard is not None:  # between two runs
            return Ended(EXIT_CODES[self._heard])
        self._process = subprocess.Popen(
            ending_with_parent(self._command(member)),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if self._quiet else None,
            stderr=subprocess.PIPE,
            process_group=0,
            env={"WANDB_RUN_GROUP": member.base, **os.environ},
        )
        if self._heard is not None:  # while it was being started
            self._process.send_signal(self._heard)
        assert self._process.stderr is not None
        tail = _Tail(self._process.stderr)
        code = self._process.wait()
        self._process = None
        if self._heard is not None and code:  # it may have had no time yet to listen for signals
            return Ended(EXIT_CODES[self._heard])
        return Ended(code if code >= 0 else 128 - code, tail.last_line())

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = self._heard or signal.Signals(number)
        if self._process is not None:
            self._process.send_signal(number)


class _Tail:
    """Copies a stream to stderr, on a thread: a grandchild may keep it open after its writer has exited."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        self._thread.join(2.0)
        lines = [line for line in self._kept.decode(errors="replace").splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]  # "process 0 of 2: error: …"
        return (errors or lines or [""])[-1]

    def _pass_on(self) -> None:
        with self._stream:
            for chunk in iter(lambda: os.read(self._stream.fileno(), 65536), b""):
                self._kept = (self._kept + chunk)[-_KEPT:]
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()
