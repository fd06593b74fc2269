"""Compiled results on disk, found again by content.

The key is a hash of everything a result follows from: the lowered program with its source places, the target's
description, compiler options, versions. An entry holds what was read off the program, not an executable: text, sizes,
warnings. Nothing here can make a wrong result, only save a compilation: an entry that cannot be read is made again, and
a folder that cannot be written is said once.
"""

import hashlib
import json
import os
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdp.core.notices import notice
from jdp.core.user_path import user_path

LIMIT_BYTES = 512 * 2**20
_ENTRY = re.compile(r"[0-9a-f]{64}\.json\.z")
"""Nothing else in the folder is ever deleted: a user may have named one with files of his own."""


def default_folder() -> Path:
    """$JDP_CACHE_DIR, else `jdp` in the user's cache folder (XDG Base Directory Specification)."""
    if chosen := os.environ.get("JDP_CACHE_DIR"):
        return user_path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdp"


@dataclass(frozen=True)
class Cache:
    """A folder of entries; the least recently used go when they exceed `limit_bytes` together."""

    folder: Path
    limit_bytes: int = LIMIT_BYTES

    @staticmethod
    def usual(wanted: bool = True) -> "Cache | None":
        """The user's cache; None where none is wanted."""
        return Cache(default_folder()) if wanted else None

    @staticmethod
    def key(*parts: str) -> str:
        """One name for these texts, in this order."""
        digest = hashlib.sha256()
        for part in parts:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.hexdigest()

    def load(self, key: str) -> dict[str, Any] | None:
        """The entry, or None when there is none that can be read."""
        path = self._path(key)
        try:
            entry = json.loads(zlib.decompress(path.read_bytes()))
            os.utime(path)
        except (OSError, zlib.error, ValueError):
            return None
        return entry if isinstance(entry, dict) else None

    def store(self, key: str, entry: dict[str, Any]) -> None:
        """Write an entry: whole or not at all, also when several processes write it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                file.write(zlib.compress(json.dumps(entry).encode(), level=1))
            Path(file.name).replace(self._path(key))
            self._prune()
        except OSError as error:
            notice(f"compiled results are not kept: {self.folder} cannot be written ({error.strerror})")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.z"

    def _prune(self) -> None:
        entries = sorted(
            (
                (e.stat().st_mtime, e.stat().st_size, e)
                for e in self.folder.glob("*.json.z")
                if _ENTRY.fullmatch(e.name)
            ),
            reverse=True,
        )
        total = 0
        for _, size, path in entries:
            total += size
            if total > self.limit_bytes:
                path.unlink(missing_ok=True)
