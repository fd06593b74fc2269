"""Notices: a choice made, a leaf replicated or a fallback taken is reported once in each process.

They go to the logger "jdp" if the application has enabled it at level INFO. If nobody configured logging, they are
printed to standard error. (A handler without a level, which a library may have added, does not count.)
"""

import contextlib
import logging
import sys

logger = logging.getLogger("jdp")
_said: set[str] = set()


def notice(message: str) -> None:
    """Report `message` at level INFO the first time it is given in this process; only process 0 reports."""
    import jax

    if jax.process_index() == 0:
        notice_anywhere(message)


def notice_anywhere(message: str) -> None:
    """Report as `notice` does, on any process: for notices before JAX has chosen its devices."""
    if message in _said:
        return
    _said.add(message)
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    elif logger.getEffectiveLevel() <= logging.WARNING:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(f"jdp: {message}", file=sys.stderr)
