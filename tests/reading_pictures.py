"""What the tests of pictures look at: their pixels, and what was said when they were opened."""

import logging

import numpy as np


def pixels_of(sample):
    """uint8: what the normalisation to [-1, 1] came from."""
    return np.rint((sample["images"] * 0.5 + 0.5) * 255).astype(np.uint8)


def said(caplog, call):
    with caplog.at_level(logging.INFO, "jdp"):
        result = call()
    return result, caplog.text
