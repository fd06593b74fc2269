"""Samples of tokens cut into shorter rows, whose length changes during a run: a pure function of the row's number.

1. A row of length L is a part of a sample of W tokens; L divides W, and the W / L parts of a sample follow one another.
2. Where the length changes the next row begins at the next multiple of its own length, so it does not cross samples.
   At most one row's tokens are passed over.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jdp.base.by_step import ByStep
from jdp.data.batches import Source, sample_at

_KEPT = 32  # samples, whose parts are rows in a row


@dataclass(frozen=True, eq=False)
class CutSamples:
    """Rows of changing length, in the order in which a run reads them; `global_batches` reads them by `sample_at`.

    >>> import numpy as np
    >>> samples = [{"tokens": np.arange(8) + 8 * i} for i in range(3)]
    >>> rows = CutSamples(samples, 8, ByStep.of([(0, 2), (3, 4), (4, 8)]), shuffle=False)
    >>> [rows.sample_at(row, 0)["tokens"].tolist() for row in range(4)]
    [[0, 1], [2, 3], [4, 5], [8, 9, 10, 11]]
    """

    source: Source  # samples of `whole` tokens
    whole: int
    lengths: ByStep[int]  # of a row by its number, each of which divides `whole`
    shuffle: bool

    def __len__(self) -> int:
        return len(self.source) * (self.whole // min(self.lengths.values))

    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]:
        return self.sample_at(index, 0)

    def sample_at(self, position: int, seed: int) -> Mapping[str, NDArray[Any]]:
        """Return the row of this number; `seed` is of the order of whole samples."""
        sample, first, length = self.place(position)
        return {name: array[first : first + length] for name, array in self._whole(sample, seed).items()}

    def place(self, row: int) -> tuple[int, int, int]:
        """Return the position of the sample that a row is cut from, the row's first token in it, and its length."""
        phase = self.lengths.phase(row)
        length = self.lengths.values[phase]
        sample, part = divmod(self._first[phase] + row - self.lengths.starts[phase], self.whole // length)
        return sample, part * length, length

    def begun(self, row: int) -> int:
        """Return the number of samples that rows before this one were cut from."""
        sample, first, _ = self.place(row)
        return sample + (first > 0)

    @functools.cached_property
    def _first(self) -> list[int]:
        """For each phase its first row, counted from the first sample on in rows of its own length."""
        counts, lengths, starts = [0], self.lengths.values, self.lengths.starts
        for phase in range(1, len(starts)):
            tokens = (counts[-1] + starts[phase] - starts[phase - 1]) * lengths[phase - 1]
            counts.append(-(-tokens // lengths[phase]))
        return counts

    @functools.cached_property
    def _whole(self) -> Any:
        def read(sample: int, seed: int) -> Mapping[str, NDArray[Any]]:
            return sample_at(self.source, sample, seed) if self.shuffle else self.source[sample % len(self.source)]

        return functools.lru_cache(maxsize=_KEPT)(read)
