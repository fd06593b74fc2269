"""How far a run has come, for the supervisor that may restart it: a small file that processes of the run write.

A run that fails again and again without a new checkpoint will not get better by being started once more.
"""

import contextlib
import os
from pathlib import Path

PROGRESS_FILE = "JDP_PROGRESS_FILE"
"""The environment variable that names the file; `jdp launch` sets it."""


def note_progress(step: int) -> None:
    """Record that the run can be resumed after this step; do nothing without a supervisor. For process 0."""
    name = os.environ.get(PROGRESS_FILE)
    if name is None:
        return
    fresh = Path(f"{name}.new")
    with contextlib.suppress(OSError):  # a run does not fail because its supervisor cannot be told
        fresh.write_text(f"{step}\n", encoding="ascii")
        fresh.replace(name)


def read_progress(file: Path) -> int | None:
    """Return the step that was noted last; None if none was."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
