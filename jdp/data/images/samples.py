"""Images with classes, decoded in the reading threads.

The pictures are split into training and held-out pictures by a hash of their encoded bytes, unless the source has a
held-out set. A sample is one picture, fitted to the size and normalised, with its class and weight.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.hub_source import HF
from jdp.base.public import public
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import fingerprint, split_samples
from jdp.data.images.decode import MODES, Frame, Part, Pictures
from jdp.data.images.sources import open_pictures


@dataclass(frozen=True)
class Normalised:
    """Normalisation of values v in [0, most]: (v / most - mean) / std."""

    mean: tuple[float, ...]  # of each channel, for values in [0, 1]
    std: tuple[float, ...]  # of each channel, positive

    def __call__(self, values: NDArray[Any], most: float) -> NDArray[np.float32]:
        mean, std = np.asarray(self.mean), np.asarray(self.std)
        images = np.multiply(values, (1 / (most * std)).astype(np.float32), dtype=np.float32)
        images -= (mean / std).astype(np.float32)
        return images


@dataclass(frozen=True, eq=False)
class ImageSamples:
    """One side of the pictures, as a sequence of samples.

    Sample i is a dict of "images" float32 [height, width, channels], "labels" int32 and "weights" float32 (1). Reading
    a corrupt picture, or one of another shape, raises ValueError with its file (or row).
    """

    pictures: Pictures  # encoded, with labels
    rows: NDArray[np.int64]  # int64 [len], the pictures on this side
    frame: Frame  # the size and channels of samples
    shape: tuple[int, int, int]  # (height, width, channels) of a sample
    normalised: Normalised  # the normalisation

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def black(self) -> NDArray[np.float32]:
        """Black in a sample's values: float32 [channels]."""
        return self.normalised(np.zeros(self.shape[2]), self.pictures.most)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        return self._sample(index, self.frame, None)

    def part(self, index: int, part: Part) -> NumpyBatch:
        """Return a sample from a part of the picture, resized to the shape."""
        return self._sample(index, replace(self.frame, size=self.shape[:2]), part)

    def _sample(self, index: int, frame: Frame, part: Part | None) -> NumpyBatch:
        row = int(self.rows[index])
        values = decoded(self.pictures, row, frame, part)
        if values.shape != self.shape:
            raise UserError(
                f"images must all be of one size, {_times(self.shape)}; given {_times(values.shape)} in "
                f"{self.pictures.name_of(row)}: set a size, to which all are fitted"
            )
        return {
            "images": self.normalised(values, self.pictures.most),
            "labels": np.asarray(self.pictures.labels.numbers[row]),
            "weights": np.ones((), np.float32),
        }


def decoded(pictures: Pictures, row: int, frame: Frame, part: Part | None = None) -> NDArray[Any]:
    """Return one picture [height, width, channels]. Raises ValueError if it cannot be read or decoded."""
    try:
        content = pictures.content(row)
        return frame.decode(content, part) if isinstance(content, bytes) else frame.fit(content, part)
    except Exception as error:  # a corrupt file makes Pillow's decoders raise nearly anything
        raise UserError(
            f"images must be readable; given {pictures.name_of(row)} (sample {row} of {pictures.name}): "
            f"{str(error) or type(error).__name__}; fix it, or leave it out"
        ) from error


@dataclass(frozen=True, eq=False)
class ImageData:
    """Pictures split in two: `train` and `heldout` are sources for `global_batches`; `str()` is one line of text.

    Attributes:
        name: the source's name.
        train: the samples to train on.
        heldout: the samples held out.
        classes: names of the classes; a label is an index into this.
        by_content: True if pictures are held out by a hash of their bytes, False if the source has a held-out set.

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> images = np.arange(320, dtype=np.uint8).reshape(20, 4, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(pathlib.Path(folder, "digits.npz"), images=images, labels=np.arange(20) % 2)
    ...     data = image_data(pathlib.Path(folder, "digits.npz"), heldout_fraction=0.2)
    >>> data.shape, data.classes, len(data.train) + len(data.heldout)
    ((4, 4, 1), ('0', '1'), 20)
    """

    name: str
    train: ImageSamples
    heldout: ImageSamples
    classes: tuple[str, ...]
    by_content: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of a sample."""
        return self.train.shape

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits: equal on two machines, or before and after a resume, only if all samples are equal.

        For files above 64 KiB it covers the size and both ends.
        """
        described = f"images {self.train.shape} {self.train.frame} {self.train.normalised} {self.classes}"
        arrays = [
            array[side.rows]
            for side in (self.train, self.heldout)
            for array in (side.pictures.scores, side.pictures.labels.numbers)
        ]
        return fingerprint(described, arrays)

    def __str__(self) -> str:
        rule = "by a hash of their content" if self.by_content else "a set of its own"
        return (
            f"{self.name}: {len(self.train) + len(self.heldout):,} images of {_times(self.shape)} in "
            f"{len(self.classes)} classes; train {len(self.train):,}, held out {len(self.heldout):,} ({rule})"
        )


