"""Images that differ in every epoch: a crop after padding, and a flip from left to right.

1. A sample's draws are a pure function of seed, epoch and index: the first words of a Philox stream (Salmon et al.
   2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the seed, and the counter holds epoch and index. So
   the pixels do not depend on processes, devices, batch size, threads or resumes, and there is no state.
2. The padded crop is a window of the image's size from the image with `crop_padding` pixels of `fill` on each side
   (He et al. 2016, section 4.2): a shift by at most `crop_padding` pixels each way.
3. The resized crop is a part of the picture with random area and proportions, resized to the image's size (Szegedy et
   al. 2014, arXiv:1409.4842, section 6). As in torchvision's `RandomResizedCrop`, the share of the area is uniform, and
   the proportions, 3:4 to 4:3, are log-uniform. After ten draws that do not fit, the largest centred part with such
   proportions is used.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.public import public
from jdp.base.words import is_integer, is_number
from jdp.data.batches import Source
from jdp.data.images.decode import Box
from jdp.data.images.samples import ImageSamples

_TRIES = 10
_WORDS = 3 + 2 * _TRIES  # drawn for a sample: the crop's row and column, the flip; areas and proportions
_WIDEST = 4 / 3
_STREAM = 0x6A64702E696D6167  # second half of the key: separates it from other streams of the seed


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
            sample = samples.part(range(len(self))[index], _drawn_part(self.resized_crop, top, left, shapes))
        else:
            sample = self.samples[index]
        images, positions = sample["images"], 2 * self.crop_padding + 1
        if self.crop_padding:
            down, right = top * positions >> 64, left * positions >> 64
            images = _window(images, down - self.crop_padding, right - self.crop_padding, self.fill)
        if self.flip and coin >> 63:
            images = images[:, ::-1]
        return {**sample, "images": images}


@public()
def augmented(
    samples: Source,
    *,
    crop_padding: int = 0,
    flip: bool = False,
    resized_crop: float = 0.0,
    seed: int = 0,
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
        raise UserError(
            "a mixture cannot be augmented, because it has its own order: augment the sources, then mix them"
        )
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
    if resized_crop and crop_padding:
        raise UserError(f"resized_crop and crop_padding both crop; given {resized_crop} and {crop_padding}: use one")
    if resized_crop and not isinstance(samples, ImageSamples):
        given = type(samples).__name__
        raise UserError(f"resized_crop requires pictures from image_data; given {given}: crop in your source")
    fill = np.asarray(getattr(samples, "black", 0)).astype(images.dtype)
    return AugmentedImages(samples, crop_padding, flip, fill, seed, float(resized_crop))


def _drawn_part(least: float, top: int, left: int, shapes: Sequence[int]) -> Callable[[int, int], Box]:
    """Return the part of a picture chosen by words of 64 random bits: its row and column, then tries of its shape."""

    def part(height: int, width: int) -> Box:
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

    return part


def _window(image: NDArray[Any], down: int, right: int, fill: NDArray[Any]) -> NDArray[Any]:
    """Return the window that begins `down` rows and `right` columns into the image, with `fill` outside the image."""
    height, width = image.shape[:2]
    top, bottom, left, end = max(0, -down), height - max(0, down), max(0, -right), width - max(0, right)
    window = np.empty_like(image)
    window[top:bottom, left:end] = image[top + down : bottom + down, left + right : end + right]
    window[:top], window[bottom:], window[top:bottom, :left], window[top:bottom, end:] = fill, fill, fill, fill
    return window
