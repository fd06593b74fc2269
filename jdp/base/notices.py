"""Notices: each choice, replicated leaf or fallback is reported once per process.

They go to the logger "jdp" if the application has enabled it at level INFO. If logging is not configured, they are
printed to standard error. (A handler without a level, which a library may have added, does not count.) The start of
`jdp train` prints few notices and counts the others (`in_few_lines`).

A process also reports its progress, in a file, to the supervisor that may restart it (`jdp launch`).
"""

import contextlib
import logging
import os
import sys
from collections.abc import Generator
from pathlib import Path

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


PROGRESS_FILE = "JDP_PROGRESS_FILE"
"""The environment variable that names this process' file; `jdp launch` sets it."""
JOINED = "joined"
"""The file beside it that exists after the processes of this machine have joined their cluster."""

_noted = -1


def note_progress(step: int) -> None:
    """Record that this process can be resumed after this step or a later one; do nothing without a supervisor."""
    global _noted
    if name := os.environ.get(PROGRESS_FILE):
        _noted = max(_noted, step)
        with contextlib.suppress(OSError):  # a run goes on without its supervisor
            fresh = Path(name).with_name(f"new.{Path(name).name}")
            fresh.write_text(f"{_noted}\n", encoding="ascii")
            fresh.replace(name)


def note_joined() -> None:
    """Record that all processes have joined; do nothing without a supervisor."""
    if name := os.environ.get(PROGRESS_FILE):
        with contextlib.suppress(OSError):
            Path(name).with_name(JOINED).touch()


def read_progress(folder: Path) -> int | None:
    """Return the newest step that all processes of this machine have recorded; None without such a step."""
    steps: list[int] = []
    for file in folder.glob("progress.*"):
        with contextlib.suppress(OSError, ValueError):
            steps.append(int(file.read_text(encoding="ascii")))
    return min(steps, default=None)
