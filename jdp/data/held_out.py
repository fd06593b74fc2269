"""Training or held out: decided by a sample's content, so no rename, reordering or other machine can move it.

1. A sample's content is hashed to a number in [0, 1), its score, which is fixed for ever.
2. Samples whose score is below the held-out fraction are held out. So copies fall on one side together, and a larger
   fraction keeps all that a smaller one held out.
3. If a side would be empty, the sample nearest to it moves there, with its copies (`split_samples`). Of documents of
   text, the tail of each is held out (`split_documents`).
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice

_END = 2**15  # bytes


@dataclass(frozen=True, eq=False)
class Spans:
    """Both sides of a text whose documents stand end to end, as ranges of it."""

    train: NDArray[np.int64]  # int64 [ranges, 2], from and up to; none is empty
    heldout: NDArray[np.int64]  # likewise, of the held-out text
    whole: bool  # whether each document is on one side; else the tail of each is held out


def content_score(content: bytes) -> float:
    """Return a number in [0, 1), uniform and fixed for ever: the first 53 bits of the content's BLAKE2b hash."""
    return (int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 11) / 2**53


def ends_score(size: int, read: Callable[[int, int], bytes]) -> float:
    """Return the `content_score` of up to 64 KiB; of more, that of the size and the first and last 32 KiB.

    Pictures are compressed, so any two differ there, and a set larger than memory is split without reading all of it.
    """
    if size <= 2 * _END:
        return content_score(read(0, size))
    return content_score(size.to_bytes(8, "big") + read(0, _END) + read(size - _END, size))


def split_samples(
    scores: NDArray[np.float64], heldout_fraction: float, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the samples to train on and of those held out, each in their own order: int64 [n].

    A side that would be empty gets the sample nearest to it, with its copies, which is reported.
    """
    check_fraction(heldout_fraction)
    if len(np.unique(scores)) < 2:
        raise UserError(
            f"data must have two different samples, one to train on and one to hold out; given {len(scores)} alike in "
            f"{name}: give more data"
        )
    held = scores < heldout_fraction
    if not held.any() or held.all():
        held = scores <= scores.min() if not held.any() else scores < scores.max()
        notice(
            f"{name}: too few samples for heldout_fraction = {heldout_fraction}, so {int(held.sum())} of {len(scores)} "
            "held out"
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def split_documents(scores: NDArray[np.float64], bounds: NDArray[np.int64], heldout_fraction: float) -> Spans:
    """Split documents that stand end to end, by score: whole ones if both sides get some, else each at its tail.

    `bounds` int64 [documents + 1] has the start of each document, and the end of the last, in bytes or tokens.
    """
    spans = whole_documents(scores, bounds, heldout_fraction)
    if len(spans.train) and len(spans.heldout):
        return spans
    return document_tails(bounds[:-1], bounds[1:], heldout_fraction)


def whole_documents(scores: NDArray[np.float64], bounds: NDArray[np.int64], heldout_fraction: float) -> Spans:
    """Split documents that stand end to end, each whole: one side may get none."""
    check_fraction(heldout_fraction)
    documents, held = np.stack([bounds[:-1], bounds[1:]], axis=1), scores < heldout_fraction
    return Spans(_nonempty(documents[~held]), _nonempty(documents[held]), whole=True)


def document_tails(starts: NDArray[np.int64], ends: NDArray[np.int64], heldout_fraction: float) -> Spans:
    """Hold out the tail of each document, as many tokens as the fraction, rounded up."""
    cuts = ends - np.ceil((ends - starts) * heldout_fraction).astype(np.int64)
    heads, tails = np.stack([starts, cuts], axis=1), np.stack([cuts, ends], axis=1)
    return Spans(_nonempty(heads), _nonempty(tails), whole=False)


def fingerprint(description: str, arrays: Iterable[NDArray[np.generic]]) -> str:
    """Return 16 hex digits: a hash of a description, and of the dtype, shape and bytes of some arrays."""
    digest = hashlib.blake2b(description.encode(), digest_size=8)
    for array in arrays:
        digest.update(f" {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_fraction(heldout_fraction: float) -> None:
    """Check that a fraction is in (0, 1). Raises ValueError if it is not."""
    if not 0 < heldout_fraction < 1:
        raise UserError(f"heldout_fraction must be between 0 and 1; given {heldout_fraction}: give for example 0.05")


def _nonempty(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    return spans[spans[:, 1] > spans[:, 0]]
