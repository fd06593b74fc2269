"""Notices: a choice made, a leaf replicated or a fallback taken is reported once in each process.

They go to the logger "jdp" if the application has enabled it at level INFO. If nobody configured logging, they are
printed to standard error. (A handler without a level, which a library may have added, does not count.) At the start of
`jdp train` few are printed, and the others counted (`in_few_lines`).
"""

import contextlib
import logging
import sys
from collections.abc import Generator

from jdp.base.formatting import for_stream

logger = logging.getLogger("jdp")
_said: set[str] = set()
_MOST_LINES = 3
_start: list[str] | None = None
"""The notices of the start of a command that prints few of them; None: all are printed."""


def notice(message: str) -> None:
    """Report `message` at level INFO the first time it is given in this process; only process 0 reports."""
    import jax

    if jax.process_index() == 0:
        notice_anywhere(message)


def warn(message: str) -> None:
    """Report as `notice` does what is damaged, lost or in the way: it is never held back."""
    import jax

    if jax.process_index() == 0:
        _report(message, counts=False)


def notice_anywhere(message: str) -> None:
    """Report as `notice` does, on any process: for notices before JAX has chosen its devices."""
    _report(message, counts=True)


def _report(message: str, *, counts: bool) -> None:
    if message in _said:
        return
    _said.add(message)
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    elif logger.getEffectiveLevel() <= logging.WARNING:
        if counts and _start is not None:
            _start.append(message)
            if len(_start) >= _MOST_LINES:
                return
        _print(message)


def _print(message: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(for_stream(f"jdp: {message}", sys.stderr), file=sys.stderr)


@contextlib.contextmanager
def in_few_lines(wanted: bool = True) -> Generator[None]:
    """Print notices in three lines at most until `end_of_start`, or the end of `with`; warnings are not counted."""
    global _start
    _start = [] if wanted else None
    try:
        yield
    finally:
        end_of_start()


def end_of_start() -> None:
    """Print what is left of the notices of the start: one, or the number of them; from now on all are printed."""
    global _start
    held, _start = (_start or [])[_MOST_LINES - 1 :], None
    if held:
        _print(held[0] if len(held) == 1 else f"{len(held)} more notices: --verbose")
