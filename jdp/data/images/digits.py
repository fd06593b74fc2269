"""The handwritten digits that come with scikit-learn: 1,797 grey pictures of 8x8, ten classes; no download.

They are NIST's, gathered and shrunk by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998).
"""

import numpy as np

from jdp.data.images.from_arrays import ArrayPictures, array_pictures
from jdp.data.sources.optional_packages import optional

DIGITS = "digits"
_WHITE = 16.0


def digits() -> ArrayPictures:
    """All 1,797, values 0 to 16.

    Raises:
      ValueError: scikit-learn is not installed.
    """
    load_digits = optional("sklearn.datasets", f'the data set "{DIGITS}"', extra="test").load_digits
    images, numbers = load_digits(return_X_y=True)
    return array_pictures(images.reshape(-1, 8, 8).astype(np.uint8), numbers, DIGITS, most=_WHITE)
