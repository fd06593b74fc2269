"""What the tests of pictures look at: their pixels, and the notices when they were opened."""

import logging

import numpy as np


def pixels_of(sample):
    """Undo the normalisation to [-1, 1]: uint8."""
    return np.rint((sample["images"] * 0.5 + 0.5) * 255).astype(np.uint8)


def with_notices(caplog, call):
    """Return what a call returns, and the notices that it gave."""
    with caplog.at_level(logging.INFO, "jdp"):
        result = call()
    return result, caplog.text
