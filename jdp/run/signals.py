"""Signals that stop a run: all processes stop at the same step, save, and exit.

The signals are Ctrl-C (SIGINT), SIGTERM, SIGHUP, and SIGUSR1, which Slurm sends. A thread receives them at once, even
while the main thread compiles or waits inside JAX. Before the first step of a visit is dispatched there is nothing to
save, so all processes exit at once, as they do at a second signal. After that the loop polls at each step and at each
batch of an evaluation. Several processes agree through the coordination service: each reports its number of polls, and
all stop at the first poll that none has reached. (JAX's own preemption sync knows only SIGTERM, and covers neither
compilation nor evaluation.)
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jdp.base.signals import INTERRUPTED, TRY_AGAIN, Listener
from jdp.core.cluster.barrier import Store, coordination_client
from jdp.core.cluster.initialize import leave_after_failure

EXIT_CODES = {signal.SIGINT: INTERRUPTED, **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), TRY_AGAIN)}
"""Signals that stop a run, with its exit code."""
_SAME_SECONDS = 0.5  # a launcher and a scheduler may both pass on the same signal
_LOOK_SECONDS = 0.05  # between looks for the answers
_ANSWER_SECONDS = 60.0
_NOTHING = "before the first step there is nothing to save"
_ROUNDS = itertools.count()


class Stopped(SystemExit):
    """Exit of a run stopped by a signal, with its summary so far: before the first step, only the signal's name."""

    def __init__(self, number: signal.Signals, summary: dict[str, Any]) -> None:
        super().__init__(EXIT_CODES[number])
        self.summary = summary | {"stopped": number.name}


class StopRequest(Listener):
    """Listens for signals while in `with`; `at_step` returns True if the run stops after this step."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODES)
        self.signal: signal.Signals | None = None  # stops the run
        self.heard: signal.Signals | None = None  # by this process, before the run stops for it
        self.began = False  # the first step is dispatched: from now on processes agree on a stop, and save
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None  # called in another thread
        self._heard_at = 0.0
        self._agreement = _Agreement() if jax.process_count() > 1 else None

    def at_step(self, step: int) -> bool:
        """Return True if the run saves and exits after `step`. Every process must call it at every step."""
        return self.poll()

    def poll(self) -> bool:
        """Return True if the run stops here. Every process must call it at the same points."""
        self.signal = (self._agreement.poll() if self._agreement else self.heard) or self.signal
        return self.signal is not None

    def hear(self, number: signal.Signals) -> None:
        """Ask all processes to stop, or exit at once: before the first step, and at a second signal."""
        now = time.monotonic()
        if self.heard is None:
            self.heard, self._heard_at = number, now
            if self.began:
                self.say(
                    f"{number.name}: the run saves and ends after its current work; a second signal ends it at once"
                )
            self.on_signal(number)
            if self._agreement:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._agreement.store.put("asked", f"{number:d}")
            elif not self.began:
                self.leave(number, _NOTHING)
        elif now - self._heard_at > _SAME_SECONDS:
            self.leave(self.heard, "a second signal came")

    def look(self) -> None:
        """Look for a stop request from any process of a cluster."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone: JAX ends this process
            if self._agreement and (exits := self._agreement.agree(lambda: self.began, self.wait)):
                self.leave(*exits)

    def leave(self, by: signal.Signals, words: str) -> None:
        """Exit at once, with the reason."""
        self.signal = by
        super().leave(by, f"stopped by {by.name}, at once: {words}; the files on disk are complete")

    def error(self, by: signal.Signals) -> BaseException:
        """Return the exit of this run."""
        return Stopped(by, {})

    def abandon(self, code: int) -> None:
        """End the process, and leave the cluster."""
        leave_after_failure(code)
        super().abandon(code)


class _Agreement:
    """The poll at which the processes of a cluster stop, counted from the start, and the signal that stops them."""

    def __init__(self) -> None:
        self.store = Store(coordination_client(), f"jdp/stop/{next(_ROUNDS)}", tuple(range(jax.process_count())))
        self.lock = threading.Lock()  # held during the agreement, so that no process continues meanwhile
        self.signal: signal.Signals | None = None
        self._polls, self._stop_at = 0, -1

    def poll(self) -> signal.Signals | None:
        """Count a poll; return the signal if it is the agreed poll, or a later one."""
        with self.lock:
            self._polls += 1
            return self.signal if 0 <= self._stop_at <= self._polls else None

    def agree(self, began: Callable[[], bool], wait: Callable[[float], bool]) -> tuple[signal.Signals, str] | None:
        """Once a process has asked to stop, agree on the poll to stop at; return signal and reason of an exit at once.

        All processes call it, in a thread. Process 0 reads the answers of all, and the others read its decision: -1 if
        a process has nothing to save. A process that has already taken all its steps does not answer. `wait` returns
        True at the end of the run; waiting is not in JAX, because a thread inside JAX aborts the process when Python
        exits.
        """
        store, end = self.store, time.monotonic() + _ANSWER_SECONDS
        if self.signal or not (asked := store.all("asked")):
            return None
        first = asked[min(asked)]  # the first process' signal, if several asked
        with self.lock:
            store.put("polls", str(self._polls if began() else -1))
            while not (decided := store.all("stop")):
                answers = [int(text) for text in store.all("polls").values()]
                if store.me == 0 and len(answers) == len(store.members):
                    store.put("stop", f"{first} {-1 if min(answers) < 0 else max(answers) + 1}")
                elif wait(_LOOK_SECONDS):
                    return None
                elif time.monotonic() > end:
                    return signal.Signals(int(first)), f"a process did not answer in {_ANSWER_SECONDS:.0f} seconds"
            number, self._stop_at = map(int, decided[0].split())
            self.signal = signal.Signals(number)
            return (self.signal, _NOTHING) if self._stop_at < 0 else None
