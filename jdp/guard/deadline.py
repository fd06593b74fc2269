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
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from jdp.base.errors import UserError
from jdp.base.machine import visible_gpus
from jdp.base.signals import THREAD_SECONDS, TRY_AGAIN
from jdp.core.cluster.barrier import Store, coordination_client, joined_as, named
from jdp.core.cluster.initialize import leave_after_failure

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


class Position(NamedTuple):
    """The position of a process."""

    step: int  # the last complete one
    doing: str  # its activity
    at: float  # when it was there, in Unix seconds


Known = Mapping[int, Position]
"""Process -> its position."""


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
        self._threads = [threading.Thread(target=self._watch, name="jdp deadline", daemon=True)]
        joined, client = joined_as(), coordination_client()
        if joined is not None and client is not None:
            self._peers = peers = _Peers(client, *joined, next(_numbers))
            publish = threading.Thread(target=self._publish, args=(peers,), name="jdp whereabouts", daemon=True)
            self._threads.append(publish)
        for thread in self._threads:
            thread.start()
        return self

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
        return Position(self._step, self._doing, time.time())

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
                self.on_expired(event | {"behind": behind, "stack": stuck_stack(position.doing)})
            leave_after_failure(TRY_AGAIN)
        finally:
            os._exit(TRY_AGAIN)


class _Peers:
    """The positions of the processes of a cluster, in the coordination service."""

    def __init__(self, client: Any, me: int, count: int, number: int) -> None:
        self._store, self._me, self._count = Store(client, f"jdp/deadline/{number}", tuple(range(count))), me, count
        self._stamps: dict[int, tuple[str, float]] = {}  # process 0's: process -> published text, and its time
        self.expired = self.silent = False
        self.asks: Position | None = None  # of this process, whose time is up
        self._answers: tuple[Known, Known] | None = None
        self.heard = time.monotonic()  # last answer of the service

    def publish(self, position: Position, *, once: bool) -> None:
        """Publish the position of this process, and whether it is in a step; read those of the others."""
        self._put("at", position, once=once)
        if self.asks is not None:
            self._put("expired", self.asks)
        expired = self._store.all("expired")
        self.expired = bool(expired)
        if self.asks is not None:
            self._answers = _known(expired), _known(self._store.all("at"))
        if self._me == 0:
            self._find_silent_processes()
        self.heard = time.monotonic()

    def leave(self) -> None:
        """Withdraw the position of this process at its end, so that it does not count as silent."""
        self._store.forget(f"{self._store.prefix}/at/{self._me}")

    def _find_silent_processes(self) -> None:
        """Compare the published positions with the previous ones; outside a step a process may be silent."""
        now = time.monotonic()
        stamps = self._stamps if now - self.heard < _LATE_SECONDS else {}  # this process was stopped itself
        texts = self._store.all("at").items()
        self._stamps = {
            rank: stamps[rank] if stamps.get(rank, ("",))[0] == text else (text, now) for rank, text in texts
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
        text = json.dumps([*position, once])
        self._store.client.key_value_set(f"{self._store.prefix}/{kind}/{self._me}", text, allow_overwrite=True)


def _known(texts: Mapping[int, str]) -> Known:
    return {rank: Position(*json.loads(text)[:-1]) for rank, text in texts.items()}


def stuck_stack(doing: str) -> list[str]:
    """Return a stack, innermost first: "jdp/run/loop.py:120 in _loop".

    While the main thread waits for data, it is the stack of a thread that reads a sample.
    """
    stacks: dict[int, list[str]] = {}
    for thread, top in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        calls = [(Path(frame.f_code.co_filename).parts[-3:], frame) for frame, _ in traceback.walk_stack(top)]
        stacks[thread] = [f"{'/'.join(file)}:{frame.f_lineno} in {frame.f_code.co_name}" for file, frame in calls[:40]]
    reading = [stack for stack in stacks.values() if any("jdp/data/batches.py" in call for call in stack)]
    return reading[0] if reading and doing == "waiting for data" else stacks[threading.main_thread().ident or 0]


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
    """Return sentences about the positions of all processes, and the numbers of those that are silent or behind.

    For example: "Process 17 is at step 4,211 (waiting for data); processes 0, 1, 2 and 28 more are at step 4,212 (…)."
    """
    silent, sentences = [rank for rank in range(count) if rank not in answers], list[str]()
    for rank in silent[:3]:
        ago = "it never reported its position"
        if rank in before:
            step, doing, at = before[rank]
            ago = f"{max(now - at, 0):.0f} seconds ago it was at step {step:,}, {doing}"
        sentences.append(f"Process {rank} does not answer: {ago}.")
    if silent[3:]:
        sentences.append(f"{len(silent) - 3} more do not answer.")
    groups = defaultdict[tuple[int, str], list[int]](list)
    for rank, position in sorted(answers.items()):
        groups[position.step, position.doing].append(rank)
    told: list[str] = []
    for (step, doing), ranks in sorted(groups.items(), key=lambda group: (group[0][0], len(group[1]))):
        told.append(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} at step {step:,} ({doing})")
    if told:
        sentences.append(f"{capital('; '.join(told))}.")
    if not silent and len(told) == 1:
        sentences.append("The devices hang, or the network between them.")
    least = min((step for step, _ in groups), default=0)
    behind = [rank for rank, position in answers.items() if position.step == least]
    if len(behind) == count:
        behind = [rank for rank, position in answers.items() if position.doing != DEVICES]
    return " ".join(sentences), silent or (behind if len(behind) < count else [])


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
