"""Requests to stop a run, which the loop polls at every step; all processes stop after the same step.

One process: SIGINT and SIGTERM set a flag; a second SIGINT interrupts at once, without saving. Several processes: JAX's
preemption service has its own SIGTERM handler (a Python one would disable it) and makes all of them stop at the same
step, so a SIGINT is turned into a SIGTERM.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

import jax

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


class Stopped(SystemExit):
    """Exit of a run that was stopped by a signal, after saving.

    Attributes:
        code: the exit code.
        summary: of the run so far.
    """

    def __init__(self, code: int, summary: dict[str, Any]) -> None:
        super().__init__(code)
        self.summary = summary


class StopRequest:
    """Listens for signals while in `with`; `at_step` returns True if the run stops after this step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._several = jax.process_count() > 1
        self._heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def at_step(self, step: int) -> bool:
        """Return True if the run saves and leaves after `step`. Every process must call it at every step."""
        if self._several:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.signal = self._heard or signal.SIGTERM
        else:
            self.signal = self._heard
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for SIGINT; 75, run again, for SIGTERM."""
        assert self.signal is not None
        return EXIT_CODES[self.signal]

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._heard is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._heard = self._heard or signal.Signals(number)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
