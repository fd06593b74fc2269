"""Pictures that are arrays already: digits, or an .npz of "images" and "labels"."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.data.labels import Labels, labels_of
from jdp.data.split import content_score


@dataclass(frozen=True, eq=False)
class ArrayPictures:
    """See `jdp.data.images.decode.Pictures`; `images` are uint8 [pictures, height, width, channels]."""

    name: str
    images: NDArray[np.uint8]
    labels: Labels
    scores: NDArray[np.float64]
    most: float = 255.0

    def where(self, index: int, /) -> str:
        return f"image {index} of {self.name}"

    def content(self, index: int, /) -> NDArray[np.uint8]:
        return self.images[index]


def array_pictures(
    images: NDArray[Any],
    labels: NDArray[Any],
    name: str,
    *,
    most: float = 255.0,
    classes: tuple[str, ...] | None = None,
) -> ArrayPictures:
    """Pictures from uint8 [pictures, height, width] or [pictures, height, width, channels].

    Raises:
      ValueError: images of another dtype or rank, or labels that are no classes.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"images must be uint8 [images, height, width] or [images, height, width, channels], got {images.dtype} "
            f"{list(images.shape)} in {name}: convert them, or give normalised ones to array_data"
        )
    images = images if images.ndim == 4 else images[..., None]
    scores = np.array([content_score(image.tobytes()) for image in images])
    return ArrayPictures(name, images, labels_of(labels, name, names=classes), scores, most)
