"""Documents as tokens, end to end in one array, which may be a file that is mapped into memory."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE_BYTES = 2**16  # that the kernel maps around one that is read (fault_around_bytes)
_MAPPED_BYTES = 2**25  # at most, before all are given back


class MappedTokens:
    """Tokens in a file, mapped into memory: a slice is a copy, and reading does not make the process grow.

    Attributes:
        dtype: of a token.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # samples are: nothing is to be read ahead
        self._tokens = np.frombuffer(self._map, dtype)
        self._mapped = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, tokens: slice) -> NDArray[Any]:
        copy = self._tokens[tokens].copy()
        self._mapped += copy.nbytes + _PAGE_BYTES  # threads may lose a count, which leaves a few pages longer
        if self._mapped > _MAPPED_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # the page cache keeps them
            self._mapped = 0
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._tokens.nbytes


@dataclass(frozen=True, eq=False)
class TokenArray:
    """Documents as tokens, end to end."""

    # integers [tokens]; once they are checked, the smallest unsigned ones that hold them. `MappedTokens` of a
    # file, else a NumPy array
    ids: Any
    bounds: NDArray[np.int64]  # int64 [documents + 1], the start of each document, and the end of the last

    def astype(self, dtype: np.dtype[Any]) -> "TokenArray":
        """Return the same tokens in another dtype."""
        return TokenArray(self.ids[:].astype(dtype, copy=False), self.bounds)


def bounds_of(documents: Sequence[Any]) -> NDArray[np.int64]:
    """Return the bounds of documents that have a length: int64 [documents + 1]."""
    return np.array(list(accumulate(map(len, documents), initial=0)), np.int64)


def smallest_uint(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below `vocab_size`, at least 1."""
    return np.min_scalar_type(max(vocab_size - 1, 0))
