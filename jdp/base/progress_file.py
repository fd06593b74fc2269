"""Files in which a process reports its progress to the supervisor that may restart it (`jdp launch`)."""

import contextlib
import os
from pathlib import Path

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
