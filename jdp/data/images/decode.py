"""One picture: from encoded bytes to values of a given size.

Pillow decodes and resizes outside Python's global lock, so reading threads work in parallel.
"""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.data.arrays import Labels
from jdp.data.sources.hub import optional

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_READERS = 16  # threads: a disk serves many reads at once
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR
_UNCLEAR = ("I", "F")  # 32 bits: no agreed black and white
Box = tuple[float, float, float, float]
"""Part of a picture in pixels: left, top, right, bottom."""
Part = Callable[[int, int], Box]
"""Height and width of a picture -> the part of it to resize."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pictures(ABC):
    """Encoded pictures with their classes, by random access; safe to read in threads."""

    name: str  # of the source
    labels: Labels  # the class of each
    most: float = 255.0  # largest value of a pixel; black is 0

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The content score of each picture: float64 [pictures]."""
        count = len(self.labels.numbers)
        with ThreadPoolExecutor(_READERS) as readers:
            return np.fromiter(readers.map(self.score, range(count)), np.float64, count)

    @abstractmethod
    def score(self, index: int, /) -> float:
        """Return the content score of a picture."""

    @abstractmethod
    def name_of(self, index: int, /) -> str:
        """Return a picture's name for errors: its file, or its table and row."""

    @abstractmethod
    def content(self, index: int, /) -> bytes | NDArray[Any]:
        """Return an encoded picture, or its values [height, width, channels]. Raises OSError if it cannot be read."""


@dataclass(frozen=True)
class Frame:
    # (height, width) in pixels; None: no resizing, so all pictures must have the same size
    size: tuple[int, int] | None
    channels: int  # 1 (grey), 3 (red, green, blue) or 4 (and opacity)

    def decode(self, content: bytes, part: Part | None = None) -> NDArray[np.uint8]:
        """Return an encoded picture as uint8 [height, width, channels]; raise ValueError if its values have 32 bits.

        Without `part`, the largest centred part of these proportions is resized.
        """
        with optional("PIL.Image", "decoding an image").open(io.BytesIO(content)) as image:
            if image.mode in _UNCLEAR:
                raise UserError(f"its values have 32 bits (mode {image.mode}), which define no white")
            box = None if self.size is None else _drafted(image, self.size, part)
            picture = _eight_bits(image, MODES[self.channels])
            if self.size is not None and (picture.size, box) != (self.size[::-1], (0, 0, *self.size[::-1])):
                picture = picture.resize(self.size[::-1], _BILINEAR, box=box, reducing_gap=2.0)
            values = np.asarray(picture)
        return values if values.ndim == 3 else values[:, :, None]

    def fit(self, values: NDArray[np.uint8], part: Part | None = None) -> NDArray[Any]:
        """Fit values [height, width, channels] to the size and channels; resized values are float32."""
        have = values.shape[2]
        if have != self.channels and (have, self.channels) != (1, 3):
            raise UserError(f"its {have} channels cannot become {self.channels}: set channels = {have}")
        if self.size is not None and (part is not None or values.shape[:2] != self.size):
            # Each channel on its own: Pillow would weight colours by a fourth channel, and round to whole numbers.
            fromarray = optional("PIL.Image", "resizing an image").fromarray
            planes = [fromarray(values[..., i].astype(np.float32)) for i in range(have)]
            box, size = _drafted(planes[0], self.size, part), self.size[::-1]
            planes = [plane.resize(size, _BILINEAR, box=box, reducing_gap=2.0) for plane in planes]
            values = np.stack([np.asarray(plane) for plane in planes], axis=-1)
        return values if have == self.channels else np.repeat(values, self.channels, axis=2)


def _drafted(image: Any, size: tuple[int, int], part: Part | None) -> Box:
    """Return the part in pixels of the decoded picture.

    A JPEG is decoded at a half, a quarter or an eighth of its size if the part stays at least twice our size.
    """
    high, wide = size
    width, height = image.size
    if part is None:
        image.draft(None, (2 * wide, 2 * high))
        scale = min(image.height / high, image.width / wide)
        left, top = (image.width - wide * scale) / 2, (image.height - high * scale) / 2
        return left, top, left + wide * scale, top + high * scale
    left, top, right, bottom = part(height, width)
    least = math.ceil(2 * wide * width / (right - left)), math.ceil(2 * high * height / (bottom - top))
    image.draft(None, least)
    x, y = image.width / width, image.height / height
    return left * x, top * y, min(right * x, image.width), min(bottom * y, image.height)


def _eight_bits(image: Any, mode: str) -> Any:
    """Return the first picture of a file, 8 bits a channel; a transparent part shows its colour."""
    if image.mode in _SIXTEEN_BITS:
        values = np.asarray(image).astype(np.uint16) >> 8
        image = optional("PIL.Image", "decoding an image").fromarray(values.astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow's only way without a warning
    return image if image.mode == mode else image.convert(mode)
