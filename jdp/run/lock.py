"""One run in one folder: a lock that its process holds, and that dies with it.

`flock` is the system's: whatever ends the process, the lock is gone, and nothing is left to clear away by hand. Who
holds it stands in the file, for the message that another run gets.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

from jdp.core.notices import notice
from jdp.experiment.file import ExperimentError

LOCK = ".lock"
_HAS_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks says."""


@contextlib.contextmanager
def locked(folder: Path) -> Generator[bool]:
    """Hold the lock of a run's folder, which must exist; yields False where the file system has none, which is said.

    Raises:
        ExperimentError: another run holds it.
        OSError: the file cannot be made.
    """
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
    """The open file, locked; None where locks are not to be had."""
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
                f"{file.parent} has a run that goes on{f', {holder}' if holder else ''}: two in one folder would mix "
                "their checkpoints and metrics. Wait for its end, or choose another `name` (--name NEW) or --run-dir"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                break
        os.close(handle)  # its folder was removed between the two, and perhaps made anew
    with contextlib.suppress(OSError):  # a full disk: whose it is, is not said
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return handle
