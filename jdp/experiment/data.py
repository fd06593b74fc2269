"""From [data] and [eval.NAME] to data sets that fit the model.

Data are opened by kind, and compared with the model's configuration: vocabulary, image size, channels, classes. The
error for a mismatch has the value to set. An evaluation set is evaluated in full, so its two sides are joined; the
held-out side of each part of a mixture is an evaluation set too. Only the training side of [data] is augmented.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.data import EpochSource, NumpyBatch, OrderedSource, Source, mixture, text_data
from jdp.data.arrays import NOT_CONTENT, ArrayData, array_data
from jdp.data.held_out import content_score, fingerprint, split_samples
from jdp.data.images import ImageData, augmented, image_data
from jdp.data.mixtures import Concatenated
from jdp.experiment.file import ExperimentError, check_paths
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.fields import words_of
from jdp.experiment.schema.make import SampleError, users_traceback
from jdp.experiment.schema.tables import ARRAYS, BITS_PER_BYTE, Data

LEAST_AREA = 0.08
"""Smallest share of an image's area in a resized crop (arXiv:1409.4842)."""


@dataclass(frozen=True)
class Flat:
    """Samples of images as vectors of features: float32 [height · width · channels]."""

    images: Source

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        sample = dict(self.images[index])
        return {"features": np.ravel(sample.pop("images")), **sample}


@dataclass(frozen=True)
class Sides:
    """A data set made from images, as vectors or augmented."""

    images: ImageData
    train: Source
    heldout: Source
    words: str  # the augmentation, for people
    drawn: str = ""  # the augmentation, for the fingerprint

    @property
    def classes(self) -> tuple[str, ...]:
        return self.images.classes

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits for the images and their augmentation."""
        return fingerprint(f"{self.images.fingerprint} {self.drawn}") if self.drawn else self.images.fingerprint

    def __str__(self) -> str:
        return f"{self.images}; {self.words}"


def _augmented(images: Any, experiment: Experiment) -> Any:
    """Crop and flip the training side of a data set of images differently in every epoch, if [data] sets augment."""
    chosen, seed = experiment.data.augment, experiment.seed
    if chosen is None:
        return images
    padding = max(experiment.model.config.image_size // 8, 1)  # 4 of 32 pixels, as arXiv:1512.03385
    crop: dict[str, Any] = {"crop_padding": padding} if chosen == "crop" else {"resized_crop": LEAST_AREA}
    words = f"cropped after padding by {padding}" if chosen == "crop" else f"crops of {LEAST_AREA} of the area or more"
    train = augmented(images.train, flip=True, seed=seed, **crop)
    return Sides(images, train, images.heldout, f"to train on, {words}, flipped half the time", f"{crop} {seed}")


def open_data(experiment: Experiment) -> Any:
    given = experiment.data
    check_paths(experiment.model_dump(include={"data", "eval"}))
    if experiment.kind == "own":
        return made_data(given)
    if not given.mixture:
        return _augmented(_fitting(experiment, "data", _opened(experiment, given.source)), experiment)
    parts: list[tuple[Any, float]] = []
    for name, part in given.mixture.items():  # each opened alone, then mixed by weight
        fitting = _fitting(experiment, f"data.mixture.{name}", _opened(experiment, part.source, part.field))
        if parts:
            _check_same_classes(f"data.mixture.{name}", _classes(parts[0][0]), _classes(fitting))
        parts.append((_augmented(fitting, experiment), part.weight))
    return mixture(parts, seed=experiment.seed)


def open_eval_sets(experiment: Experiment, data: Any) -> dict[str, Source]:
    if BITS_PER_BYTE in experiment.train.eval_metrics:
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is None or tokenizer.byte_counts() is None:
            given = "token ids" if tokenizer is None else f"{tokenizer.name}, which adds or drops text"
            raise ExperimentError(
                f'train.eval_metrics has "{BITS_PER_BYTE}", for which tokens must be pieces of the text (byte-level or '
                f"SentencePiece); given {given}: remove the metric"
            )
    sets: dict[str, Source] = {"eval": data.heldout}
    if experiment.data.mixture:
        sets |= {f"eval_{name}": text.heldout for name, text in zip(experiment.data.mixture, data.parts, strict=True)}
    for name, table in experiment.eval.items():
        opened = _fitting(experiment, f"eval.{name}", _opened(experiment, table.source, table.field, alone=True))
        _check_same_classes(f"eval.{name}", _classes(data), _classes(opened))
        sets[f"eval_{name}"] = Concatenated((opened.train, opened.heldout))
    return sets


def _opened(experiment: Experiment, source: Any, field: str | None = None, *, alone: bool = False) -> Any:
    """Open a data set of the model's kind. `alone`: an evaluation set, without a held-out set."""
    given, kind = experiment.data, experiment.kind
    field = given.field if field is None else field
    words = words_of(source)
    is_arrays = all(word.endswith(ARRAYS) for word in words)
    if kind == "text" and (given.ids or not is_arrays):
        shared = {"length", "heldout_fraction", "packing", "ids", "weights", "labels", "attention_mask"}
        return text_data(
            source,
            **given.model_dump(include=shared),
            field=field or "text",
            tokenizer=given.tokenizer if given.knows_text else None,
            vocab_size=experiment.model.config.vocab_size,
        )
    if len(words) != 1:
        raise ExperimentError(
            f"images and arrays come from one source; given {len(words)}: {', '.join(words)}: name one, such as a "
            "folder that holds them all"
        )
    path, sides = words[0], dict[str, Any](heldout_fraction=given.heldout_fraction)
    if kind == "text":
        return array_data(path, length=given.length, vocab_size=experiment.model.config.vocab_size, **sides)
    sides["heldout"] = None if alone else given.heldout
    has_images = False  # to normalise and flatten, rather than features; a damaged file's reader reports its problem
    if kind == "features" and is_arrays and field is None:
        with contextlib.suppress(Exception), np.load(path) as arrays:
            has_images = "images" in arrays.files and "features" not in arrays.files
    if kind == "features" and is_arrays and not has_images:
        return array_data(path, features=field or "features", labels=given.label or "labels", **sides)
    config: Any = experiment.model.config
    size, channels = getattr(config, "image_size", None), getattr(config, "channels", None)
    images = image_data(path, size=size, channels=channels, image=field, label=given.label, **sides)
    if kind == "images":
        return images
    return Sides(images, Flat(images.train), Flat(images.heldout), "each as a vector")


