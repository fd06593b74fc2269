"""Training or held out: a sample's content decides, independent of names, order and machine.

A sample's content is hashed to its score, a number in [0, 1) that never changes; below the held-out fraction it is held
out. So copies stay together, and a larger fraction includes all samples of a smaller one. If a side would be empty, the
nearest sample moves there, with its copies (`split_samples`); of text, the tail of each document (`document_tails`).
"""

import hashlib
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice

_END = 2**15  # bytes


def content_score(content: bytes) -> float:
    """Return a uniform number in [0, 1) that never changes: the first 53 bits of the content's BLAKE2b hash."""
    return (int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 11) / 2**53


def ends_score(file: BinaryIO) -> float:
    """Return the `content_score` of up to 64 KiB; of a larger file, that of its size and first and last 32 KiB.

    Compressed pictures differ there, so a set larger than memory is split without reading all of it.
    """
    size = file.seek(0, 2)
    file.seek(0)
    if size <= 2 * _END:
        return content_score(file.read())
    start = file.read(_END)
    file.seek(-_END, 2)
    return content_score(size.to_bytes(8, "big") + start + file.read())


def split_samples(
    scores: NDArray[np.float64], heldout_fraction: float, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training and the held-out samples, in order: int64 [n] each.

    An empty side gets the nearest sample, with its copies, and this is reported. A fraction of 0 holds nothing out.
    """
    if heldout_fraction == 0 and len(scores):
        return np.arange(len(scores)), np.arange(0)
    check_fraction(heldout_fraction)
    if len(np.unique(scores)) < 2:
        raise UserError(
            f"data must have two different samples, one to train on and one to hold out; given {len(scores)} equal in "
            f"{name}: add data"
        )
    held = scores < heldout_fraction
    if not held.any() or held.all():
        held = scores <= scores.min() if not held.any() else scores < scores.max()
        notice(
            f"{name}: too few samples for heldout_fraction = {heldout_fraction}, so {int(held.sum())} of {len(scores)} "
            "held out"
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def document_tails(documents: NDArray[np.int64], heldout_fraction: float) -> list[NDArray[np.int64]]:
    """Hold out the tail of each document: the fraction of its tokens, rounded up.

    `documents` and both results, the text to train on and the tails, are int64 [documents, 2]: start and end. Empty
    spans are left out.
    """
    starts, ends = documents.T
    cuts = ends - np.ceil((ends - starts) * heldout_fraction).astype(np.int64)
    sides = np.stack([starts, cuts], axis=1), np.stack([cuts, ends], axis=1)
    return [side[side[:, 1] > side[:, 0]] for side in sides]


def fingerprint(description: str, arrays: Iterable[NDArray[np.generic]] = ()) -> str:
    """Return 16 hex digits: a hash of a description and of arrays' dtypes, shapes and bytes."""
    digest = hashlib.blake2b(description.encode(), digest_size=8)
    for array in arrays:
        digest.update(f" {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_fraction(heldout_fraction: float) -> None:
    if not 0 < heldout_fraction < 1:
        raise UserError(f"heldout_fraction must be between 0 and 1; given {heldout_fraction}: use 0.05, for example")
