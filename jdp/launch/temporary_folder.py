"""A temporary folder of a launcher, which the next launcher removes if this one is killed.

Each holds a lock on its own, which the system releases however the process ends. Only folders whose lock can be taken
are removed, and in them only the files that are known.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from jdp.base.progress_file import JOINED

PREFIX = "jdp-launch-"
_LOCK = ".lock"


@contextlib.contextmanager
def temporary_folder() -> Generator[Path]:
    """Make a folder for the files of this launcher, and remove it at the end, with those of killed ones."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        _remove_unlocked(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    fresh = folder / f"{_LOCK}.new"
    with fresh.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh.rename(folder / _LOCK)  # it has its name once it is held: nobody takes it for a killed one's
        try:
            yield folder
        finally:
            _remove(folder)


def _remove_unlocked(lock: Path) -> None:
    with contextlib.suppress(OSError):  # it is held, another user's, or gone
        if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.geteuid():
            return
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
        finally:
            os.close(handle)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pattern in ("*progress.*", JOINED, _LOCK):
            for file in folder.glob(pattern):
                file.unlink(missing_ok=True)
        folder.rmdir()
