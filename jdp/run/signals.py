"""Signals that stop a run: all processes stop at the same step, save, and exit.

The signals are Ctrl-C (SIGINT), SIGTERM, SIGHUP, and SIGUSR1, which Slurm sends. A thread receives them at once, even
while the main thread compiles or waits inside JAX.

1. Before the first step of a visit is dispatched there is nothing to save: all processes exit at once.
2. After that the loop polls at each step and at each batch of an evaluation. Several processes agree through the
   coordination service: each reports its number of polls, and all stop at the first poll that none has reached.
3. A second signal exits at once. The files on disk are always complete.

These handlers replace JAX's own handling of SIGTERM, which covers neither compilation, nor evaluation, nor other
signals.
"""

from __future__ import annotations

import contextlib
import os
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

TRY_AGAIN = 75
"""The exit code of a run stopped by a signal other than Ctrl-C: run again."""
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: TRY_AGAIN, signal.SIGHUP: TRY_AGAIN, signal.SIGUSR1: TRY_AGAIN}
"""Signals that stop a run, with its exit code."""
_SAME_SECONDS = 0.5  # a launcher and a scheduler may both pass on the same signal
_POLL_SECONDS = 0.5  # between looks for another process' request
_LOOK_SECONDS = 0.05  # between looks for the answers
_ANSWER_SECONDS = 60.0
_UNWIND_SECONDS = 2.0  # how long the main thread may take to exit by itself
_AGAIN_SECONDS = 0.05  # between tries to make it exit: Python ignores exceptions in some callbacks
_NOTHING = "before the first step there is nothing to save"
_CALLBACKS = (weakref.__file__, WeakSet.__init__.__code__.co_filename)  # their callbacks when an object is collected
_SHOW_CURSOR = b"\x1b[?25h"


class Stopped(SystemExit):
    """Exit of a run stopped by a signal, after saving.

    Attributes:
        code: the exit code.
        summary: summary of the run so far; before its first step only "stopped", the name of the signal.
    """

    def __init__(self, code: int, summary: dict[str, Any]) -> None:
        super().__init__(code)
        self.summary = summary


class StopRequest:
    """Listens for signals while in `with`; `at_step` returns True if the run stops after this step.

    Attributes:
        signal: the signal that stops the run; None while it continues.
        heard: the signal that this process has received, before the run stops for it.
        began: whether the first step is dispatched.
        on_signal: called with each signal, in another thread.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.heard: signal.Signals | None = None
        self.began = False
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None
        self._leaving = self._raised = False
        self._before: dict[signal.Signals, Any] = {}
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self._agreement = _Agreement() if jax.process_count() > 1 else None

    def __enter__(self) -> Self:
        """Listen for the signals that the process does not ignore (`nohup` makes it ignore SIGHUP)."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._handle)
        for target in (self._listen, self._look):
            self._threads.append(threading.Thread(target=target, name="jdp signals", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if handler is None else handler)  # None: JAX's own, which is C++
        with contextlib.suppress(BrokenPipeError):  # the thread has ended and closed its end
            os.write(self._pipe[1], b"\0")
        os.close(self._pipe[1])
        for thread in self._threads:  # a thread that returns from JAX while Python exits aborts the process
            thread.join(THREAD_SECONDS)

    def under_way(self) -> None:
        """Report that the first step is dispatched: from now on processes agree on a stop, and save."""
        with self._agreement.lock if self._agreement else contextlib.nullcontext():
            self.began = True

    def at_step(self, step: int) -> bool:
        """Return True if the run saves and exits after `step`. Every process must call it at every step."""
        return self.poll()

    def poll(self) -> bool:
        """Return True if the run stops here. Every process must call it at the same points."""
        if self._agreement is None:
            self.signal = self.heard
        elif self._agreement.poll():
            self.signal = self._agreement.signal
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for SIGINT; 75, run again, for any other signal."""
        assert self.signal is not None
        return EXIT_CODES[self.signal]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Exit, in the main thread, if so decided; `_listen` receives the signal itself."""
        if self._leaving and self.signal is not None and not _is_ignored_in(frame):
            self._raised = True
            raise Stopped(self.exit_code, {"stopped": self.signal.name})

    def _listen(self) -> None:
        """Receive signals in a thread: Python writes their numbers into the pipe."""
        pipe, first = self._pipe[0], 0.0
        while not self._done.is_set() and (numbers := os.read(pipe, 1)):
            number = numbers[0]
            if number not in self._before or self._leaving:
                continue
            now = time.monotonic()
            if self.heard is not None and now - first > _SAME_SECONDS:
                self._leave(self.heard, "a second signal came")
            elif self.heard is None:
                self.heard, first = signal.Signals(number), now
                self.on_signal(self.heard)
                if self._agreement:
                    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone: JAX ends this process
                        self._agreement.store.put("asked", str(number))
                elif not self.began:
                    self._leave(self.heard, _NOTHING)
        os.close(pipe)

    def _look(self) -> None:
        """Look, in a thread, for a stop request from any process of a cluster, and agree on the step."""
        if self._agreement is None:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone: JAX ends this process
            while not self._done.wait(_POLL_SECONDS):
                if (heard := self._agreement.asked()) is not None:
                    if why := self._agreement.agree(lambda: self.began, self._done):
                        self._leave(heard, why)
                    return

    def _leave(self, by: signal.Signals, why: str) -> None:
        """Exit at once: through the main thread if it runs Python soon, else without it."""
        self.signal, self._leaving = by, True
        with contextlib.suppress(OSError):
            os.write(2, f"stopped by {by.name}, at once: {why}; the files on disk are complete\n".encode())
        main = threading.main_thread().ident
        assert main is not None
        end = time.monotonic() + _UNWIND_SECONDS
        while not self._raised and time.monotonic() < end:
            signal.pthread_kill(main, next(iter(self._before)))  # makes Python call `_handle`
            if self._done.wait(_AGAIN_SECONDS):
                return
        if self._done.wait(max(0.0, end - time.monotonic())):
            return
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)  # a progress bar hides it
        leave_after_failure(self.exit_code)
        os._exit(self.exit_code)


