"""The order of samples, a pure function of (seed, epoch, index), and global batches of the rows of this process.

A run is an endless sequence of positions 0, 1, 2, …; epoch e covers the positions [e·n, (e+1)·n) of n samples, and
every epoch is shuffled anew. Global batch b of B rows is the positions [b·B, (b+1)·B), which may straddle two epochs.
So no sample is dropped or repeated at an epoch's end, and one integer is the whole state of a run. The number of
batches follows from `len(source)` alone, so all processes stop together; rows of weight 0 fill the last batch.

There are two shuffles, because grain's is slow for few samples. It walks a cipher over blocks of at least 16 bits until
the result is in range: 4 µs a sample at 10⁶ samples, 1 ms at 64, 11 ms at 2.

1. below 2¹⁶ samples, a table for the epoch;
2. above, grain's `index_shuffle`: no table, constant time and memory.
"""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from grain.experimental import index_shuffle
from numpy.typing import NDArray

from jdp.base.errors import UserError, public
from jdp.base.notices import notice
from jdp.base.toml import described

NumpyBatch = dict[str, NDArray[Any]]

_TABLE_BELOW = 2**16  # samples; a table is then 512 KiB at most
_MOST_SAMPLES = 2**32  # index_shuffle permutes 32-bit integers
# Rounds of grain's cipher. With four, the minimum, neighbours are correlated (r = -0.03 over 70,000 samples, ten
# standard errors); with eight there is no measurable correlation, at the same cost.
_ROUNDS = 8
# Small on purpose (grain would read 500 ahead): a step waits for one batch only.
_AHEAD = 4  # batches


class Source(Protocol):
    """Random access to samples, safe in threads. Each is a dict of arrays with the same shapes and dtypes.

    >>> import numpy as np
    >>> class Squares:
    ...     def __len__(self):
    ...         return 10
    ...
    ...     def __getitem__(self, index):
    ...         return {"x": np.array(index), "y": np.array(index**2)}
    >>> next(iter(global_batches(Squares(), batch_size=3, seed=0, shuffle=False)))["y"]
    array([0, 1, 4])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]: ...


class OrderedSource(Source, Protocol):
    """Samples with their own shuffled order, such as a mixture.

    >>> import numpy as np
    >>> class Backwards(list):
    ...     def sample_at(self, position, seed):
    ...         return self[-1 - position % len(self)]
    >>> next(iter(global_batches(Backwards({"x": np.array(i)} for i in range(5)), batch_size=3, seed=0)))["x"]
    array([4, 3, 2])
    """

    def sample_at(self, position: int, seed: int) -> Mapping[str, NDArray[Any]]:
        """Return the sample at a position of an endless run: a pure function of position, seed and the samples.

        Args:
            position: not negative.
            seed: seed of the order.
        """
        ...


class EpochSource(Source, Protocol):
    """Samples that differ in every epoch, such as augmented images.

    >>> import numpy as np
    >>> class Noisy(list):
    ...     def sample_in_epoch(self, index, epoch):
    ...         return {"x": self[index] + np.random.default_rng([index, epoch]).normal()}
    >>> len(next(iter(global_batches(Noisy([1.0, 2.0]), batch_size=4, seed=0)))["x"])
    4
    """

    def sample_in_epoch(self, index: int, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Return a sample in an epoch: a pure function of index and epoch.

        Args:
            index: index of the sample, 0 to len - 1.
            epoch: not negative.
        """
        ...


