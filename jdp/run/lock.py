"""One run in one folder: a lock that its process holds.

The operating system releases an `flock` however the process ends, so there is never a stale lock to remove. The file
names its holder, for the message that another run gets.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

from jdp.base.notices import notice
from jdp.experiment.file import ExperimentError

LOCK = ".lock"
_HAS_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks."""


@contextlib.contextmanager
def locked(folder: Path) -> Generator[bool]:
    """Hold the lock of a run's folder."""
    handle = _take(folder / LOCK)
    if handle is None:
        notice(f"{folder} is on a file system without locks: nothing keeps a second run out of it")
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the file open, too
        os.close(handle)


def _take(file: Path) -> int | None:
    """Open and lock the file; None if the file system has no locks. Raises ExperimentError."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno in _HAS_NONE:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ExperimentError(
                f"a folder is for one run at a time; {file.parent} has a run that goes on"
                f"{f', {holder}' if holder else ''}: wait for its end, or choose another `name` (--name NEW) or "
                "--run-dir"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                break
        os.close(handle)  # its folder was removed between the two, and perhaps made anew
    with contextlib.suppress(OSError):  # on a full disk the file does not name its holder
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return handle
