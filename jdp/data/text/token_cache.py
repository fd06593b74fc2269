"""Tokens of large texts on disk, found again by content: a resumed run does not tokenise anew.

The key is a hash of the tokenizer and of every document, so nothing here can make a wrong sample. An entry that cannot
be read is made again; a folder that cannot be written is said once.
"""

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jdp.core.disk_cache import default_folder
from jdp.core.notices import notice
from jdp.data.text.token_line import TokenLine

WORTHWHILE_BYTES = 2**23  # of text: less is tokenised in a few seconds
LIMIT_BYTES = 2**34
_ENTRY = re.compile(r"[0-9a-f]{40}\.npz")
"""Nothing else in the folder is ever deleted."""


def cache_key(identity: str, documents: Sequence[bytes]) -> str | None:
    """The name of an entry; None for a text too small to be kept (1 s a GB)."""
    if sum(map(len, documents)) < WORTHWHILE_BYTES:
        return None
    digest = hashlib.blake2b(identity.encode(), digest_size=20)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return digest.hexdigest()


def load(key: str | None) -> TokenLine | None:
    """The entry, or None where there is none that can be read."""
    if key is None:
        return None
    path = _folder() / f"{key}.npz"
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            line = TokenLine(arrays["ids"], arrays["bounds"])
        os.utime(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return line


def store(key: str | None, line: TokenLine) -> None:
    """Writes an entry: whole or not at all, also when several processes write it. The least recently used ones go."""
    if key is None:
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # gone again, also where the disk is full
            np.savez(Path(own, "line.npz"), ids=line.ids, bounds=line.bounds)
            Path(own, "line.npz").replace(folder / f"{key}.npz")
        _prune(folder)
    except OSError as error:
        notice(f"tokens are not kept for the next run: {folder} cannot be written ({error.strerror})")


def _folder() -> Path:
    return default_folder() / "tokens"


def _prune(folder: Path) -> None:
    ours = [path for path in folder.glob("*.npz") if _ENTRY.fullmatch(path.name)]
    entries = sorted(((e.stat().st_mtime, e.stat().st_size, e) for e in ours), reverse=True)
    total = 0
    for _, size, path in entries:
        total += size
        if total > LIMIT_BYTES:
            path.unlink(missing_ok=True)