@public()
def sample_index(seed: int, epoch_length: int, position: int) -> int:
    """Return the sample at a position of an endless run, in which each epoch is a permutation of the samples.

    Args:
        seed: not negative; the same seed gives the same order, on any machine and any version of NumPy.
        epoch_length: samples in an epoch, 1 to 2³².
        position: not negative, over all epochs: epoch `position // epoch_length`.

    Returns:
        The sample's index, in [0, epoch_length).

    Raises:
        ValueError: an argument outside the ranges above.

    >>> sorted(sample_index(seed=7, epoch_length=5, position=position) for position in range(5, 10))
    [0, 1, 2, 3, 4]
    """
    if seed < 0 or position < 0:
        raise UserError(f"seed and position must not be negative; given {seed} and {position}: count from 0")
    if not 1 <= epoch_length <= _MOST_SAMPLES:
        raise UserError(f"an epoch must have 1 to 2**32 samples; given {epoch_length}: add data, or use longer samples")
    epoch, index = divmod(position, epoch_length)
    return _permutation(seed, epoch, epoch_length)(index)


@functools.lru_cache(maxsize=64)  # a batch may straddle several epochs, and a mixture draws from several data sets
def _permutation(seed: int, epoch: int, epoch_length: int) -> Callable[[int], int]:
    # Mixed, not added: with seed + epoch, as in grain's own shuffle, the second epoch of seed 0 is the first of seed 1.
    entropy = np.random.SeedSequence(seed, spawn_key=(epoch,))
    if epoch_length < _TABLE_BELOW:
        # Sorted raw bits, not `Generator.permutation`: NumPy keeps a bit generator's stream for ever, but may change a
        # Generator's methods (NEP 19), and with them the order of a resumed run.
        return np.argsort(np.random.Philox(entropy).random_raw(epoch_length), kind="stable").item
    epoch_seed = int(entropy.generate_state(1)[0])
    return functools.partial(index_shuffle, max_index=epoch_length - 1, seed=epoch_seed, rounds=_ROUNDS)


@public()
def sample_at(source: Source, position: int, seed: int) -> Mapping[str, NDArray[Any]]:
    """Return the sample at a position of an endless, reshuffled run: dict of arrays.

    Args:
        source: an `OrderedSource` has its own order, any other is shuffled by `sample_index`; an `EpochSource` draws
            the sample for the position's epoch.
        position: not negative, over all epochs.
        seed: seed of the order, not negative.

    >>> sorted(sample_at([{"x": i} for i in range(4)], position, seed=0)["x"] for position in range(4))
    [0, 1, 2, 3]
    """
    if own := getattr(source, "sample_at", None):  # `isinstance` of a protocol takes longer than reading a sample
        return own(position, seed)
    return in_epoch(source, sample_index(seed, len(source), position), position)


