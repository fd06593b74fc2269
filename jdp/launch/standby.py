"""Standby processes: they have imported everything, and take the place of the processes of a failed attempt.

Imports are three quarters of a restart's work. So once an attempt is under way, a standby is started for each process.
It runs the same command up to `base.standby.wait_for_turn`, before it joins a cluster or touches a device. The next
attempt hands it the variables of its environment.
"""

import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from jdp.base.standby import VARIABLE
from jdp.launch.output import Outputs
from jdp.launch.parent_death import ending_with_parent

AFTER_PROGRESS_SECONDS = 5.0  # the first step compiles meanwhile
AFTER_START_SECONDS = 30.0  # on a machine that hears of no progress


class Standbys:
    """The standbys of a launcher, one for each process of its machine. In `with`; none outlives it."""

    def __init__(self, command: Sequence[str], progress: Path, outputs: Outputs) -> None:
        self._command, self._progress, self._outputs = command, progress, outputs
        self._waiting: list[tuple[subprocess.Popen[bytes], Mapping[str, str], bool]] = []
        self._next: Mapping[int, Mapping[str, str]] = {}
        self._began, self._seen, self._due = 0.0, 0, math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in self._waiting:
            waiting[0].kill()
            waiting[0].communicate()

    def attempt(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Note that an attempt starts, and with which environments the one after it is expected to."""
        self._next, self._began, self._seen = environments, time.monotonic(), self._changed()
        self._due = self._began + AFTER_START_SECONDS

    def turn(self) -> None:
        """Start the standbys once the attempt is under way."""
        if self._changed() != self._seen:
            self._seen = self._changed()
            self._due = min(self._due, time.monotonic() + AFTER_PROGRESS_SECONDS)
        if time.monotonic() < self._due:
            return
        self._due = math.inf
        has = Counter(each[2] for each in self._waiting)
        for rank, variables in self._next.items():
            merged = not self._outputs.separate(rank)
            if has[merged]:
                has[merged] -= 1
            else:
                process = started(self._command, {**variables, VARIABLE: "1"}, merged=merged)
                self._waiting.append((process, variables, merged))

    def take(self, variables: Mapping[str, str], *, merged: bool) -> "subprocess.Popen[bytes] | None":
        """Return a standby, with this environment from now on; None if there is none. Any serves any rank."""
        chosen = next((each for each in self._waiting if each[2] == merged), None)
        if chosen is None:
            return None
        self._waiting.remove(chosen)
        process, had, _ = chosen
        changes = {name: variables.get(name) for name in had.keys() | variables.keys()}
        changes = {name: value for name, value in changes.items() if value != had.get(name)}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(changes).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:  # it has died
            process.communicate()
            return None
        return process

    def _changed(self) -> int:
        """Return when the run reported its progress last; 0 if it did not."""
        try:
            return self._progress.stat().st_mtime_ns
        except OSError:
            return 0


def started(command: Sequence[str], variables: Mapping[str, str], *, merged: bool) -> "subprocess.Popen[bytes]":
    """Start a process in a group of its own, with pipes; `merged`: stderr goes into stdout's."""
    return subprocess.Popen(
        ending_with_parent(command),
        env=variables,
        bufsize=0,
        stdin=subprocess.PIPE if VARIABLE in variables else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        process_group=0,
    )
