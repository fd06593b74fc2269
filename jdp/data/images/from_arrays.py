"""Pictures that are arrays already: an .npz of "images" and "labels", or the handwritten digits of scikit-learn.

The digits are 1,797 grey pictures of 8x8 in ten classes, without a download: NIST's, gathered and shrunk by E. Alpaydin
and C. Kaynak (UCI Machine Learning Repository, 1998).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.data.held_out import content_score
from jdp.data.labels import Labels, labels_of
from jdp.data.sources.optional_packages import optional

DIGITS = "digits"


@dataclass(frozen=True, eq=False)
class ArrayPictures:
    """Pictures in memory, uint8 [pictures, height, width, channels]; see `jdp.data.images.decode.Pictures`."""

    name: str
    images: NDArray[np.uint8]
    labels: Labels
    scores: NDArray[np.float64]
    most: float = 255.0

    def name_of(self, index: int, /) -> str:
        """Return what to call a picture in errors."""
        return f"image {index} of {self.name}"

    def content(self, index: int, /) -> NDArray[np.uint8]:
        """Return a picture: uint8 [height, width, channels]."""
        return self.images[index]


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
        raise ValueError(
            f"images must be uint8 [images, height, width] or [images, height, width, channels]; given {images.dtype} "
            f"{list(images.shape)} in {name}: convert them, or give normalised ones to array_data"
        )
    images = images if images.ndim == 4 else images[..., None]
    scores = np.array([content_score(image.tobytes()) for image in images])
    return ArrayPictures(name, images, labels_of(labels, name, names=classes), scores, most)


def digits() -> ArrayPictures:
    """Return the 1,797 digits of scikit-learn, values 0 to 16. Raises ValueError if it is not installed."""
    load_digits = optional("sklearn.datasets", f'the data set "{DIGITS}"', extra="test").load_digits
    images, numbers = load_digits(return_X_y=True)
    return array_pictures(images.reshape(-1, 8, 8).astype(np.uint8), numbers, DIGITS, most=16.0)
