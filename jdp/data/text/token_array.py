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
    """Tokens, or their weights, in a file that is mapped into memory: a slice is a copy, and reading does not make the
    process grow.

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
    weights: Any = None  # float32 [tokens] of 0 to 1, as `ids` is kept: of each as a target; None: all are 1

    def astype(self, dtype: np.dtype[Any]) -> "TokenArray":
        """Return the same tokens in another dtype."""
        return TokenArray(self.ids[:].astype(dtype, copy=False), self.bounds, self.weights)


@dataclass(frozen=True, eq=False)
class TokenisedPart:
    """Some documents as tokens."""

    tokens: TokenArray  # the documents, without separators
    # float64 [documents], the `content_score` of each: of its text, or of its ids if it holds no text
    scores: NDArray[np.float64]


def join_spans(tokens: TokenArray, spans: NDArray[np.int64], separator: int | None) -> TokenArray:
    """Return spans of tokens (int64 [spans, 2]) as documents, end to end, each closed by any separator."""
    sizes = spans[:, 1] - spans[:, 0]
    ids = [tokens.ids[start:end] for start, end in spans.tolist()]
    if separator is not None:
        closing = np.array([separator], tokens.ids.dtype)
        ids = [piece for document in ids for piece in (document, closing)]
        sizes = sizes + 1
    weights = tokens.weights
    if weights is not None:
        weights = np.concatenate([weights[:0], *(weights[start:end] for start, end in spans.tolist())])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return TokenArray(np.concatenate([tokens.ids[:0], *ids]), bounds, weights)


def joined(parts: Sequence[TokenArray]) -> TokenArray:
    """Return the documents of several arrays as one; there must be some."""
    starts = accumulate((len(part.ids) for part in parts), initial=0)
    bounds = [part.bounds[1:] + start for part, start in zip(parts, starts, strict=False)]
    weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
    return TokenArray(np.concatenate([part.ids for part in parts]), np.concatenate([[0], *bounds]), weights)


def bounds_of(documents: Sequence[Any]) -> NDArray[np.int64]:
    """Return the bounds of documents that have a length: int64 [documents + 1]."""
    return np.array(list(accumulate(map(len, documents), initial=0)), np.int64)


def smallest_uint(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below `vocab_size`, at least 1."""
    return np.min_scalar_type(max(vocab_size - 1, 0))
