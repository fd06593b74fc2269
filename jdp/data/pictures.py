"""Pictures with classes: opened from a source, and decoded to values of a given size.

Pictures may be arrays: an .npz of "images" and "labels", or scikit-learn's handwritten digits (NIST's, reduced by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998). Or `datasets` reads rows with a column of encoded
pictures and a column of labels; a picture is in its row, or in a file that the row names. Pillow decodes and resizes
outside Python's global lock, so reading threads work in parallel.
"""

import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.user_path import HF, check_regular, user_path
from jdp.data.arrays import Labels, labels_of, read_arrays
from jdp.data.held_out import content_score, ends_score
from jdp.data.sources import hub_data, optional, read_by_datasets, refuse_unreadable

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
DIGITS = "digits"
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_READERS = 16  # threads: a disk serves many reads at once
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR
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
    channels: int = 3

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The content score of each picture: float64 [pictures]."""
        count = len(self.labels.numbers)
        with ThreadPoolExecutor(_READERS) as readers:
            return np.fromiter(readers.map(self.score, range(count)), np.float64, count)

    @abstractmethod
    def score(self, index: int, /) -> float: ...

    @abstractmethod
    def name_of(self, index: int, /) -> str:
        """Return a picture's name for errors."""

    @abstractmethod
    def content(self, index: int, /) -> bytes | NDArray[Any]:
        """Return an encoded picture, or its values [height, width, channels]."""


@dataclass(frozen=True)
class Frame:
    # (height, width) in pixels; None: no resizing, so all pictures must have the same size
    size: tuple[int, int] | None
    channels: int  # 1 (grey), 3 (red, green, blue) or 4 (and opacity)

    def decode(self, content: bytes, part: Part | None = None) -> NDArray[np.uint8]:
        """Return an encoded picture as uint8: its part, or the largest centred part of the size's proportions."""
        with optional("PIL.Image", "decoding an image").open(io.BytesIO(content)) as image:
            if image.mode in ("I", "F"):
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


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPictures(Pictures):
    images: NDArray[np.uint8]  # [pictures, height, width, channels]

    def name_of(self, index: int, /) -> str:
        return f"image {index} of {self.name}"

    def content(self, index: int, /) -> NDArray[np.uint8]:
        return self.images[index]

    def score(self, index: int, /) -> float:
        return content_score(self.images[index].tobytes())


def array_pictures(
    images: NDArray[Any],
    labels: NDArray[Any],
    name: str,
    *,
    most: float = 255.0,
    classes: tuple[str, ...] | None = None,
) -> ArrayPictures:
    """Return pictures from uint8 [pictures, height, width] or [pictures, height, width, channels]."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"images must be uint8 [images, height, width] or [images, height, width, channels]; given {images.dtype} "
            f"{list(images.shape)} in {name}: convert them, or pass normalised images to array_data"
        )
    images = images if images.ndim == 4 else images[..., None]
    labelled = labels_of(labels, name, names=classes)
    return ArrayPictures(name=name, images=images, labels=labelled, most=most, channels=images.shape[3])


def open_pictures(
    source: str | os.PathLike[str],
    image: str | None = None,
    label: str | None = None,
    *,
    classes: tuple[str, ...] | None = None,
) -> Pictures:
    """Return the pictures of a source, numbered by its classes or the given ones; `image` and `label` name columns."""
    if str(source).startswith(HF):
        return hub_pictures(str(source), image, label, classes=classes)
    if image or label:
        given = f"{image or label} for {source}"
        raise UserError(f"only tables that `datasets` reads have columns; given {given}: leave them out")
    if source == DIGITS:
        load_digits = optional("sklearn.datasets", f'the data set "{DIGITS}"', extra="test").load_digits
        images, numbers = load_digits(return_X_y=True)  # values 0 to 16
        return array_pictures(images.reshape(-1, 8, 8).astype(np.uint8), numbers, DIGITS, most=16.0)
    path = user_path(source)
    if path.suffix != ".npz":
        fix = read_by_datasets(path, Path("1.png") if path.is_dir() else None)
        given = f"{source}, looked for at {path.absolute()}"
        raise UserError(f'images must be "{DIGITS}", an .npz file or "{HF}…"; given {given}: {fix}')
    arrays, name = read_arrays(path)
    if not {"images", "labels"} <= arrays.keys():
        given = f"{', '.join(arrays)} in {name}"
        raise UserError(f"an .npz of images must have images and labels; given {given}: rename the arrays")
    return array_pictures(arrays["images"], arrays["labels"], name, classes=classes)


@dataclass(frozen=True, eq=False, kw_only=True)
class HubPictures(Pictures):
    contents: Any  # a `pyarrow.ChunkedArray` of bytes; null if the picture is in a file
    paths: Any  # a `pyarrow.ChunkedArray` of the files' paths

    def name_of(self, index: int, /) -> str:
        return self.paths[index].as_py() or f"row {index}"

    def content(self, index: int, /) -> bytes:
        with self._file(index) as file:
            return file.read()

    def score(self, index: int, /) -> float:
        try:
            with self._file(index) as file:
                return ends_score(file)
        except OSError as error:
            refuse_unreadable(error, self.name_of(index))

    def _file(self, index: int) -> BinaryIO:
        if (content := self.contents[index]).is_valid:
            return optional("pyarrow", self.name).BufferReader(content.as_buffer())
        path = self.paths[index].as_py()
        if path is None:
            raise UserError(f"every row must have a picture; given none in row {index} of {self.name}: remove the row")
        check_regular(path)
        return Path(path).open("rb")


def hub_pictures(
    source: str, image: str | None, label: str | None, *, classes: tuple[str, ...] | None = None
) -> HubPictures:
    """Return the pictures of a split. The label is the only column of classes, or has a usual name."""
    datasets, pc = optional("datasets", source), optional("pyarrow.compute", source)
    optional("PIL", source)  # reports a missing package now, not in a reading thread
    split, data = hub_data(source)
    name, kinds = f"{source} (split {split})", data.features
    images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [column for column in _LABEL_NAMES if column in kinds]
    image = _chosen("image", image, images, list(kinds), name)
    label = _chosen("label", label, labels, list(kinds), name)
    pictures = data.select_columns([image]).cast_column(image, datasets.Image(decode=False)).data.table.column(image)
    values = data.select_columns([label])[label][:]
    if None in values:
        raise UserError(f"every row must have a label; given none in row {values.index(None)} of {name}: remove it")
    names = kinds[label].names if isinstance(kinds[label], datasets.ClassLabel) else None
    if names is not None and classes not in (None, tuple(names)):  # numbered by other classes
        values, names = [names[value] for value in values], classes
    return HubPictures(
        name=name,
        labels=labels_of(values, name, names=names or classes),
        contents=pc.struct_field(pictures, "bytes"),
        paths=pc.struct_field(pictures, "path"),
    )


def _chosen(what: str, given: str | None, found: list[str], columns: list[str], name: str) -> str:
    if given in columns:
        return given
    if given is None and len(found) == 1:
        return found[0]
    problem = f'no column "{given}"' if given else ", ".join(found) or "none that is known"
    fix = f'name it, {what} = "…" (in an experiment file data.{"field" if what == "image" else "label"})'
    raise UserError(
        f"a column of {what}s must be named, or be the only one; given {problem}, in {name} with {', '.join(columns)}: "
        f"{fix}"
    )
