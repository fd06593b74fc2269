"""From [data] and [eval.NAME] to data sets that fit the model; nothing below sees the file.

1. Open the data in the way of its kind: text or tokens for a GPT, images, or vectors of features.
2. Hold it against the model's configuration: vocabulary, image size, channels, classes. What does not fit is one error
   with the value to set.
3. Open the evaluation sets likewise; all of a set is evaluated, so the two sides it is parted in are joined again. Of a
   mixture, the held-out side of each text is an evaluation set too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdp.data import NumpyBatch, Source, mixture, text_data
from jdp.data.arrays import ArrayData, array_data, check_tokens
from jdp.data.images.samples import image_data
from jdp.data.mixtures import Concatenated
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import ARRAYS, Data, Experiment
from jdp.models import GPTConfig, MLPConfig


@dataclass(frozen=True)
class Flat:
    """Images as vectors of features."""

    images: Source

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        sample = dict(self.images[index])
        return {"features": np.ravel(sample.pop("images")), **sample}


@dataclass(frozen=True)
class FlatData:
    """A data set of images, each laid flat."""

    images: Any

    @property
    def train(self) -> Source:
        return Flat(self.images.train)

    @property
    def heldout(self) -> Source:
        return Flat(self.images.heldout)

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    def __str__(self) -> str:
        return f"{self.images}; each laid flat"


def open_data(experiment: Experiment) -> Any:
    """The data set of [data]: `train`, `heldout` and `fingerprint`, and `str()` is one line; text can `encode` too.

    Raises:
        ValueError: what its reader refuses; an ExperimentError where it does not fit the model.
    """
    if experiment.data.mixture:
        return _mixed(experiment)
    return _fitting(experiment, "data", _opened(experiment, experiment.data.source, experiment.data.field))


def open_eval_sets(experiment: Experiment, data: Any) -> dict[str, Source]:
    """The evaluation sets by the beginning of their metrics: "eval" is the held-out side of `data`, "eval_NAME" that of
    [data.mixture.NAME], or all of [eval.NAME].

    Raises:
        ValueError: as `open_data` does; and for images or features of other classes than those that are learnt.
    """
    sets: dict[str, Source] = {"eval": data.heldout}
    if experiment.data.mixture:
        sets |= {f"eval_{name}": part.heldout for name, part in zip(experiment.data.mixture, data.parts, strict=True)}
    for name, one in experiment.eval.items():
        field = experiment.data.field if one.field is None else one.field
        found = _fitting(experiment, f"eval.{name}", _opened(experiment, one.source, field, alone=True))
        _same_classes(f"eval.{name}", _classes(data), _classes(found))
        sets[f"eval_{name}"] = Concatenated((found.train, found.heldout))
    return sets


def _opened(experiment: Experiment, source: Any, field: str | None, *, alone: bool = False) -> Any:
    """A data set of the model's kind. `alone`: an evaluation set, which has no held-out set of its own."""
    given, kind = experiment.data, experiment.kind
    if kind == "text":
        return _tokens(given, source) if _is_arrays(source) else _text(experiment, source, field)
    path = _one(source)
    heldout = None if alone else given.heldout
    if kind == "features" and _is_arrays(path) and not _holds_images(path, field):
        return array_data(
            path,
            heldout_fraction=given.heldout_fraction,
            heldout=heldout,
            features=field or "features",
            labels=given.label or "labels",
        )
    config: Any = experiment.model.config
    images = image_data(
        path,
        size=getattr(config, "image_size", given.size) or None,
        channels=getattr(config, "channels", None),
        heldout_fraction=given.heldout_fraction,
        heldout=heldout,
        image=field,
        label=given.label,
    )
    return FlatData(images) if kind == "features" else images


def _text(experiment: Experiment, source: Any, field: str | None) -> Any:
    given, config = experiment.data, experiment.model.config
    assert isinstance(config, GPTConfig)
    return text_data(
        source if isinstance(source, str) else list(source),
        length=given.length,
        heldout_fraction=given.heldout_fraction,
        field=field,
        tokenizer=given.tokenizer,
        packing=given.packing,
        vocab_size=config.vocab_size,
    )


