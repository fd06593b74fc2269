"""Several data sets mixed by weight: a pure function of (seed, position), without a table.

1. Positions 0, 1, 2, … of the run go around a circle of 2³² points in steps of the golden ratio. This spreads any
   stretch of positions evenly (Knuth, The Art of Computer Programming 3, 6.4: Fibonacci hashing). Each data set owns an
   arc as long as its weight. So any n consecutive positions, a global batch or an epoch, contain n times its weight of
   each data set, give or take a few.
2. The number of earlier samples of a data set is a count of lattice points below a line. Euclid's algorithm computes it
   in a few dozen steps (`_floor_sum`, 20 to 50 µs a sample), so a resume costs nothing.
3. The k-th sample of a data set is the k-th position of its own endless, reshuffled run (jdp.data.batches): no sample
   repeats before all of its samples were drawn.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError, public
from jdp.base.toml import described
from jdp.data.batches import Source, in_epoch, sample_at
from jdp.data.held_out import fingerprint

_CIRCLE = 2**32
_STEP = 2654435769  # the odd number nearest to 2³²/φ: all points are visited before any repeats


@dataclass(frozen=True, eq=False)
class MixedSamples:
    """Sources interleaved by weight. An epoch has as many samples as all sources together.

    A source repeats within an epoch if its weight exceeds its share of the samples; if its weight is less, some samples
    wait for the next epoch. Without a shuffle each source is read in its own order.
    """

    sources: tuple[Source, ...]  # the samples, of the same keys, shapes and dtypes
    weights: tuple[float, ...]  # not negative, relative to each other
    seed: int  # of the order, not negative

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]:
        return self.sample_in_epoch(range(len(self))[index], 0)

    def sample_in_epoch(self, index: int, epoch: int) -> Mapping[str, NDArray[Any]]:
        source, turn = self.turn(epoch * len(self) + index, 0)
        part = self.sources[source]
        return in_epoch(part, turn % len(part), turn)

    def sample_at(self, position: int, seed: int) -> Mapping[str, NDArray[Any]]:
        """Return the sample at a position >= 0 of an endless run, ordered by `seed` and `self.seed`."""
        source, turn = self.turn(position, seed)
        return sample_at(self.sources[source], turn, _seed(self.seed, seed, source + 1))

    def turn(self, position: int, seed: int) -> tuple[int, int]:
        """Return the index of a position's source, and the number of that source's earlier positions."""
        start = _seed(self.seed, seed, 0)
        source = bisect.bisect_right(self._arcs, (_STEP * position + start) % _CIRCLE) - 1

        def beyond(point: int) -> int:  # Σ ⌊(x - point) / circle⌋ over x: one less for each x before that point
            return _floor_sum(position, _CIRCLE, _STEP, start + _CIRCLE - point)

        return source, beyond(self._arcs[source]) - beyond(self._arcs[source + 1])

    @functools.cached_property
    def _arcs(self) -> list[int]:
        """The start of each source's arc, and the end of the circle."""
        sums = list(accumulate(self.weights, initial=0.0))
        return [round(_CIRCLE * start / sums[-1]) for start in sums]