def _is_ignored_in(frame: FrameType | None) -> bool:
    """Return True if Python ignores exceptions here: in the collector's callbacks and in destructors."""
    while frame is not None:
        if frame.f_code.co_name in ("_xla_gc_callback", "__del__") or frame.f_code.co_filename in _CALLBACKS:
            return True
        frame = frame.f_back
    return False


class _Agreement:
    """The poll at which the processes of a cluster stop, counted from the start.

    Attributes:
        store: messages between the processes.
        lock: held during the agreement, so that no process continues meanwhile.
        signal: the received signal.
    """

    _rounds = 0

    def __init__(self) -> None:
        _Agreement._rounds += 1
        members = tuple(range(jax.process_count()))
        self.store = Store(coordination_client(), f"jdp/stop/{_Agreement._rounds}", members)
        self.lock = threading.Lock()
        self.signal: signal.Signals | None = None
        self._polls, self._stop_at = 0, -1

    def asked(self) -> signal.Signals | None:
        """Return the signal with which a process asked to stop, the first process' if several did; else None."""
        asked = self.store.all("asked")
        return signal.Signals(int(asked[min(asked)])) if asked else None

    def poll(self) -> bool:
        """Count a poll; return True if it is the agreed one, or a later one."""
        with self.lock:
            self._polls += 1
            return 0 <= self._stop_at <= self._polls

    def agree(self, began: Callable[[], bool], done: threading.Event) -> str | None:
        """Agree on the poll to stop at. All processes call it, in a thread, after one of them has asked.

        Process 0 reads the answers of all, and the others read its decision: -1 if a process has nothing to save. A
        process that has already taken all its steps does not answer. The wait is not in JAX, because a thread inside
        JAX aborts the process when Python exits.
        """
        store = self.store
        with self.lock:
            store.put("polls", str(self._polls if began() else -1))
            end, asked = time.monotonic() + _ANSWER_SECONDS, self.asked()
            assert asked is not None
            while not (decided := store.all("stop")):
                answers = [int(text) for text in store.all("polls").values()] if store.me == 0 else []
                if len(answers) == len(store.members):
                    store.put("stop", f"{asked:d} {-1 if min(answers) < 0 else max(answers) + 1}")
                elif done.wait(_LOOK_SECONDS):
                    return None
                elif time.monotonic() > end:
                    return f"a process did not answer in {_ANSWER_SECONDS:.0f} seconds"
            number, self._stop_at = map(int, decided[0].split())
            self.signal = signal.Signals(number)
            return _NOTHING if self._stop_at < 0 else None
