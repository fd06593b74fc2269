"""A deadline for each step: JAX does not end a hang, so a thread beside the loop does.

1. The loop reports to the thread its next activity, and the end of each step. A step may take ten median steps, but at
   least `seconds`; rare work that compiles, reads or writes may take `first_seconds`.
2. In a cluster a second thread publishes the process' step once a second in the coordination service, which works while
   the devices hang; the call itself may block. A process whose deadline has passed publishes that too; the others see
   it and stop. Process 0 notices a silent process, and all others notice a silent process 0. JAX's heartbeats notice it
   later, abort all processes with 134, and name no process.
3. Each process prints the stacks of its threads and which process is behind, and exits with 75: a supervisor restarts
   the job from its last checkpoint. The report has a thread of its own, because disks and pipes may hang too.

The first thread must survive any error: without memory any line may raise MemoryError, and no thread starts. A process
that was stopped (Ctrl-Z) and continues gets its time again. On GPUs XLA has its own, shorter timeout
(`set_xla_timeout`), which ends a process whose Python cannot run. `faulthandler`'s own timer needs no thread of Python,
but it exits with 1, after which no supervisor starts the job again.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jdp.base.errors import UserError
from jdp.base.machine import visible_gpus
from jdp.core.cluster.barrier import THREAD_SECONDS, coordination_client, joined_as, named
from jdp.core.cluster.initialize import leave_after_failure

TRY_AGAIN = 75
"""The exit code of a process that may be run again: it is late, or was stopped by a signal after saving."""
MEDIANS = 10
"""The number of median steps that a step may take."""
_TICK_SECONDS, _LATE_SECONDS = 1.0, 5.0
SILENT_SECONDS = 20.0
"""A process that publishes nothing for this long, while the others step, is stopped or gone. JAX's heartbeats take
half to all of HEARTBEAT_SECONDS."""
_ANSWER_SECONDS = 4.0  # for the others to publish their positions
_LAST_RESORT_SECONDS = 20.0  # after this time the process ends, whatever hangs
_numbers = itertools.count(1)  # all processes make their deadlines in the same order

DEVICES = "waiting for the devices"
"""The activity of a process that waits for another process."""


@dataclass(frozen=True)
class Position:
    """The position of a process: its last complete step, its activity, and the activity's seconds so far."""

    step: int
    doing: str
    seconds: float


Known = Mapping[int, tuple[Position, float]]
"""Process -> its position, and its publication time (Unix seconds)."""


