"""The folder in a host's memory that outlives a process: /dev/shm/jdp-UID, or below $JDP_MEMORY_DIR.

Each run has its own folder there, named by the path of its checkpoints and a random number beside them. So a run that
was removed and started again finds nothing of the old one. Each process holds a lock there while it lives: a second
run is refused. A later run removes unused folders.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
import stat
import time
from pathlib import Path

import xxhash

from jdp.base.formatting import format_bytes
from jdp.base.machine import available_memory
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.memory.generation import FILES

VARIABLE = "JDP_MEMORY_DIR"
"""The environment variable for a file system in memory other than /dev/shm."""
RUN_ID = ".memory"
"""The file beside a run's checkpoints with the random number in the names of its folders in memory."""
_LOCK = ".lock"
_UNUSED_DAYS = 3.0
_NAME = re.compile(r"[0-9a-f]{16}")


def home() -> Path:
    """Return this user's folder in memory, made with mode 0700. Raises CheckpointError."""
    root = Path(os.environ.get(VARIABLE) or "/dev/shm")
    folder = root / f"jdp-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _unusable(root, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"Copies in memory must be closed to other users; {folder} does not belong to this user with mode 0700. "
            f"Remove it, or set {VARIABLE} to another folder."
        )
    return folder


def token() -> str:
    """Return a text shared by exactly the processes that see the same folder. Raises CheckpointError."""
    found = home().stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()} {found.st_dev} {found.st_ino}"


def folder_of(directory: Path) -> str:
    """Return the name of a run's folders in memory, which depends on the path of its checkpoints; "" before a save."""
    try:
        run_id = (directory / RUN_ID).read_bytes()
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(run_id + bytes(directory.resolve()))


class RunFolder:
    """A run's folder in memory, for one process while this object lives."""

    def __init__(self, name: str, checkpoints: str, process: int) -> None:
        self.path = home() / name
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock = self.path / f"{process}{_LOCK}"
            self._handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for other in filter(lambda path: _NAME.fullmatch(path.name), self.path.parent.iterdir()):
                with contextlib.suppress(OSError):  # a folder that no run has used for three days is removed
                    days = (time.time() - other.stat().st_mtime) / 86400
                    if days > _UNUSED_DAYS and not any(map(_is_held, other.glob(f"*{_LOCK}"))):
                        shutil.rmtree(other, ignore_errors=True)
        except BlockingIOError:
            os.close(self._handle)
            raise CheckpointError(
                f"Copies in memory allow one run at a time; {self.path}, for {checkpoints}, is in use. "
                "Wait for that run, or open the directory without keep_in_memory."
            ) from None
        except OSError as error:
            raise _unusable(self.path, error) from error

    def problem_with(self, size: int) -> str:
        """Return why `size` bytes do not fit in place of the copies that are here; "" if they fit."""
        found = os.statvfs(self.path)
        free = min(found.f_bavail * found.f_frsize, available_memory() or math.inf)
        free += sum(file.stat().st_size for file in self.path.glob(FILES))
        if size <= free:
            return ""
        return (
            f"keep_in_memory holds two copies of this host's part of the state; they need {format_bytes(size)}, "
            f"and {self.path.parent.parent} has {format_bytes(free)}. Make it larger (mount -o remount,size=…), "
            f"set {VARIABLE}, shard over more hosts, or leave out keep_in_memory"
        )

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock; the folder stays for the next start."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _unusable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"keep_in_memory needs a folder in this host's memory; {folder} cannot be written: {error.strerror}. Make "
        f"room, set {VARIABLE} to another folder, or leave out keep_in_memory."
    )


def _is_held(lock: Path) -> bool:
    with lock.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