@public()
def image_data(
    source: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    heldout_fraction: float = 0.05,
    heldout: str | os.PathLike[str] | None = None,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    image: str | None = None,
    label: str | None = None,
) -> ImageData:
    """Open pictures with classes, as samples for a classifier.

    Args:
        source: "digits" is scikit-learn's 1,797 of 8x8x1, values up to 16. An .npz has "images" uint8 and "labels".
            `datasets` reads "hf:imagefolder:PATH" (a folder for each class), "hf:parquet:PATH", "hf:arrow:PATH",
            "hf:webdataset:PATH" (.tar files) and "hf:NAME". Name one of several splits: "hf:NAME:train".
        size: of every image, in pixels, (height, width) or one for both: the largest centred part of these proportions
            is resized (bilinear, antialiased). None: all must have the same size. EXIF rotations are not applied.
        channels: 1, 3 or 4; None is 1 for digits and 3 for files. Grey and colour are converted; a transparent part
            shows its colour.
        heldout_fraction: in [0, 1), about the share of the images to hold out, by a hash of their encoded bytes.
        heldout: a separate held-out set with the same classes, in place of `heldout_fraction`.
        mean, std: for each channel or for all; a value v becomes (v / 255 - mean) / std, by default in [-1, 1].
        image, label: the columns of images and labels, if there are several candidates.

    Returns:
        The data, with `train`, `heldout`, `classes`, `shape`, `fingerprint`.

    Raises:
        ValueError: a source that does not exist or has another form, a missing package, fewer than two different
            images, or a number out of its range. Reading a sample raises it for a corrupt image.

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "faces.npz")
    ...     np.savez(file, images=np.random.randint(0, 256, (9, 4, 4, 3), np.uint8), labels=["ann", "bo", "cy"] * 3)
    ...     data = image_data(file, heldout_fraction=0.2)
    >>> data.shape, data.classes, sorted(data.train[0])
    ((4, 4, 3), ('ann', 'bo', 'cy'), ['images', 'labels', 'weights'])
    """
    height_and_width = (size, size) if isinstance(size, int) else size
    if height_and_width is not None and min(height_and_width) < 1:
        raise UserError(f"size must be at least 1 pixel high and wide; given {size}: use 224, for example")
    pictures, own_channels = open_pictures(source, image, label)
    channels = channels if channels is not None else own_channels
    if channels not in MODES:
        raise UserError(
            f"channels must be 1 (grey), 3 (colour) or 4 (with opacity); given {channels}: use one of these"
        )
    frame = Frame(height_and_width, channels)
    normalised = Normalised(_constants("mean", mean, channels), _constants("std", std, channels))
    first = decoded(pictures, 0, frame)  # reports a missing codec or impossible channels at once
    shape, classes = (first.shape[0], first.shape[1], channels), pictures.labels.classes
    if heldout is None:
        sides = [(pictures, rows) for rows in split_samples(pictures.scores, heldout_fraction, pictures.name)]
    else:
        columns = (image, label) if str(heldout).startswith(HF) else ()
        both = pictures, open_pictures(heldout, *columns, classes=classes)[0]
        sides = [(side, np.arange(len(side.labels.numbers))) for side in both]
    train, held = (ImageSamples(side, rows, frame, shape, normalised) for side, rows in sides)
    return ImageData(str(source), train, held, classes, by_content=heldout is None)


def _constants(key: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    values = (float(given),) * channels if isinstance(given, int | float) else tuple(map(float, given))
    if len(values) != channels or not all(map(math.isfinite, values)) or (key == "std" and min(values) <= 0):
        rule = "positive numbers" if key == "std" else "numbers"
        raise UserError(f"{key} must be {rule}, one or {channels} (one for each channel); given {given}: fix it")
    return values


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