def _tokens(given: Data, source: Any) -> ArrayData:
    return array_data(_one(source), heldout_fraction=given.heldout_fraction, length=given.length)


def _mixed(experiment: Experiment) -> Any:
    """Each text opened as if it were alone, then drawn from by weight."""
    parts: list[tuple[Any, float]] = []
    for name, part in experiment.data.mixture.items():
        field = experiment.data.field if part.field is None else part.field
        opened = _fitting(experiment, f"data.mixture.{name}", _opened(experiment, part.source, field))
        parts.append((opened, part.weight))
    return mixture(parts, seed=experiment.seed)


def _one(source: str | Sequence[str]) -> str:
    if not isinstance(source, str):
        raise ExperimentError(
            f"images and arrays come from one source; given {len(source)}: {', '.join(source)}: name one, such as a "
            "folder that holds them all"
        )
    return source


def _is_arrays(source: str | Sequence[str]) -> bool:
    return all(word.endswith(ARRAYS) for word in ([source] if isinstance(source, str) else source))


def _holds_images(path: str, field: str | None) -> bool:
    """Whether an .npz holds pictures, which are then normalised and laid flat, rather than features."""
    try:
        with np.load(path) as arrays:
            return field is None and "images" in arrays.files and "features" not in arrays.files
    except Exception:  # a damaged file makes NumPy and zipfile raise nearly anything
        return False  # whoever reads it says what is wrong


def _fitting(experiment: Experiment, key: str, data: Any) -> Any:
    """`data`, if the model can learn it. Raises ExperimentError with the value to set."""
    config: Any = experiment.model.config
    if isinstance(config, GPTConfig):
        _fits_vocabulary(experiment, key, data)
    elif isinstance(config, MLPConfig):
        features = data.train[0]["features"].shape
        if features != (config.features_in,):
            size = int(np.prod(features))
            raise ExperimentError(
                f"model.features_in must be the features of a sample, {size} in {key} ({data}); given "
                f"{config.features_in}: set model.features_in = {size}"
            )
        _fits_classes(key, data, "features_out", config.features_out)
    else:  # its images were fitted to model.image_size and model.channels when they were opened
        _fits_classes(key, data, "classes", config.classes)
    return data


def _fits_vocabulary(experiment: Experiment, key: str, data: Any) -> None:
    """Tokens from arrays; those of text were held against the vocabulary when they were read."""
    size, length = experiment.model.config.vocab_size, experiment.data.length  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(data, ArrayData):
        check_tokens(data, size)
        (found,) = data.shape
        if found != length:
            raise ExperimentError(
                f"data.length must be the tokens of a sample, {found} in {key} ({data}); given {length}: set "
                f"data.length = {found}, and model.context to as much at least"
            )


def _classes(data: Any) -> tuple[str, ...]:
    return data.images.classes if isinstance(data, FlatData) else getattr(data, "classes", ())


def _fits_classes(key: str, data: Any, field: str, outputs: int) -> None:
    classes = _classes(data)
    if not classes:
        raise ExperimentError(
            f"{key} must have labels, a class for each sample, but {data} has none: name them (label)"
        )
    if len(classes) > outputs:
        raise ExperimentError(
            f"model.{field} must be at least the number of classes, {len(classes)} in {key} ({data}); given {outputs}: "
            f"set model.{field} = {len(classes)}"
        )


def _same_classes(key: str, learnt: tuple[str, ...], found: tuple[str, ...]) -> None:
    """Classes are numbered by their names, so those of an evaluation set must begin as those that are learnt."""
    if learnt[: len(found)] != found:
        odd = next((f"{b!r} where {a!r} is" for a, b in zip(learnt, found, strict=False) if a != b), "more classes")
        raise ExperimentError(
            f"{key} must have the classes of data.source, {len(learnt)} ({', '.join(learnt[:5])}…); it has {odd}: "
            "give every class a folder, or the same numbers"
        )
