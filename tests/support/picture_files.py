"""Pictures that the tests of image sources share, in files of every kind, and what is looked at of their samples."""

import io

import numpy as np
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)
CLASSES = ("ape", "cat", "zebra")
LABELS = [number % 3 for number in range(30)]


def encoded(pixels, kind="PNG", mode=None, **options):
    file = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(file, kind, **options)
    return file.getvalue()


PNGS = [encoded(values) for values in PIXELS]


def write_pictures(folder, pixels=PIXELS):
    """Picture i is of class i % 3, named by its number."""
    for number, values in enumerate(pixels):
        path = folder / CLASSES[number % 3] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(values))
    return folder


def folder_of(folder):
    """A source of a folder of classes."""
    return f"hf:imagefolder:{folder}"


def samples_of(data):
    return [side[index] for side in (data.train, data.heldout) for index in range(len(side))]


def pixels_of(sample):
    """Undo the normalisation to [-1, 1]: uint8."""
    return np.rint((sample["images"] * 0.5 + 0.5) * 255).astype(np.uint8)
