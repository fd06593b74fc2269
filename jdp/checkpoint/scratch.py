"""A folder on this host with copies of one in a bucket, for as long as the processes of this host use it.

Each use has a new folder below the user's cache ($JDP_CACHE_DIR), as only the bucket is trusted later. The processes of
a cluster share the folder of their host. Each holds a lock on it that ends with the process: folders of killed
processes are recognised by it, and removed when the next one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Generator
from pathlib import Path

import jax

from jdp.base.disk_cache import default_folder, make_folder
from jdp.base.notices import show_as
from jdp.base.user_path import PathError
from jdp.checkpoint.errors import CheckpointError
from jdp.core.cluster.barrier import from_every_process, from_first_process, meet

_LOCK, _TURN, _TOKEN, _KEEP = ".lock", ".turn", ".token", ".keep"


class Scratch:
    """The folder of one use; it is removed when it is no longer referred to, or when its processes end."""

    def __init__(self, address: str, *, together: bool) -> None:
        self._address, self._shared = address, False
        root = (default_folder() / "storage").absolute()
        name = secrets.token_hex(6)
        name = from_first_process("the name of a scratch folder", name) if together else name
        self._home = root / name
        scheme, _, rest = address.partition("://")
        self.folder = self._home / rest
        try:
            for lock in root.glob(f"*/{_LOCK}"):  # of processes that have ended
                with contextlib.suppress(OSError):
                    _leave(lock.parent, os.open(lock, os.O_RDWR))
            self._handle = _hold(self._home)
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PathError(
                f"a folder in a bucket needs a scratch folder on this host, and {root} cannot be written: "
                f"{error.strerror}; set JDP_CACHE_DIR to a folder that can"
            ) from error
        show_as(f"{self._home}/", f"{scheme}://")
        self._closing = weakref.finalize(self, _leave, self._home, self._handle)

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Hold a lock that only one process of this host holds at a time."""
        with (self._home / _TURN).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def require_shared(self) -> None:
        """Check, once and on every process, that all processes of the cluster see the same folder."""
        if self._shared:
            return
        token = self._home / _TOKEN
        if jax.process_index() == 0:
            token.write_text(secrets.token_hex(6))
        meet("a scratch folder, where process 0 leaves a token")
        seen = token.read_text() if token.exists() else ""
        self._shared = len(set(from_every_process("the token in a scratch folder", seen))) == 1
        if not self._shared:
            raise CheckpointError(
                f"Processes that save to {self._address} must see one folder in which they write a checkpoint before "
                "it is sent, as those of one host do; these do not. Set JDP_CACHE_DIR to a folder that all hosts "
                "share, or mount the bucket (mountpoint-s3, gcsfuse) and give that folder."
            )

    def keep(self) -> Path:
        """Keep the folder after its processes end, as files in it could not be sent; messages then show its path."""
        (self._home / _KEEP).touch()
        show_as(f"{self._home}/", f"{self._home}/")
        return self.folder


def _hold(home: Path) -> int:
    """Make a scratch folder, or use that of another process of this host; return the lock on it."""
    while True:
        make_folder(home)
        handle = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), (home / _LOCK).stat()):
                return handle
        os.close(handle)  # another process removed it between the two


def _leave(home: Path, handle: int) -> None:
    """Release the lock; the last process removes the folder."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (home / _KEEP).exists():
            shutil.rmtree(home, ignore_errors=True)
    os.close(handle)
