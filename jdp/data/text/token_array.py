"""Documents as tokens, end to end in one array, in memory or in a memory-mapped file; and their packing into rows.

Packing puts whole documents side by side in rows of fixed length, so that attention and targets can stay inside each
document.

1. A document of n tokens has n - 1 pairs of a token and its target. Its last token is only a target, so every token in
   a row has a target.
2. A document with more pairs than a row is cut into pieces of a full row and a shorter last piece. The last target of a
   piece is the first token of the next, so every token of a document but its first is a target exactly once.
3. Last pieces are packed by best fit, longest first: each into the row with the least remaining space that holds it.
   That takes at most 11/9 of the fewest rows possible, plus 4 (Johnson, Demers, Ullman, Garey and Graham 1974, SIAM
   J. Comput. 3:4). It is a function of the tokens alone, so every process packs the same rows.
4. With weights, a piece without a weighted target is left out.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE_BYTES = 2**16  # bytes that the kernel maps around a page that is read (fault_around_bytes)
_MAPPED_BYTES = 2**25  # mapped bytes before all are released


class MappedTokens:
    """Tokens, or their weights, in a memory-mapped file. A slice is a copy, and pages are released now and then.

    They stay in the kernel's page cache, one copy for all processes of the host, so no process grows as it reads.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # samples are random: no read-ahead
        self._tokens = np.frombuffer(self._map, dtype)
        self._mapped = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, tokens: slice) -> NDArray[Any]:
        copy = self._tokens[tokens].copy()
        self._mapped += copy.nbytes + _PAGE_BYTES  # a count lost between threads keeps a few pages longer
        if self._mapped > _MAPPED_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # the page cache keeps them
            self._mapped = 0
        return copy

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes


@dataclass(frozen=True, eq=False)
class TokenArray:
    """Documents as tokens, end to end."""

    ids: Any  # integers [tokens]: a NumPy array, or `MappedTokens` of a file
    bounds: NDArray[np.int64]  # int64 [documents + 1], the start of each document, and the end of the last
    weights: Any = None  # float32 [tokens] from 0 to 1, stored like `ids`: weight of each as a target; None: all 1

    @property
    def documents(self) -> NDArray[np.int64]:
        """The start and end of each document: int64 [documents, 2]."""
        return np.stack([self.bounds[:-1], self.bounds[1:]], axis=1)

    def joined(self, spans: NDArray[np.int64], separator: int | None = None) -> "TokenArray":
        """Return spans of tokens (int64 [spans, 2]) as documents, end to end, each closed by the separator if given."""
        closing = [] if separator is None else [np.array([separator], self.ids.dtype)]
        ids = [piece for start, end in spans.tolist() for piece in (self.ids[start:end], *closing)]
        weights = self.weights
        if weights is not None:
            weights = np.concatenate([weights[:0], *(weights[start:end] for start, end in spans.tolist())])
        bounds = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0] + len(closing))]).astype(np.int64)
        return TokenArray(np.concatenate([self.ids[:0], *ids]), bounds, weights)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Tokens that are read, or made from text, on demand."""

    name: str  # for messages
    size: int | None  # bytes of the source; None: unknown before reading
    identity: str  # identifies the content and its tokenizer
    vocab_size: int | None  # every token is below it; None: unknown before reading
    separator: int | None  # the token that closes a document; None: no token
    # yields some documents at a time, without separators, with their `content_score`s: float64 [documents]
    parts: Callable[[], Iterator[tuple[TokenArray, NDArray[np.float64]]]]


def bounds_of(documents: Sequence[Any]) -> NDArray[np.int64]:
    """Return the bounds of documents with a length: int64 [documents + 1]."""
    return np.array(list(accumulate(map(len, documents), initial=0)), np.int64)


def smallest_uint(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below `vocab_size`, at least 1."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


# Packing.


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The pieces of documents in each row."""

    starts: NDArray[np.int64]  # int64 [pieces], first token of each piece, in order of rows
    sizes: NDArray[np.int64]  # int64 [pieces], pairs of each piece
    rows: NDArray[np.int64]  # int64 [rows + 1], first piece of each row, then the number of pieces


def packed_rows(tokens: TokenArray, length: int) -> PackedRows:
    """Pack documents into rows of `length` pairs; at least one document must have two tokens."""
    starts, sizes = _cut(tokens.bounds, length)
    if tokens.weights is not None:
        counts = [bool(tokens.weights[s + 1 : s + n + 1].any()) for s, n in zip(starts, sizes, strict=True)]
        starts, sizes = starts[counts], sizes[counts]
    full = int((sizes == length).sum())
    rows = np.concatenate([np.arange(full), np.array(best_fit(sizes[full:].tolist(), length), np.int64) + full])
    order = np.argsort(rows, kind="stable")
    firsts = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return PackedRows(starts[order], sizes[order], firsts)


def _cut(bounds: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces: full rows, then the last pieces of documents, longest first.

    Returns int64 [pieces] each: a piece's first token, and its number of pairs (1 to `length`).
    """
    starts, pairs = bounds[:-1], np.diff(bounds) - 1
    full, remainder = np.divmod(np.maximum(pairs, 0), length)
    before = np.repeat(np.cumsum(full) - full, full)  # full rows of the documents before
    full_starts = np.repeat(starts, full) + (np.arange(full.sum()) - before) * length
    order = np.argsort(-remainder, kind="stable")
    order = order[remainder[order] > 0]
    return (
        np.concatenate([full_starts, starts[order] + full[order] * length]),
        np.concatenate([np.full(len(full_starts), length), remainder[order]]),
    )


def best_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the row for each size: the row with the least remaining space that holds it, else a new row.

    The search takes constant time for capacities of a few thousand: bit r of an integer is set if a row has r left.
    """
    rows: list[int] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity)]
    spaces = opened = 0
    for size in sizes:
        if fitting := spaces >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[left].pop()
            spaces ^= (not rows_by_space[left]) << left
        else:
            row, left = opened, capacity
            opened += 1
        rows.append(row)
        if left > size:
            rows_by_space[left - size].append(row)
            spaces |= 1 << (left - size)
    return rows
