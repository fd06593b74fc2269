"""A cache on disk, keyed by content, and the folder of all of jdp's caches.

An entry's name is a hash of everything that determines its result, so the cache cannot change a result. An entry that
cannot be read is made again, and a folder that cannot be written is reported once.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from jdp.base.notices import notice
from jdp.base.user_path import user_path

T = TypeVar("T")
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zlib.error)
_ENTRY = re.compile(r"[0-9a-f]{64}\.json\.z")
"""An entry's file name; no other file is ever deleted."""
_NOWHERE = Path(os.devnull) / "jdp"
"""The cache of a user without a home folder: nothing can be written below it, not even by root."""


def default_folder() -> Path:
    """Return $JDP_CACHE_DIR, else `jdp` in the user's cache folder (XDG Base Directory), else `_NOWHERE`."""
    if chosen := os.environ.get("JDP_CACHE_DIR"):
        return user_path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "jdp"
    try:
        return Path.home() / ".cache" / "jdp"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return _NOWHERE


def without_home(folder: Path) -> str | None:
    """Return the message that nothing is cached because the user has no home folder; else None."""
    if not folder.is_relative_to(_NOWHERE):
        return None
    return f"nothing is kept for the next run: HOME is not set, and user {os.getuid()} has no home folder"


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder of the cache; if the cache's root is made here, only the user can access it."""
    if folder.is_relative_to(root := default_folder()) and not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(0o700, exist_ok=True)
    folder.mkdir(mode, parents=True, exist_ok=True)


def others_may_write(folder: Path) -> str | None:
    """Return who else may write to a folder, and the command that forbids it; None if nobody, or no such folder."""
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_mode & 0o022:
        who = "all users" if status.st_mode & 0o002 else "its group"
        return f"{who} may write to {folder}: chmod go-w {folder}"
    if os.geteuid() and status.st_uid not in (os.geteuid(), 0):
        return f"{folder} is user {status.st_uid}'s: set JDP_CACHE_DIR to a folder of your own"
    return None


@dataclass(frozen=True)
class Cache:
    """A folder of compiled results; the least recently used are deleted when they exceed a limit together."""

    folder: Path  # made when the first entry is stored
    limit_bytes: int = 512 * 2**20  # all entries together

    @staticmethod
    def usual(wanted: bool = True) -> "Cache | None":
        """Return the user's cache of compiled results; None unless `wanted`."""
        return Cache(default_folder()) if wanted else None

    @staticmethod
    def key(*texts: str) -> str:
        """Return 64 hex digits, a hash of these texts in this order."""
        return hashlib.sha256(repr(texts).encode()).hexdigest()

    def load(self, name: str, read: Callable[[BinaryIO], T]) -> T | None:
        """Return `read(file)` of the entry; None if there is no entry, or it cannot be read."""
        with contextlib.suppress(*_UNREADABLE):
            with (self.folder / name).open("rb") as file:
                entry = read(file)
            os.utime(self.folder / name)
            return entry
        return None

    def store(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Store an entry by `write(file)`, completely or not at all, even if several processes store it at once."""
        try:
            make_folder(self.folder)
            with tempfile.TemporaryDirectory(dir=self.folder) as temporary:  # removed also when the disk is full
                with Path(temporary, name).open("wb") as file:
                    write(file)
                Path(temporary, name).replace(self.folder / name)
            self._prune()
        except OSError as error:
            why = f"compiled results are not kept for the next run: {self.folder} cannot be written ({error.strerror})"
            homeless = without_home(self.folder)
            notice(f"{homeless}; set JDP_CACHE_DIR to a folder that can be written" if homeless else why)

    def _prune(self) -> None:
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            if _ENTRY.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    status = path.stat()
                    entries.append((status.st_mtime, status.st_size, path))
        total = 0
        for _, size, path in sorted(entries, reverse=True):
            total += size
            if total > self.limit_bytes:
                path.unlink(missing_ok=True)
