"""Signals that end the process: a thread receives them at once, even while the main thread compiles or waits in JAX."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Self
from weakref import WeakSet

INTERRUPTED, TRY_AGAIN = 130, 75
"""Exit codes: stopped by Ctrl-C; may be run again, since it is late, or was stopped by another signal."""
THREAD_SECONDS = 5.0
"""How long to wait for a thread to end; it may be calling a service that is gone."""
_LOOK_SECONDS = 0.05  # between tries to make the main thread exit
_UNWIND_SECONDS = 2.0  # how long the main thread may take to exit by itself
_LOSING = {
    *("_xla_gc_callback", "__del__", weakref.__file__, WeakSet.__init__.__code__.co_filename),
    "<frozen importlib._bootstrap>",
}
"""Functions, and files of functions, in which an exception is lost: Python ignores those of callbacks when an object is
collected, and an import of C++ reports another error."""


class Listener:
    """While in `with`, ends the process at a signal: it writes a line, and the main thread raises an exception.

    If the main thread runs no Python for two seconds, or loses the exception, the process ends without it. A signal
    that the process ignores (Ctrl-C excepted), or that gets another handler in `with`, is left alone.
    """

    def __init__(self, codes: Mapping[signal.Signals, int]) -> None:
        self.codes = codes  # each signal with the exit code of a process that it ends
        self.by: signal.Signals | None = None  # ends this process
        self._raised = False
        self._before: dict[signal.Signals, object] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="jdp signals", daemon=True)

    def __enter__(self) -> Self:
        """Listen for the signals that the process does not ignore (`nohup` makes it ignore SIGHUP)."""
        self._stderr = os.dup(2)  # while XLA compiles, file descriptor 2 may be a file that reads its messages
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in self.codes:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._forked)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():  # None: JAX's own, which is C++
            signal.signal(number, signal.SIG_IGN if handler is None else handler)  # pyright: ignore[reportArgumentType]
        os.write(self._pipe[1], b"\0")
        self._thread.join(THREAD_SECONDS)  # a thread that returns from JAX while Python exits aborts the process
        for end in (*self._pipe, self._stderr):
            os.close(end)
        if self.by is not None:
            raise self.error(self.by)  # a library may have turned the exception into another

    def hear(self, number: signal.Signals) -> None:
        """Take a signal, in the thread."""
        self.leave(number, "interrupted")

    def error(self, by: signal.Signals) -> BaseException:
        """Return the exception that ends the main thread."""
        return KeyboardInterrupt(by)

    def leave(self, by: signal.Signals, words: str) -> None:
        """End the process, from the thread: through the main thread if it runs Python soon, else without it."""
        self.by = by
        self.say(words)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries turn the exception into others, and report them
        end = time.monotonic() + _UNWIND_SECONDS
        while time.monotonic() < end:
            if not self._raised:  # Python calls `_handle`
                signal.pthread_kill(threading.main_thread().ident or 0, by)
            if self._done.wait(_LOOK_SECONDS):
                return
        self.abandon(self.codes[by])

    def say(self, words: str) -> None:
        """Write a line to stderr, unless its reader has stopped; a progress bar has hidden the cursor of a terminal."""
        with contextlib.suppress(OSError):
            if select.select([], [self._stderr], [], 0)[1]:
                os.write(self._stderr, (f"{words}\n" + "\x1b[?25h" * os.isatty(self._stderr)).encode())

    def abandon(self, code: int) -> None:
        """End the process without its main thread."""
        os._exit(code)

    def wait(self, seconds: float) -> bool:
        """Wait, in the thread, for a signal; return True at the end of `with`."""
        ready = select.select([self._pipe[0]], [], [], seconds)[0]
        number = os.read(self._pipe[0], 1)[0] if ready else 0
        if number in self._before and self.by is None and signal.getsignal(number) == self._handle:
            self.hear(signal.Signals(number))
        return self._done.is_set()

    def look(self) -> None:
        """Do what is due between signals, in the thread."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception, in the main thread, if so decided; the thread receives the signal itself."""
        if self.by is None or self._raised:
            return
        while frame is not None and _LOSING.isdisjoint((frame.f_code.co_name, frame.f_code.co_filename)):
            frame = frame.f_back
        if frame is None:
            self._raised = True
            raise self.error(self.by)

    def _forked(self) -> None:
        """In a forked process: leave the pipe to the parent, and end at SIGTERM, which a pool sends to its workers."""
        if self._before and not self._done.is_set():
            signal.set_wakeup_fd(-1)
            if signal.SIGTERM in self._before:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _listen(self) -> None:
        while not self.wait(0.5):
            self.look()