class Deadline:
    """Ends this process, and in a cluster all processes, if a step does not end in time. Use it in `with`.

        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> with jdp.Deadline() as deadline:
        ...     for number in range(3):
        ...         state, metrics = train_step(state, batch)
        ...         deadline.step(number)
        ...     with deadline.during("saving"):
        ...         jdp.save("checkpoint", state)

    `step` reports the end of a step, `during` other work. When the time is up, each process prints the stacks of all
    its threads and which process is behind, and exits with code 75, "run again". JAX runs ahead of the devices, so a
    hang shows a few steps after it began. In a cluster a process that is stopped or gone is noticed after 20 seconds,
    between steps.

    Args:
        seconds: limit of a step, or ten times the median step if that is longer; 0: no deadline. Raise it if single
            steps may take minutes, for example on a shared file system that stalls.
        first_seconds: limit of the first step, which compiles, and of `during`; 0: no deadline. Raise it for models
            that compile for an hour.

    Raises:
        ValueError: a number is negative.
    """

    def __init__(self, seconds: float = 300.0, first_seconds: float = 3600.0) -> None:
        if seconds < 0 or first_seconds < 0:
            raise UserError(
                f"A deadline is a number of seconds, 0 for none; given seconds={seconds}, "
                f"first_seconds={first_seconds}. Give 300 and 3600, or more."
            )
        self._seconds, self._first_seconds = seconds, first_seconds
        self._durations: deque[float] = deque(maxlen=101)
        self._once, self._doing, self._step = True, "starting", 0
        self._since = time.monotonic()
        self._done, self._changed = threading.Event(), threading.Event()  # changed: publish at once
        self._peers: _Peers | None = None
        self._threads: list[threading.Thread] = []
        self.on_tick: Callable[[], None] = lambda: None  # called once a second; it may not block
        self.on_expired: Callable[[Mapping[str, Any]], None] = lambda event: None

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        joined, client = joined_as(), coordination_client()
        if joined is not None and client is not None:
            self._peers = peers = _Peers(client, *joined, next(_numbers))
            self._start(lambda: self._publish(peers), "jdp whereabouts")
        self._start(self._watch, "jdp deadline")
        return self

    def _start(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._changed.set()
        # a thread that returns from JAX while Python exits aborts the process
        for thread in self._threads:
            thread.join(THREAD_SECONDS)

    def step(self, step: int, doing: str = "its next step") -> None:
        """Report the end of a step; the next activity must end in time.

        Args:
            step: its number.
            doing: name of the next activity, for messages.
        """
        now = time.monotonic()
        if not self._once:
            self._durations.append(now - self._since)
        # The time is set first, here and below, so that a short limit never applies to the start of a long activity.
        self._since, self._step, self._doing = now, step, doing
        self._is_once(False)

    def beat(self, doing: str) -> None:
        """Report the end of a part that is not a step, such as a batch of an evaluation.

        Args:
            doing: name of the next activity, for messages.
        """
        self._since, self._doing = time.monotonic(), doing
        self._is_once(False)

    def says(self, doing: str) -> None:
        """Name the current activity without changing its time limit.

        Args:
            doing: the name, for messages.
        """
        self._doing = doing

    @contextlib.contextmanager
    def during(self, doing: str) -> Generator[None]:
        """Allow `first_seconds` for the code in `with`, such as an evaluation or a save; it is not a step.

        Args:
            doing: its name, for messages: "saving".
        """
        once, before = self._once, self._doing
        self._once, self._doing, self._since = True, doing, time.monotonic()
        try:
            yield
        finally:
            self._since, self._doing = time.monotonic(), before
            self._is_once(once)

    def _is_once(self, once: bool) -> None:
        """Set whether the activity is rare work; publish the beginning of steps at once, so that silence is noticed."""
        before, self._once = self._once, once
        if before and not once:
            self._changed.set()

    @property
    def limit(self) -> float | None:
        """Seconds within which the current part must end; None without a deadline."""
        if self._once:
            return self._first_seconds or None
        median = statistics.median(self._durations) if self._durations else 0.0
        return max(self._seconds, MEDIANS * median) if self._seconds else None

    @property
    def position(self) -> Position:
        """The position of this process."""
        return Position(self._step, self._doing, time.monotonic() - self._since)

    def _watch(self) -> None:
        """Wait, in a thread, until the time is up here or on another process; then end this process."""
        before, limit = time.monotonic(), self.limit
        while not self._done.is_set():
            try:
                self._done.wait(_TICK_SECONDS)
                now = time.monotonic()
                if now - before > _TICK_SECONDS + _LATE_SECONDS:  # this process was stopped and gets its time again
                    self._since = now
                    if self._peers is not None:
                        self._peers.heard = now
                limit = self.limit
                self.on_tick()
            except BaseException:  # memory is exhausted: the last known limit still holds
                time.sleep(_TICK_SECONDS)
            before = time.monotonic()
            late, lost, peers = limit is not None and before - self._since > limit, False, self._peers
            if peers is not None:  # the time of another process is up, or it is silent while this one steps
                silent = peers.silent or before - peers.heard > SILENT_SECONDS
                lost = peers.expired or (silent and self._seconds > 0 and not self._once)
            if (late or lost) and not self._done.is_set():
                try:
                    _thread.start_new_thread(self._report, (limit if late else None,))  # it ends the process
                    time.sleep(_LAST_RESORT_SECONDS)
                finally:
                    os._exit(TRY_AGAIN)

    def _publish(self, peers: _Peers) -> None:
        """Publish, in a thread, the position of this process, and look for others whose time is up."""
        while not self._done.is_set():
            try:
                peers.publish(self.position, once=self._once)  # before the wait: the process may stop during it
                self._changed.wait(_TICK_SECONDS if peers.asks is None else 0.1)
                self._changed.clear()
            except Exception:  # memory is exhausted; or the service is gone, and JAX ends this process
                time.sleep(_TICK_SECONDS)
        with contextlib.suppress(Exception):
            peers.leave()

    def _report(self, limit: float | None) -> None:
        try:
            position = self.position
            other = "another process' time was up, or it was silent"
            text = f"{position.doing} did not end in {limit:.0f} seconds" if limit else other
            words = f"After step {position.step}, {text}."
            behind: list[int] = []
            if self._peers is not None:
                self._peers.asks = position
                self._changed.set()
                with contextlib.suppress(Exception):
                    where, behind = self._peers.answer()
                    words += f" {where}"
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
            joined = joined_as()
            who = f"process {joined[0]} of {joined[1]}: " if joined else ""
            end = f"Stacks of all threads are above; exit code {TRY_AGAIN}: run again to resume\n"
            os.write(2, f"{who}deadline: {words} {end}".encode())
            with contextlib.suppress(Exception):  # last, because the log's disk may hang
                event = {"doing": position.doing, "step": position.step, "words": words}
                self.on_expired(event | {"behind": behind, "stack": main_stack()})
            leave_after_failure(TRY_AGAIN)
        finally:
            os._exit(TRY_AGAIN)


class _Peers:
    """The positions of the processes of a cluster, in the coordination service."""

    def __init__(self, client: Any, me: int, count: int, number: int) -> None:
        self._client, self._me, self._count = client, me, count
        self._prefix = f"jdp/deadline/{number}"
        self._stamps: dict[str, tuple[str, float]] = {}  # process 0's: key -> published text, and its time
        self.expired = self.silent = False
        self.asks: Position | None = None  # of this process, whose time is up
        self._answers: tuple[Known, Known] | None = None
        self.heard = time.monotonic()  # last answer of the service

    def publish(self, position: Position, *, once: bool) -> None:
        """Publish the position of this process, and whether it is in a step; read those of the others."""
        self._put("at", position, once=once)
        if self.asks is not None:
            self._put("expired", self.asks)
        expired = self._all("expired")
        self.expired = bool(expired)
        if self.asks is not None:
            self._answers = expired, self._all("at")
        if self._me == 0:
            self._find_silent_processes()
        self.heard = time.monotonic()

    def leave(self) -> None:
        """Withdraw the position of this process at its end, so that it does not count as silent."""
        self._client.key_value_delete(f"{self._prefix}/at/{self._me}")

    def _find_silent_processes(self) -> None:
        """Compare the published positions with the previous ones; outside a step a process may be silent."""
        now = time.monotonic()
        known = self._stamps if now - self.heard < _LATE_SECONDS else {}  # this process was stopped itself
        found = dict(self._client.key_value_dir_get(f"{self._prefix}/at"))
        self._stamps = {
            key: known[key] if known.get(key, ("",))[0] == text else (text, now) for key, text in found.items()
        }
        silent = [text for text, since in self._stamps.values() if now - since > SILENT_SECONDS]
        self.silent = any(not json.loads(text)[-1] for text in silent)

    def answer(self) -> tuple[str, list[int]]:
        """Wait briefly for the positions of the others, and return which process is behind, in words."""
        begin, answers = time.monotonic(), self._answers
        while answers is None or len(answers[0]) < self._count:
            if time.monotonic() - begin > (2 if answers is None else 1) * _ANSWER_SECONDS:
                break
            time.sleep(0.1)
            answers = self._answers
        if answers is not None:
            return whereabouts(self._count, *answers, now=time.time())
        return (
            "The coordination service, which is process 0's, does not answer: process 0 is stopped or gone, or the "
            "network to it.",
            [0],
        )

    def _put(self, kind: str, position: Position, *, once: bool = False) -> None:
        text = json.dumps([position.step, position.doing, position.seconds, time.time(), once])
        self._client.key_value_set(f"{self._prefix}/{kind}/{self._me}", text, allow_overwrite=True)

    def _all(self, kind: str) -> dict[int, tuple[Position, float]]:
        """Return process -> its position, and its publication time (Unix seconds)."""
        found: dict[int, tuple[Position, float]] = {}
        for key, text in self._client.key_value_dir_get(f"{self._prefix}/{kind}"):
            step, doing, seconds, at, _ = json.loads(text)
            found[int(key.rpartition("/")[2])] = Position(step, doing, seconds), at
        return found


def main_stack() -> list[str]:
    """Return the stack of the main thread, innermost first: "jdp/run/loop.py:120 in _loop"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    stack: list[str] = []
    while frame is not None and len(stack) < 40:
        file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
        stack.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return stack


def set_xla_timeout(environment: MutableMapping[str, str], seconds: float) -> str | None:
    """Set XLA's timeout of an execution on GPUs, below the deadline; call it before JAX starts its devices."""
    flag = "--xla_gpu_execution_terminate_timeout"
    given = environment.get("XLA_FLAGS", "")
    if not seconds or flag in given or not visible_gpus(environment):
        return None
    environment["XLA_FLAGS"] = f"{given} {flag}={seconds:.0f}s".strip()
    return f"XLA ends an execution on a GPU after {seconds:.0f} seconds ({flag} in XLA_FLAGS)"


# Which process is behind, in words.


def whereabouts(count: int, answers: Known, before: Known, *, now: float) -> tuple[str, list[int]]:
    """Return a sentence about the processes that are silent or behind, and their numbers.

    For example: "Process 17 is at step 4,211, all others at 4,212."
    """
    silent = [rank for rank in range(count) if rank not in answers]
    if silent:
        words = " ".join(_silent(rank, before, now) for rank in silent[:3])
        more = f" {len(silent) - 3} more do not answer." if silent[3:] else ""
        steps = sorted({position.step for position, _ in answers.values()})
        if steps:
            all_ = f"All others are at step {steps[0]:,}"
            others = all_ if len(steps) == 1 else f"The others are at step {steps[0]:,} to {steps[-1]:,}"
            more += f" {others}."
        return words + more, silent
    steps = {rank: position.step for rank, (position, _) in answers.items()}
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(behind) == count:
        doing = {position.doing for position, _ in answers.values()}
        busy = [rank for rank, (position, _) in answers.items() if position.doing != DEVICES]
        if len(doing) == 1:
            where = f"All processes are at step {steps[0]:,}, {doing.pop()}"
            return f"{where}: the devices hang, or the network between them.", []
        return f"All processes are at step {steps[0]:,}: {_doing(answers)}.", busy if len(busy) < count else []
    doing = answers[behind[0]][0].doing
    verb = "is" if len(behind) == 1 else "are"
    ahead = sorted({*steps.values()} - {steps[behind[0]]})
    others = f"all others at {ahead[0]:,}" if len(ahead) == 1 else f"the others at {ahead[0]:,} to {ahead[-1]:,}"
    return f"{capital(named(behind))} {verb} at step {steps[behind[0]]:,} ({doing}), {others}.", behind


def _silent(rank: int, before: Known, now: float) -> str:
    if rank not in before:
        return f"Process {rank} does not answer, and never reported its position."
    position, at = before[rank]
    return (
        f"Process {rank} does not answer: {max(now - at, 0):.0f} seconds ago it was at step {position.step:,}, "
        f"{position.doing}."
    )


def _doing(answers: Known) -> str:
    """Return the activity of each group of processes."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (position, _) in sorted(answers.items()):
        groups[position.doing].append(rank)
    ordered = sorted(groups.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {doing}" for doing, ranks in ordered)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
