"""Open the pictures of a source, to split later, or of a training and a held-out source.

Pictures may be arrays: an .npz of "images" and "labels", or the handwritten digits of scikit-learn. The digits are
1,797 grey pictures of 8x8 in ten classes, without a download: NIST's, collected and reduced by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, 1998).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.hub_source import HF
from jdp.base.user_path import user_path
from jdp.data.held_out import content_score
from jdp.data.images.decode import Pictures
from jdp.data.images.from_hub import hub_pictures
from jdp.data.labels import labels_of
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.files import read_by_datasets
from jdp.data.sources.hub import optional

DIGITS = "digits"


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPictures(Pictures):
    """Pictures in memory."""

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
    return ArrayPictures(name=name, images=images, labels=labels_of(labels, name, names=classes), most=most)


def open_pictures(
    source: str | os.PathLike[str],
    image: str | None = None,
    label: str | None = None,
    *,
    classes: tuple[str, ...] | None = None,
) -> tuple[Pictures, int]:
    """Return the pictures of a source, and their number of channels.

    Args:
        source: "digits", an .npz or "hf:…".
        image: the column of pictures; None: chosen by type or name.
        label: the column of labels; None: chosen by type or name.
        classes: class names that number the labels; None: those of the source.
    """
    if str(source).startswith(HF):
        return hub_pictures(str(source), image, label, classes=classes), 3
    if image or label:
        given = f"{image or label} for {source}"
        raise UserError(f"only tables that `datasets` reads have columns; given {given}: leave them out")
    if source == DIGITS:
        load_digits = optional("sklearn.datasets", f'the data set "{DIGITS}"', extra="test").load_digits
        images, numbers = load_digits(return_X_y=True)  # values 0 to 16
        return array_pictures(images.reshape(-1, 8, 8).astype(np.uint8), numbers, DIGITS, most=16.0), 1
    path = user_path(source)
    if path.suffix != ".npz":
        builder = read_by_datasets(path, Path("1.png") if path.is_dir() else None)
        raise UserError(
            f'images must be "{DIGITS}", an .npz file or "{HF}…"; given {source}, looked for at {path.absolute()}: '
            f"{builder}"
        )
    arrays, name = read_arrays(path)
    if not {"images", "labels"} <= arrays.keys():
        given = f"{', '.join(arrays)} in {name}"
        raise UserError(f"an .npz of images must have images and labels; given {given}: rename the arrays")
    pictures = array_pictures(arrays["images"], arrays["labels"], name, classes=classes)
    return pictures, pictures.images.shape[3]
