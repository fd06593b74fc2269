"""Files in which a process tells the supervisor that may restart it (`jdp launch`) how far it has come."""

import contextlib
import os
from pathlib import Path

PROGRESS_FILE = "JDP_PROGRESS_FILE"
"""The environment variable that names this process' file; `jdp launch` sets it."""
JOINED = "joined"
"""The file beside it that exists once the processes of this machine have joined their cluster."""

_noted = -1


def note_progress(step: int) -> None:
    """Note that the run can be resumed after this step, as far as this process knows; do nothing without a supervisor.

    Steps before the newest that this process has noted are left out.
    """
    global _noted
    if name := os.environ.get(PROGRESS_FILE):
        _noted = max(_noted, step)
        with contextlib.suppress(OSError):  # a run goes on without its supervisor
            fresh = Path(name).with_name(f"new.{Path(name).name}")
            fresh.write_text(f"{_noted}\n", encoding="ascii")
            fresh.replace(name)


def note_joined() -> None:
    """Note that all processes have joined; do nothing without a supervisor."""
    if name := os.environ.get(PROGRESS_FILE):
        with contextlib.suppress(OSError):
            Path(name).with_name(JOINED).touch()


def read_progress(folder: Path) -> int | None:
    """Return the newest step that all processes of this machine have noted; None if none has."""
    steps: list[int] = []
    for file in folder.glob("progress.*"):
        with contextlib.suppress(OSError, ValueError):
            steps.append(int(file.read_text(encoding="ascii")))
    return min(steps, default=None)