def _fitting(experiment: Experiment, key: str, data: Any) -> Any:
    """Return `data` if the model can learn it. Raises ExperimentError with the value to set."""
    config: Any = experiment.model.config
    if experiment.kind == "text":
        if isinstance(data, ArrayData):  # tokens were checked against the vocabulary during reading
            ((tokens,), length) = data.shape, experiment.data.length
            if tokens != length:
                raise ExperimentError(
                    f"data.length must be the tokens of a sample, {tokens} in {key} ({data}); given {length}: set "
                    f"data.length = {tokens}, and model.context to as much at least"
                )
    elif experiment.kind == "features":
        features = data.train[0]["features"].shape
        if features != (config.features_in,):
            size = int(np.prod(features))
            raise ExperimentError(
                f"model.features_in must be the features of a sample, {size} in {key} ({data}); given "
                f"{config.features_in}: set model.features_in = {size}"
            )
        _check_classes(key, data, "features_out", config.features_out)
    else:  # opening fitted the images to model.image_size and model.channels
        _check_classes(key, data, "classes", config.classes)
    return data


def _classes(data: Any) -> tuple[str, ...]:
    return getattr(data, "classes", ())


def _check_classes(key: str, data: Any, field: str, outputs: int) -> None:
    classes = _classes(data)
    if not classes:
        raise ExperimentError(
            f"{key} must have labels, a class for each sample; given {data}, which has none: name them (label)"
        )
    if len(classes) > outputs:
        raise ExperimentError(
            f"model.{field} must be at least the number of classes, {len(classes)} in {key} ({data}); given {outputs}: "
            f"set model.{field} = {len(classes)}"
        )


