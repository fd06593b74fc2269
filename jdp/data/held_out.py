"""Training or held out, for samples one by one: the rule of jdp.data.split, where a sample is a document of its own.

Each sample's content gives it a fixed place in [0, 1), its score; those below the held-out fraction are held out. So
copies fall on one side together, and no other order, file name or machine moves a sample from one side to the other.
"""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from jdp.core.notices import notice
from jdp.data.split import content_score

_END = 2**15  # bytes


def ends_score(size: int, read: Callable[[int, int], bytes]) -> float:
    """`content_score` of what may be large: beyond 64 KiB, of its size and its first and last 32 KiB.

    Pictures are compressed, so any two differ there, and a set larger than memory is parted without reading all of it.

    Args:
      size: in bytes.
      read: gives the bytes from one place up to another.
    """
    if size <= 2 * _END:
        return content_score(read(0, size))
    return content_score(size.to_bytes(8, "big") + read(0, _END) + read(size - _END, size))


def part(
    scores: NDArray[np.float64], heldout_fraction: float, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples to train on and those held out, each in their own order.

    Args:
      scores: float64 [samples], each sample's place in [0, 1).
      heldout_fraction: in (0, 1), the expected share of the samples that is held out. A side that would be empty gets
        the sample nearest to it, with its copies, and that is said.
      name: of the data, for messages.

    Raises:
      ValueError: a fraction outside (0, 1), or fewer than two different samples.
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction must lie between 0 and 1, got {heldout_fraction}: give for example 0.05")
    if len(np.unique(scores)) < 2:
        raise ValueError(
            f"data must have two different samples, one to train on and one to hold out, got {len(scores)} alike in "
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


def fingerprint(description: str, parts: Iterable[NDArray[np.generic]]) -> str:
    """16 hex digits of a description and the bytes of some arrays."""
    digest = hashlib.blake2b(description.encode(), digest_size=8)
    for array in parts:
        digest.update(f" {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
