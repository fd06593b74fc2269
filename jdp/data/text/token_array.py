"""Documents as tokens, end to end in one array."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenArray:
    """Documents as tokens, end to end.

    Attributes:
        ids: integers [tokens]; once they are checked, the smallest unsigned ones that hold them.
        bounds: int64 [documents + 1], the start of each document, and the end of the last.
    """

    ids: NDArray[Any]
    bounds: NDArray[np.int64]


def bounds_of(documents: Sequence[Any]) -> NDArray[np.int64]:
    """Return the bounds of documents that have a length: int64 [documents + 1]."""
    return np.array(list(accumulate(map(len, documents), initial=0)), np.int64)


def smallest_uint(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below `vocab_size`, at least 1."""
    return np.min_scalar_type(max(vocab_size - 1, 0))