def in_epoch(source: Source, index: int, position: int) -> Mapping[str, NDArray[Any]]:
    """Return a sample in the epoch of a position."""
    own = getattr(source, "sample_in_epoch", None)
    return own(index, position // len(source)) if own else source[index]


@public()
def batch_count(source: Source, *, batch_size: int, epochs: int = 1) -> int:
    """Return the number of global batches in a run, with the padded last batch: ⌈epochs · samples / batch_size⌉.

    Args:
        source: the samples.
        batch_size: rows of a global batch, as for `global_batches`.
        epochs: epochs of the run.

    >>> batch_count(range(10), batch_size=4, epochs=2)
    5
    """
    return -(-epochs * len(source) // batch_size)


@public()
def global_batches(
    source: Source,
    *,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | slice | None = None,
    start: int = 0,
    samples: int | None = None,
    shuffle: bool = True,
    epochs: int | None = None,
    threads: int = 2,
) -> grain.IterDataset[NumpyBatch]:
    """Return this process' rows of every global batch, in an order that does not depend on processes.

    Row r of global batch b is the sample at position b · batch_size + r of a sequence of epochs, each shuffled anew by
    (seed, epoch). Epochs follow one another without a break, and each sample occurs once in each. A batch larger than
    the data set repeats samples, and this is reported. `sample_at` defines how sources are read.

    Args:
        source: the samples; read at the indices of this process' rows only.
        batch_size: rows of a global batch, over all processes.
        seed: seed of the order, not negative; unused without `shuffle`.
        rows: rows of each global batch to read, such as `jdp.process_rows(plan, batch_size)`; None: all.
        start: the first global batch: to resume, the number of batches consumed so far.
        samples: samples in the batches before `start`, if batch sizes varied; None: `start` · batch_size.
        shuffle: False reads samples in their own order, every epoch.
        epochs: number of epochs; None: endless. A finite run ends with a batch padded to `batch_size` rows: with the
            samples that would follow, their "weights" set to 0.
        threads: threads that read a batch each. The default is enough for samples that take microseconds; for images,
            about a millisecond each, use all spare cores. As many batches, at least four, are in memory.

    Returns:
        An iterable of dicts of the samples' arrays, with a leading dimension of len(rows). Each iterator begins at
        `start` and reads ahead in threads, which end with it (`close()`, or when it is collected).

    Raises:
        ValueError: a number out of its range; on reading, a batch to pad whose samples have no "weights".

    >>> import numpy as np
    >>> samples = [{"x": np.array(i), "weights": np.ones(())} for i in range(5)]
    >>> [batch["weights"].tolist() for batch in global_batches(samples, batch_size=4, seed=0, epochs=1)]
    [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
    """
    if not hasattr(source, "__len__"):
        fix = "Give data.train or data.heldout; jdp.shard_batches takes any other loader"
        raise UserError(f"A source of samples has len and [index]; given {described(source)}. {fix}.")
    _check_run(source, batch_size, epochs, threads)
    start = operator.index(start)  # an int32 of NumPy or JAX would overflow
    if shuffle:
        sample_index(seed, len(source), 0)  # reports a wrong seed now, not in a reading thread
    before = start * batch_size if samples is None else samples
    end = sys.maxsize if epochs is None else start - (before - epochs * len(source)) // batch_size
    if not 0 <= start <= end or before < 0:
        rule = f"start must be a batch of the run, 0 to {end}, and samples not negative"
        raise UserError(f"{rule}; given {start} and {samples}: pass the batches and samples consumed")
    own = _own_rows(rows, batch_size)
    padding = sys.maxsize if epochs is None else epochs * len(source)  # from this position on

    def read(batch: int) -> NumpyBatch:
        positions = (before + (batch - start) * batch_size + row for row in own)
        taken = [_sample(source, position, seed if shuffle else None, padding) for position in positions]
        return {key: np.stack([sample[key] for sample in taken]) for key in taken[0]}

    ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(_AHEAD, threads))
    return grain.MapDataset.range(start, end).map(read).to_iter_dataset(ahead)


def _check_run(source: Source, batch_size: int, epochs: int | None, threads: int) -> None:
    counts = {"batch_size": batch_size, "epochs": epochs, "threads": threads, "the number of samples": len(source)}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"{name} must be at least 1; given {count}: use 1 or more")
    if batch_size > len(source) and epochs != 1:
        size = f"the data set ({len(source)} samples)"
        notice(f"batch_size {batch_size} is larger than {size}: a batch repeats some of them")


def _sample(source: Source, position: int, seed: int | None, padding: int) -> Mapping[str, NDArray[Any]]:
    """Return the sample at a position, in the source's own order if seed is None; from `padding` on with weight 0."""
    sample = in_epoch(source, position % len(source), position) if seed is None else sample_at(source, position, seed)
    if position < padding:
        return sample
    if "weights" not in sample:
        rule = 'samples must have "weights", because rows of weight 0 fill the last batch of a finite run'
        raise UserError(f"{rule}; given {sorted(sample)}: add them")
    return {**sample, "weights": np.zeros_like(sample["weights"])}


def _own_rows(rows: Sequence[int] | slice | None, batch_size: int) -> Sequence[int]:
    every_row = range(batch_size)
    own = every_row[rows or slice(None)] if rows is None or isinstance(rows, slice) else [int(row) for row in rows]
    if len(own) == 0 or not all(row in every_row for row in own):
        raise UserError(
            f"rows must name at least one row of a global batch of {batch_size}, each from 0 to {batch_size - 1}; "
            f"given {rows}: pass this process' rows"
        )
    return own