def _check_same_classes(key: str, learnt: tuple[str, ...], evaluated: tuple[str, ...]) -> None:
    """Raise ExperimentError unless the evaluated classes are the first of the learnt classes, sorted by name."""
    if learnt[: len(evaluated)] != evaluated:
        pairs = zip(learnt, evaluated, strict=False)
        odd = next((f"{b!r} instead of {a!r}" for a, b in pairs if a != b), "more classes")
        raise ExperimentError(
            f"{key} must have the {len(learnt)} classes of training ({', '.join(learnt[:5])}…); it has {odd}: "
            "give every class a folder, or the same numbers"
        )


# The data set of a user's function: samples of at most 32 bits, a training and a held-out side, a fingerprint.

_LOOKED_AT = 64
"""Samples of each side in the fingerprint of two sides."""


@dataclass(frozen=True, eq=False)
class MadeSamples:
    """One side of a data set: the user's samples, with floats and integers in 32 bits, and "weights"."""

    name: str  # of the function that made it
    source: Any
    rows: NDArray[np.int64] | range  # [len], the samples on this side

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        return self._sample(self.source.__getitem__, int(self.rows[index]))

    def _sample(self, read: Callable[..., Any], *place: int) -> NumpyBatch:
        """Return a sample's arrays, and "weights" 1 if it has none. Raises ExperimentError for an invalid sample."""
        try:
            raw = read(*place)
        except Exception as error:
            said = f"{self.name} raised an exception in {getattr(read, '__name__', read)}({', '.join(map(str, place))})"
            raise SampleError(f"{said}:\n{users_traceback(error)}") from None
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
        return self._sample(self.source.sample_at, position, seed)


class _InEpochs(MadeSamples):
    source: EpochSource

    def sample_in_epoch(self, index: int, epoch: int) -> NumpyBatch:
        return self._sample(self.source.sample_in_epoch, int(self.rows[index]), epoch)


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
        if len(samples) > 10_000:
            text = f"{self.name}: all {len(samples):,} samples are read at each start, to hold out a part by content"
            notice(f"{text}; of two sides, one to train on and one held out, {2 * _LOOKED_AT} are read")
        scores = np.asarray([*_scores(samples, len(samples))])
        rows = split_samples(scores[:, 0], self.heldout_fraction, self.name)
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
        """16 hex digits: a hash of one object's samples; of two sides' lengths and up to 64 samples of each."""
        return self._split[2]

    def __str__(self) -> str:
        arrays = (f"{key} {array.dtype}{list(array.shape) if array.ndim else ''}" for key, array in self.first.items())
        split = "as given" if isinstance(self.given, tuple) else "by a hash of their content"
        return (
            f"{self.name}: {len(self.train) + len(self.heldout):,} samples of {', '.join(arrays)}; train "
            f"{len(self.train):,}, held out {len(self.heldout):,} ({split})"
        )


def made_data(table: Data) -> MadeData:
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
    made = _Ordered if ordered else _InEpochs if in_epochs else MadeSamples
    return made(name, source, range(len(source)) if rows is None else rows)


def _scores(samples: MadeSamples, most: int) -> Iterator[tuple[float, float]]:
    """Yield the scores of `most` samples, spread evenly: without labels, targets and weights, and of all arrays."""
    count = len(samples)
    for index in np.unique(np.rint(np.linspace(0, count - 1, min(count, most))).astype(np.int64)):
        sample = samples[int(index)]
        contents = {key: np.ascontiguousarray(sample[key]).tobytes() for key in sorted(sample)}
        seen = b"".join(content for key, content in contents.items() if key not in NOT_CONTENT)
        every = b"".join(contents.values())
        yield content_score(seen or every), content_score(every)
