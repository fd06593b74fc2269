"""Images with classes, decoded in the reading threads; and crops and flips that differ in every epoch.

The pictures are split into training and held-out pictures by a hash of their encoded bytes, unless the source has a
held-out set. A sample is one picture, fitted to the size and normalised, with its class and weight.

1. A sample's draws are a pure function of seed, epoch and index: the first words of a Philox stream (Salmon et al.
   2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the seed, and the counter holds epoch and index. So
   the pixels do not depend on processes, devices, batch size, threads or resumes, and there is no state.
2. The padded crop is a window of the image's size from the image with `crop_padding` pixels of `fill` on each side
   (He et al. 2016, section 4.2): a shift by at most `crop_padding` pixels each way.
3. The resized crop is a part of the picture with random area and proportions, resized to the image's size (Szegedy et
   al. 2014, arXiv:1409.4842, section 6). As in torchvision's `RandomResizedCrop`, the share of the area is uniform, and
   the proportions, 3:4 to 4:3, are log-uniform. After ten draws that do not fit, the largest centred part is used.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError, public
from jdp.base.user_path import HF
from jdp.base.words import is_integer, is_number
from jdp.data.batches import NumpyBatch, Source
from jdp.data.held_out import fingerprint, split_samples
from jdp.data.pictures import MODES, Box, Frame, Part, Pictures, open_pictures

_TRIES = 10
_WORDS = 3 + 2 * _TRIES  # drawn for a sample: the crop's row and column, the flip; areas and proportions
_WIDEST = 4 / 3
_STREAM = 0x6A64702E696D6167  # second half of the key: separates it from other streams of the seed


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
    """One side of the pictures.

    Sample i is a dict of "images" float32 [height, width, channels], "labels" int32 and "weights" float32 (1).
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
        return self.part(index, None)

    def part(self, index: int, part: Part | None) -> NumpyBatch:
        """Return a sample; of a part of the picture if given, resized to the shape."""
        row = int(self.rows[index])
        frame = self.frame if part is None else replace(self.frame, size=self.shape[:2])
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
    pictures = open_pictures(source, image, label)
    channels = pictures.channels if channels is None else channels
    if channels not in MODES:
        raise UserError(f"channels must be 1 (grey), 3 (colour) or 4 (opacity); given {channels}: use one of these")
    frame = Frame(height_and_width, channels)
    normalised = Normalised(_constants("mean", mean, channels), _constants("std", std, channels))
    first = decoded(pictures, 0, frame)  # reports a missing codec or impossible channels at once
    shape, classes = (first.shape[0], first.shape[1], channels), pictures.labels.classes
    if heldout is None:
        sides = [(pictures, rows) for rows in split_samples(pictures.scores, heldout_fraction, pictures.name)]
    else:
        columns = (image, label) if str(heldout).startswith(HF) else ()
        both = pictures, open_pictures(heldout, *columns, classes=classes)
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


