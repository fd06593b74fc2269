"""Training or held out: decided by what a document says, so no rename, reordering or other machine can move it.

A document's content is hashed to a number in [0, 1); below the held-out fraction it is held out. Copies of one text
fall on one side together, and a larger fraction keeps all that a smaller one held out. Too few documents for both
sides: the tail of each is held out instead.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def split_documents(documents: Sequence[bytes], heldout_fraction: float) -> Split:
    """Parts documents by content: whole ones where both sides get some, else each one's tail.

    Args:
      documents: none of them empty.
      heldout_fraction: in (0, 1); the expected share of the documents, or the share of each one's bytes, rounded up.

    Raises:
      ValueError: a fraction outside (0, 1).
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction must lie between 0 and 1, got {heldout_fraction}: give for example 0.05")
    scores = [content_score(document) for document in documents]
    train = tuple(document for document, score in zip(documents, scores, strict=True) if score >= heldout_fraction)
    heldout = tuple(document for document, score in zip(documents, scores, strict=True) if score < heldout_fraction)
    return Split(train, heldout, whole=True) if train and heldout else _tails(documents, heldout_fraction)


def _tails(documents: Sequence[bytes], heldout_fraction: float) -> Split:
    cuts = [len(document) - math.ceil(len(document) * heldout_fraction) for document in documents]
    heads = tuple(document[:cut] for document, cut in zip(documents, cuts, strict=True) if cut)
    return Split(heads, tuple(document[cut:] for document, cut in zip(documents, cuts, strict=True)), whole=False)


def content_score(document: bytes) -> float:
    """A document's place in [0, 1), uniform and fixed for ever: the first 53 bits of its BLAKE2b hash."""
    return (int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") >> 11) / 2**53
