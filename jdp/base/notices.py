"""Notices: each choice, replicated leaf or fallback is reported once per process.

They go to the logger "jdp" if the application has enabled it at level INFO. If logging is not configured, they are
printed to standard error. (A handler without a level, which a library may have added, does not count.) The start of
`jdp train` prints few notices and counts the others (`in_few_lines`).
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
"""The notices held back at the start of a command; None if all are printed."""


def notice(message: str) -> None:
    """Report `message` at level INFO the first time it is given in this process; only process 0 reports."""
    import jax

    if jax.process_index() == 0:
        notice_anywhere(message)


def warn(message: str) -> None:
    """Report damage, loss or an obstacle as `notice` does, but never hold it back."""
    import jax

    if jax.process_index() == 0:
        _report(message, counts=False)


def notice_anywhere(message: str) -> None:
    """Report as `notice` does, on every process: for notices before JAX has its devices."""
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
        if not counts or _start is None or len(_start) < _MOST_LINES:
            _print(message)


def _print(message: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(for_stream(f"jdp: {message}", sys.stderr), file=sys.stderr)


@contextlib.contextmanager
def in_few_lines(wanted: bool = True) -> Generator[None]:
    """Print at most three lines of notices until `end_of_start` or the end of `with`; warnings do not count."""
    global _start
    _start = [] if wanted else None
    try:
        yield
    finally:
        end_of_start()


def end_of_start() -> None:
    """Print the notice held back, or the number of several; print all notices from now on."""
    global _start
    held, _start = (_start or [])[_MOST_LINES - 1 :], None
    if held:
        _print(held[0] if len(held) == 1 else f"{len(held)} more notices: --verbose")
