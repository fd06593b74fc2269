"""The file in which a run notes its newest checkpoint, for the supervisor that may restart it (`jdp launch`)."""

import contextlib
import os
from pathlib import Path

PROGRESS_FILE = "JDP_PROGRESS_FILE"
"""The environment variable that names the file; `jdp launch` sets it."""


def note_progress(step: int) -> None:
    """Note, on process 0, that the run can be resumed after this step; do nothing without a supervisor."""
    name = os.environ.get(PROGRESS_FILE)
    if name is None:
        return
    fresh = Path(f"{name}.new")
    with contextlib.suppress(OSError):  # a run goes on without its supervisor
        fresh.write_text(f"{step}\n", encoding="ascii")
        fresh.replace(name)


def read_progress(file: Path) -> int | None:
    """Return the step that was noted last; None if none was."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
