"""Whole documents side by side in rows of fixed length, so that attention and targets can stay inside each document.

1. A document of n tokens has n - 1 pairs of a token and its target. Its last token is only a target, so every token in
   a row has a target.
2. A document with more pairs than a row is cut into pieces of a full row and a shorter last piece. The last target of a
   piece is the first token of the next, so every token of a document but its first is a target exactly once.
3. Last pieces are packed by best fit, longest first: each into the row with the least remaining space that holds it.
   That takes at most 11/9 of the fewest rows possible, plus 4 (Johnson, Demers, Ullman, Garey and Graham 1974, SIAM
   J. Comput. 3:4). It is a function of the tokens alone, so every process packs the same rows.
4. With weights, a piece without a weighted target is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jdp.data.text.token_array import TokenArray


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
