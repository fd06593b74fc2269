"""Tokens of large texts on disk, found again by content: a resumed run does not tokenise anew."""

import hashlib
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from jdp.base.disk_cache import Cache, default_folder
from jdp.data.text.token_array import TokenArray

WORTHWHILE_BYTES = 2**23  # of text: less is tokenised in a few seconds


def entry_name(identity: str, documents: Sequence[bytes]) -> str | None:
    """Return the file name of an entry; None for a text too small to be kept."""
    if sum(map(len, documents)) < WORTHWHILE_BYTES:
        return None
    digest = hashlib.blake2b(identity.encode(), digest_size=20)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return f"{digest.hexdigest()}.npz"


def load(name: str | None) -> TokenArray | None:
    """Return the tokens of an entry; None if there is no entry that can be read."""
    return _cache().load(name, _read) if name is not None else None


def store(name: str | None, tokens: TokenArray) -> None:
    """Store tokens as an entry, unless its name is None."""
    if name is not None:
        _cache().store(name, lambda file: np.savez(file, ids=tokens.ids, bounds=tokens.bounds))


def _cache() -> Cache:
    return Cache(default_folder() / "tokens", limit_bytes=2**34, names=r"[0-9a-f]{40}\.npz", contents="tokens")


def _read(file: BinaryIO) -> TokenArray:
    with np.load(file) as arrays:
        return TokenArray(arrays["ids"], arrays["bounds"])
