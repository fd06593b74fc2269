"""The data set of a user's function: samples of at most 32 bits, a training and a held-out side, a fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.toml import cut
from jdp.data import EpochSource, NumpyBatch, OrderedSource
from jdp.data.arrays import NOT_CONTENT
from jdp.data.held_out import content_score, fingerprint, split_samples
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.data import Data

_LOOKED_AT = 64
"""Samples of each side in the fingerprint of two sides."""


@dataclass(frozen=True, eq=False)
class MadeSamples:
    """One side of a data set: the user's samples, with floats and integers in 32 bits, and "weights"."""

    name: str  # of the function that made it
    source: Any
    rows: NDArray[np.int64] | None = None  # [len], the samples on this side; None: all

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        return self._sample(self.source[self._row(index)])

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    def _sample(self, raw: Any) -> NumpyBatch:
        """Return a sample's arrays, and "weights" 1 if it has none. Raises ExperimentError for an invalid sample."""
        if not isinstance(raw, Mapping) or not raw:
            raise ExperimentError(
                f"a sample of {self.name} is a dict of arrays; given {cut(repr(raw))}: return, for example, "
                '{"features": array, "labels": array}'
            )
        arrays = {str(key): np.asarray(value) for key, value in raw.items()}
        if wrong := next((key for key, array in arrays.items() if array.dtype.kind not in "biuf"), None):
            raise ExperimentError(
                f"a sample of {self.name} holds numbers; given {wrong}: {arrays[wrong].dtype}: leave it out, or encode "
                "it"
            )
        sample = dict[str, np.ndarray]()
        for key, array in arrays.items():
            dtype = array.dtype.newbyteorder("=")
            if dtype.itemsize > 4:
                dtype = np.float32 if dtype.kind == "f" else np.int32
            sample[key] = array.astype(dtype, copy=False)
        return sample if "weights" in sample else {**sample, "weights": np.ones((), np.float32)}


class _Ordered(MadeSamples):
    source: OrderedSource

    def sample_at(self, position: int, seed: int) -> NumpyBatch:
        return self._sample(self.source.sample_at(position, seed))


class _InEpochs(MadeSamples):
    source: EpochSource

    def sample_in_epoch(self, index: int, epoch: int) -> NumpyBatch:
        return self._sample(self.source.sample_in_epoch(self._row(index), epoch))


@dataclass(frozen=True, eq=False)
class MadeData:
    """A data set, split at first use; `str()` is one line of text."""

    name: str  # of the function that made it
    given: Any  # its result: one object, or two sides
    heldout_fraction: float  # of one object
    described: str  # the function and its keywords, for the fingerprint

    @cached_property
    def first(self) -> NumpyBatch:
        """The first sample; no other sample is read."""
        return _samples(self.name, self.given[0] if isinstance(self.given, tuple) else self.given)[0]

    @cached_property
    def _split(self) -> tuple[MadeSamples, MadeSamples, str]:
        if isinstance(self.given, tuple):
            train, heldout = (_samples(self.name, side) for side in self.given)
            scores = [*_scores(train, _LOOKED_AT), *_scores(heldout, _LOOKED_AT)]
            return train, heldout, fingerprint(f"{self.described} {len(train)} {len(heldout)}", [np.asarray(scores)])
        samples = _samples(self.name, self.given)
        scores = np.asarray(_scores(samples, len(samples)))
        rows = split_samples(scores, self.heldout_fraction, self.name)
        train, heldout = (_samples(self.name, self.given, side) for side in rows)
        return train, heldout, fingerprint(f"{self.described} {self.heldout_fraction}", [scores])

    @property
    def train(self) -> MadeSamples:
        return self._split[0]

    @property
    def heldout(self) -> MadeSamples:
        return self._split[1]

    @property
    def fingerprint(self) -> str:
        """16 hex digits: for one object a hash of all samples without labels and weights; for two sides a hash of
        their lengths and of up to 64 samples each."""
        return self._split[2]

    def __str__(self) -> str:
        arrays = (f"{key} {array.dtype}{list(array.shape) if array.ndim else ''}" for key, array in self.first.items())
        split = "as given" if isinstance(self.given, tuple) else "by a hash of their content"
        return (
            f"{self.name}: {len(self.train) + len(self.heldout):,} samples of {', '.join(arrays)}; train "
            f"{len(self.train):,}, held out {len(self.heldout):,} ({split})"
        )


def made_data(table: Data) -> MadeData:
    """Make the data set of [data] with `make`."""
    given, name = table.call(), f"data.make = {table.make!r}"
    sides: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
    is_data = all(hasattr(side, "__len__") and hasattr(side, "__getitem__") for side in sides)
    if not is_data or len(sides) not in (1, 2) or isinstance(given, str | Mapping):
        raise ExperimentError(
            f"{name} returns an object with len and [index], or two of them, to train on and held out; given "
            f"{cut(repr(given))}: return, for example, a list of dicts of arrays"
        )
    if not all(len(side) for side in sides):
        raise ExperimentError(f"{name} returns samples; given a side without any: add some")
    if len(sides) == 1 and hasattr(given, "sample_at"):
        raise ExperimentError(
            f"{name} has its own order (sample_at), so jdp cannot hold out a part; given one object: return two, to "
            "train on and held out"
        )
    return MadeData(str(table.make), given, table.heldout_fraction, f"{table.make} {sorted(table.keywords.items())}")


def _samples(name: str, source: Any, rows: NDArray[np.int64] | None = None) -> MadeSamples:
    ordered, in_epochs = hasattr(source, "sample_at"), hasattr(source, "sample_in_epoch")
    return (_Ordered if ordered else _InEpochs if in_epochs else MadeSamples)(name, source, rows)


def _scores(samples: MadeSamples, most: int) -> list[float]:
    """Return the `content_score` of samples without labels, targets and weights: of `most` of them, spread evenly."""
    scores, count = list[float](), len(samples)
    for index in np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(np.int64)):
        sample = samples[int(index)]
        seen = [key for key in sorted(sample) if key not in NOT_CONTENT] or sorted(sample)
        scores.append(content_score(b"".join(np.ascontiguousarray(sample[key]).tobytes() for key in seen)))
    return scores