@dataclass(frozen=True, eq=False)
class Concatenated:
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]:
        index = range(len(self))[index]
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which][index - (self._ends[which - 1] if which else 0)]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.sources)))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Data sets as one: `train` draws from them by weight, `heldout` concatenates their held-out samples.

    Attributes:
        parts: the data sets; each has its own `heldout`, to evaluate them one by one.
        weights: the given weights.
        seed: seed of the order.

    >>> import numpy as np
    >>> from jdp.data import array_data
    >>> few, many = (array_data({"x": np.arange(n)}, heldout_fraction=0.2) for n in (10, 90))
    >>> both = mixture([(few, 1), (many, 3)])
    >>> len(both.train) + len(both.heldout), both.weights
    (100, (1.0, 3.0))
    """

    parts: tuple[Any, ...]
    weights: tuple[float, ...]
    seed: int
    train: MixedSamples
    heldout: Concatenated

    @property
    def fingerprint(self) -> str:
        described = [(part.fingerprint, weight) for part, weight in zip(self.parts, self.weights, strict=True)]
        return fingerprint(f"{described} {self.seed}")

    def __str__(self) -> str:
        parts = zip(self.weights, self.parts, strict=True)
        shown = "; ".join(f"{weight / sum(self.weights):.3g} of {part}" for weight, part in parts)
        return f"mixture of {len(self.parts)}, an epoch is {len(self.train):,} samples: {shown}"

    @property
    def vocab_size(self) -> int:
        """For text: the largest of the parts; every token is below it."""
        return max(part.vocab_size for part in self.parts)

    @property
    def classes(self) -> tuple[str, ...]:
        """For images: the names of the first part's classes."""
        return getattr(self.parts[0], "classes", ())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the first part that has one, or None."""
        return next(filter(None, (getattr(part, "tokenizer", None) for part in self.parts)), None)


@public()
def mixture(parts: Sequence[tuple[Any, float]], *, seed: int = 0) -> Mixture:
    """Mix data sets by weight.

    Args:
        parts: data sets, with `train`, `heldout` and `fingerprint`, and their weights, positive and relative: 3 and 1
            are three samples in four.
        seed: seed of the order, in addition to the seed of `global_batches`; not negative.

    Returns:
        The mixture, with `train`, `heldout`, `parts`, `fingerprint`.

    Raises:
        ValueError: no parts; a negative seed; a weight that is not positive, or less than 2⁻³¹ of all. Samples that
            differ in keys, shapes or dtypes. Parts whose tokens come from different tokenizers.

    >>> from jdp.data import array_data
    >>> first, second = (array_data({"x": [k, k + 1]}) for k in (0, 10))
    >>> both = mixture([(first, 3), (second, 1)])
    >>> [int(both.train.sample_at(position, seed=0)["x"]) >= 10 for position in range(8)].count(True)
    2
    """
    data = tuple(part for part, _ in parts)
    weights: tuple[Any, ...] = tuple(weight for _, weight in parts)
    are_numbers = all(isinstance(weight, Real) and 0 < float(weight) < math.inf for weight in weights)
    if not parts or not are_numbers or min(weights) / sum(weights) < 2**-31:
        given = ", ".join(map(described, weights)) or "none"
        rule = "a mixture must have pairs (data set, weight), with positive weights of similar size"
        raise UserError(f"{rule}; given {given}: fix the weights")
    if seed < 0:
        raise UserError(f"seed must not be negative; given {seed}: give 0 or any larger integer")
    for other in data[1:]:
        _check_alike(data[0], other)
    weights = tuple(map(float, weights))
    train = MixedSamples(tuple(part.train for part in data), weights, seed)
    return Mixture(data, weights, seed, train, Concatenated(tuple(part.heldout for part in data)))


def _check_alike(first: Any, other: Any) -> None:
    ours, theirs = (
        {key: f"{value.dtype}{list(value.shape)}" for key, value in sorted(data.train[0].items())}
        for data in (first, other)
    )
    if ours != theirs:
        raise UserError(
            f"the data sets of a mixture must have the same kind of samples; given {ours} in {first} and {theirs} in "
            f"{other}: open them with the same length, size and packing"
        )
    tokenizers = [getattr(getattr(data, "tokenizer", None), "identity", None) for data in (first, other)]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        given = f"different ones for {first} and {other}"
        raise UserError(f"the data sets of a mixture must share a tokenizer; given {given}: open both with the same")


@functools.lru_cache(maxsize=256)
def _seed(own: int, given: int, use: int) -> int:
    return int(np.random.SeedSequence(own, spawn_key=(given, use)).generate_state(1)[0])


def _floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """Return Σ ⌊(step·i + start) / divisor⌋ over i from 0 to count - 1, by Euclid's algorithm; no argument negative."""
    total = 0
    while True:
        quotient, step = divmod(step, divisor)
        total += quotient * (count * (count - 1) // 2)
        quotient, start = divmod(start, divisor)
        total += quotient * count
        last = step * count + start
        if last < divisor:
            return total
        count, start = divmod(last, divisor)
        divisor, step = step, divisor
