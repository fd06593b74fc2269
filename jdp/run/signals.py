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
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Self
from weakref import WeakSet

import jax

from jdp.core.cluster.barrier import THREAD_SECONDS, Store, coordination_client
from jdp.core.cluster.initialize import leave_after_failure
from jdp.guard.deadline import TRY_AGAIN

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: TRY_AGAIN, signal.SIGHUP: TRY_AGAIN, signal.SIGUSR1: TRY_AGAIN}
"""Signals that stop a run, with its exit code."""
_SAME_SECONDS = 0.5  # a launcher and a scheduler may both pass on the same signal
_POLL_SECONDS = 0.5  # between looks for another process' request
_LOOK_SECONDS = 0.05  # between looks for the answers, and between tries to make the main thread exit
_ANSWER_SECONDS = 60.0
_UNWIND_SECONDS = 2.0  # how long the main thread may take to exit by itself
_NOTHING = "before the first step there is nothing to save"
_CALLBACKS = {"_xla_gc_callback", "__del__", weakref.__file__, WeakSet.__init__.__code__.co_filename}
"""Functions, and files of functions, in which Python ignores exceptions: callbacks when an object is collected."""
_ROUNDS = itertools.count()


class Stopped(SystemExit):
    """Exit of a run stopped by a signal, with its summary so far: before the first step, only the signal's name."""

    def __init__(self, number: signal.Signals, summary: dict[str, Any]) -> None:
        super().__init__(EXIT_CODES[number])
        self.summary = summary | {"stopped": number.name}


class StopRequest:
    """Listens for signals while in `with`; `at_step` returns True if the run stops after this step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # stops the run
        self.heard: signal.Signals | None = None  # by this process, before the run stops for it
        self.began = False  # the first step is dispatched: from now on processes agree on a stop, and save
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None  # called in another thread
        self._leaving = self._raised = False
        self._heard_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="jdp signals", daemon=True)
        self._agreement = _Agreement() if jax.process_count() > 1 else None

    def __enter__(self) -> Self:
        """Listen for the signals that the process does not ignore (`nohup` makes it ignore SIGHUP)."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if handler is None else handler)  # None: JAX's own, which is C++
        os.write(self._pipe[1], b"\0")
        self._thread.join(THREAD_SECONDS)  # a thread that returns from JAX while Python exits aborts the process
        for end in self._pipe:
            os.close(end)

    def at_step(self, step: int) -> bool:
        """Return True if the run saves and exits after `step`. Every process must call it at every step."""
        return self.poll()

    def poll(self) -> bool:
        """Return True if the run stops here. Every process must call it at the same points."""
        self.signal = (self._agreement.poll() if self._agreement else self.heard) or self.signal
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Exit, in the main thread, if so decided; `_listen` receives the signal itself."""
        if not self._leaving or self.signal is None:
            return
        while frame is not None and not {frame.f_code.co_name, frame.f_code.co_filename} & _CALLBACKS:
            frame = frame.f_back
        if frame is None:  # Python ignores exceptions in the collector's callbacks and in destructors
            self._raised = True
            raise Stopped(self.signal, {})

    def _listen(self) -> None:
        """In a thread, receive signals, and look for a stop request from any process of a cluster."""
        while not self._wait(_POLL_SECONDS):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone: JAX ends this process
                if self._agreement and (exits := self._agreement.agree(lambda: self.began, self._wait)):
                    self._leave(*exits)

    def _wait(self, seconds: float) -> bool:
        """Wait for a signal, whose number Python writes into the pipe; return True at the end of the run."""
        ready = select.select([self._pipe[0]], [], [], seconds)[0]
        number, now = os.read(self._pipe[0], 1)[0] if ready else 0, time.monotonic()
        if number in self._before and not self._leaving:
            if self.heard is None:
                self.heard, self._heard_at = signal.Signals(number), now
                self.on_signal(self.heard)
                if self._agreement:
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        self._agreement.store.put("asked", f"{number:d}")
                elif not self.began:
                    self._leave(self.heard, _NOTHING)
            elif now - self._heard_at > _SAME_SECONDS:
                self._leave(self.heard, "a second signal came")
        return self._done.is_set()

    def _leave(self, by: signal.Signals, why: str) -> None:
        """Exit at once: through the main thread if it runs Python soon, else without it."""
        self.signal, self._leaving = by, True
        words = f"stopped by {by.name}, at once: {why}; the files on disk are complete\n"
        with contextlib.suppress(OSError):
            # A progress bar hides the cursor.
            os.write(2, (words + "\x1b[?25h" * os.isatty(2)).encode())
        end = time.monotonic() + _UNWIND_SECONDS
        while time.monotonic() < end:
            if not self._raised:  # Python calls `_handle`
                signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._before)))
            if self._done.wait(_LOOK_SECONDS):
                return
        leave_after_failure(EXIT_CODES[by])
        os._exit(EXIT_CODES[by])


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