@dataclass(frozen=True, eq=False)
class AugmentedImages:
    """Samples whose "images" are cropped and flipped, otherwise as they are; made by `augmented`.

    Attributes:
        samples: the source.
        crop_padding: pixels on each side.
        flip: whether half of the images are flipped.
        resized_crop: least share of the area of a resized crop; 0: no such crop.
        fill: value of the padding of each channel: black for images of `image_data`, else 0.
        seed: seed of the draws.

    A plain index is the sample in the first epoch.

    >>> import numpy as np
    >>> images = augmented([{"images": np.ones((4, 4, 1))}], crop_padding=1)
    >>> [int(images.sample_in_epoch(0, epoch)["images"].sum()) for epoch in range(3)]
    [12, 16, 12]
    """

    samples: Source
    crop_padding: int
    flip: bool
    fill: NDArray[Any]
    seed: int
    resized_crop: float = 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]:
        return self.sample_in_epoch(range(len(self))[index], 0)

    def sample_in_epoch(self, index: int, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Return a sample with the crop and flip of an epoch.

        Args:
            index: index of the sample, 0 to len - 1.
            epoch: not negative.
        """
        # Raw bits, because NumPy may change a Generator's methods (NEP 19) but not a bit generator's stream.
        # The counter's lowest word counts the words drawn.
        key, counter = np.array([self.seed, _STREAM], np.uint64), np.array([0, index, epoch, 0], np.uint64)
        top, left, coin, *shapes = np.random.Philox(key=key, counter=counter).random_raw(_WORDS).tolist()
        if self.resized_crop:
            samples: Any = self.samples
            part = partial(_drawn_part, self.resized_crop, top, left, shapes)
            sample = samples.part(range(len(self))[index], part)
        else:
            sample = self.samples[index]
        images, padding = sample["images"], self.crop_padding
        if padding:
            height, width, *channels = images.shape
            padded = np.full((height + 2 * padding, width + 2 * padding, *channels), self.fill, images.dtype)
            padded[padding:-padding, padding:-padding] = images
            down, right = top * (2 * padding + 1) >> 64, left * (2 * padding + 1) >> 64
            images = padded[down : down + height, right : right + width]
        if self.flip and coin >> 63:
            images = images[:, ::-1]
        return {**sample, "images": images}


@public()
def augmented(
    samples: Source, *, crop_padding: int = 0, flip: bool = False, resized_crop: float = 0.0, seed: int = 0
) -> AugmentedImages:
    """Crop and flip the training images of a source, differently in every epoch. Evaluate on the source itself.

    `global_batches` passes the epoch: pixels are the same on any number of processes, with any batch size, and after a
    resume. Augment sources before you mix them: a mixture is refused.

    Args:
        samples: with "images" [height, width, …], of one shape and any dtype, such as `image_data(…).train`.
        crop_padding: black pixels added on each side before a window of the image's size is cropped; less than height
            and width. All windows are equally likely. 0: no crop.
        flip: whether each image is flipped from left to right with probability 1/2.
        resized_crop: least share of a picture's area, up to all of it, that a random crop shows; the crop is resized to
            the image's size. 0.08 is usual for photographs; 0: no such crop. For images of `image_data` only.
        seed: seed of the draws, 0 to 2⁶⁴ - 1; it may equal the order's seed.

    Returns:
        The source to give to `global_batches`.

    Raises:
        ValueError: a number outside the ranges above, samples without images of two dimensions or more, a mixture.

    >>> import numpy as np
    >>> images = augmented([{"images": np.arange(4).reshape(1, 4)}], flip=True)
    >>> [images.sample_in_epoch(0, epoch)["images"].tolist() for epoch in (1, 2)]
    [[[0, 1, 2, 3]], [[3, 2, 1, 0]]]
    """
    if hasattr(samples, "sample_at"):
        raise UserError("a mixture has its own order and cannot be augmented: augment the sources, then mix them")
    if not (is_integer(seed) and 0 <= seed < 2**64):
        raise UserError(f"seed must be 0 to 2**64 - 1; given {seed}: use 0, for example")
    images = samples[0].get("images")
    if images is None or images.ndim < 2:
        given = sorted(samples[0])
        raise UserError(f'samples must have "images" [height, width, …]; given {given}: augment sources of images')
    if not (is_integer(crop_padding) and 0 <= crop_padding < min(images.shape[:2])):
        rule = f"0 or more, and less than the height and width of images {list(images.shape)}"
        raise UserError(f"crop_padding must be {rule}; given {crop_padding}: use 1, for example")
    if not (is_number(resized_crop) and 0 <= resized_crop < 1):
        given = f"{resized_crop}: use 0.08, for example"
        raise UserError(f"resized_crop must be 0, or a share of the area below 1; given {given}")
    if resized_crop and (crop_padding or not isinstance(samples, ImageSamples)):
        given = f"{resized_crop} with crop_padding {crop_padding} for {type(samples).__name__}"
        raise UserError(f"resized_crop requires pictures from image_data, and no crop_padding; given {given}: use one")
    fill = np.asarray(getattr(samples, "black", 0)).astype(images.dtype)
    return AugmentedImages(samples, crop_padding, flip, fill, seed, float(resized_crop))


def _drawn_part(least: float, top: int, left: int, shapes: Sequence[int], height: int, width: int) -> Box:
    """Return the part of a picture chosen by words of 64 random bits: its row and column, then tries of its shape."""
    wide, high = min(width, max(round(height * _WIDEST), 1)), min(height, max(round(width * _WIDEST), 1))
    for area, proportions in zip(shapes[::2], shapes[1::2], strict=True):
        pixels = height * width * (least + (1 - least) * area / 2**64)
        ratio = _WIDEST ** (2 * proportions / 2**64 - 1)
        tried = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < tried[0] <= width and 0 < tried[1] <= height:
            right, down = left * (width - tried[0] + 1) >> 64, top * (height - tried[1] + 1) >> 64
            return right, down, right + tried[0], down + tried[1]
    right, down = (width - wide) // 2, (height - high) // 2
    return right, down, right + wide, down + high
