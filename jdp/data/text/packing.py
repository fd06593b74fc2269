"""Whole documents side by side in rows of fixed length, so that attention and targets can stay inside of each.

1. A document of n tokens has n - 1 pairs of a token and its target. Its last token is only a target, so no position of
   a row has a token without a target.
2. A document of more pairs than a row holds is cut into pieces of a full row and a shorter last piece. The last target
   of a piece is the first token of the next, so every token of a document but its first is a target exactly once.
3. Last pieces are packed by best fit, longest first: each into the row with the least space left that still holds it.
   That takes at most 11/9 of the fewest rows possible, and 4 more (Johnson, Demers, Ullman, Garey and Graham 1974, SIAM
   J. Comput. 3:4). It is a function of the tokens alone, so every process packs alike.
4. Of rows with weights, a piece none of whose targets counts is left out.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.data.batches import NumpyBatch
from jdp.data.text.token_array import MappedTokens


@dataclass(frozen=True, eq=False)
class PackedSamples:
    """One side of the text, as a sequence of packed rows.

    Attributes:
        tokens: unsigned integers [tokens], the documents of this side end to end.
        bounds: int64 [documents + 1], the start of each document, and the end of the last.
        length: positions in a row.
        weights: float32 [tokens], from 0 to 1, of each token as a target; None: all are 1.

    Sample i is a dict of "tokens" and "targets" int32 [length], "segments" int32 [length], and "weights" float32
    [length]. The pieces in a row have segments 1, 2, … and their targets' weights; empty positions have
    segment 0 and weight 0.

    Raises:
        ValueError: a length below 1, or no document of two tokens.

    >>> import numpy as np
    >>> rows = PackedSamples(np.arange(9, dtype=np.uint8), bounds=np.array([0, 4, 6, 9]), length=6)
    >>> rows[0]["tokens"].tolist(), rows[0]["segments"].tolist()
    ([0, 1, 2, 6, 7, 4], [1, 1, 1, 2, 2, 3])
    """

    tokens: NDArray[Any] | MappedTokens
    bounds: NDArray[np.int64]
    length: int
    weights: NDArray[np.float32] | MappedTokens | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"length must be at least 1; given {self.length}: give the targets in a sample")
        if not len(self.bounds) or not (np.diff(self.bounds) > 1).any():
            raise UserError(
                f"text must hold at least one token and its target; given {len(self.tokens)} token(s) in "
                f"{len(self.bounds) - 1} document(s): give more text"
            )

    @functools.cached_property
    def _layout(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The start of each piece and its number of pairs, in order of rows, and the first piece of each row."""
        starts, sizes = cut(self.bounds, self.length)
        if self.weights is not None:
            counts = [bool(self.weights[s + 1 : s + n + 1].any()) for s, n in zip(starts, sizes, strict=True)]
            starts, sizes = starts[counts], sizes[counts]
        rows = place(sizes, self.length)
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        return starts[order], sizes[order], np.searchsorted(rows, np.arange(rows[-1] + 2))

    @property
    def waste(self) -> float:
        """The fraction of all positions that are empty."""
        return 1 - int(self._layout[1].sum()) / (len(self) * self.length)

    def __len__(self) -> int:
        return len(self._layout[2]) - 1

    def __getitem__(self, index: int, /) -> NumpyBatch:
        starts, sizes, firsts = self._layout
        row = range(len(self))[index]
        tokens, targets, segments = np.zeros((3, self.length), np.int32)
        weights = np.zeros(self.length, np.float32)
        at = 0
        for segment, piece in enumerate(range(firsts[row], firsts[row + 1]), 1):
            start, size = int(starts[piece]), int(sizes[piece])
            piece = self.tokens[start : start + size + 1]
            weights[at : at + size] = 1 if self.weights is None else self.weights[start + 1 : start + size + 1]
            tokens[at : at + size], targets[at : at + size] = piece[:-1], piece[1:]
            segments[at : at + size] = segment
            at += size
        return {"tokens": tokens, "targets": targets, "segments": segments, "weights": weights}


def cut(bounds: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces: those of a full row, then the last pieces of documents, longest first.

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


def place(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the row of each piece, those of a full row first. No row is empty: int64 [pieces]."""
    full = int((sizes == length).sum())
    return np.concatenate([np.arange(full), np.array(best_fit(sizes[full:].tolist(), length), np.int64) + full])


def best_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the row that each size goes into: the one with the least space left that holds it, else a new one.

    A row is found in constant time for capacities of a few thousand: bit r of one integer is set if a row has r left.
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
