"""Training or held out: decided by what a document says, so no rename, reordering or other machine can move it.

A document's content is hashed to a number in [0, 1); below the held-out fraction it is held out. Copies of one text
fall on one side together, and a larger fraction keeps all that a smaller one held out. A document is what its source
says: a file of text, or a row. Too few documents for both sides: the tail of each is held out instead.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """The two sides, documents in the order they were given.

    Attributes:
      train: what to train on.
      heldout: what to keep from training.
      whole: whether documents went whole to one side; else the tail of each is held out.
    """

    train: tuple[bytes, ...]
    heldout: tuple[bytes, ...]
    whole: bool


@dataclass(frozen=True, eq=False)
class Spans:
    """The two sides as places in the line of all documents: int64 [documents, 2], from and up to; none is empty."""

    train: NDArray[np.int64]
    heldout: NDArray[np.int64]
    whole: bool


def split_documents(documents: Sequence[bytes], heldout_fraction: float) -> Split:
    """Parts documents by content: whole ones where both sides get some, else each one's tail.

    Args:
      documents: none of them empty.
      heldout_fraction: in (0, 1); the expected share of the documents, or the share of each one's bytes, rounded up.

    Raises:
      ValueError: a fraction outside (0, 1).
    """
    ends = np.array(list(accumulate(map(len, documents), initial=0)), np.int64)
    spans = split_spans(np.array([content_score(document) for document in documents]), ends, heldout_fraction)
    line = b"".join(documents)

    def cut(side: NDArray[np.int64]) -> tuple[bytes, ...]:
        return tuple(line[start:end] for start, end in side.tolist())

    return Split(cut(spans.train), cut(spans.heldout), spans.whole)


def split_spans(scores: NDArray[np.float64], bounds: NDArray[np.int64], heldout_fraction: float) -> Spans:
    """The same for documents that lie end to end: what they are made of, bytes or tokens, is not looked at.

    Args:
      scores: float64 [documents], the `content_score` of each.
      bounds: int64 [documents + 1], where each begins, and the end of the last.
      heldout_fraction: in (0, 1).

    Raises:
      ValueError: a fraction outside (0, 1).
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction must lie between 0 and 1, got {heldout_fraction}: give for example 0.05")
    spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
    train, heldout = _filled(spans[scores >= heldout_fraction]), _filled(spans[scores < heldout_fraction])
    if len(train) and len(heldout):
        return Spans(train, heldout, whole=True)
    starts, ends = spans.T
    cuts = ends - np.ceil((ends - starts) * heldout_fraction).astype(np.int64)
    heads, tails = np.stack([starts, cuts], axis=1), np.stack([cuts, ends], axis=1)
    return Spans(_filled(heads), _filled(tails), whole=False)


def content_score(document: bytes) -> float:
    """A document's place in [0, 1), uniform and fixed for ever: the first 53 bits of its BLAKE2b hash."""
    return (int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") >> 11) / 2**53


def _filled(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    return spans[spans[:, 1] > spans[:, 0]]
