"""Open the pictures of a source, which are split later, or of two that are split already."""

import os
from dataclasses import dataclass
from pathlib import Path

from jdp.base.hub_source import HF
from jdp.base.user_path import user_path
from jdp.data.images.decode import Pictures
from jdp.data.images.from_arrays import DIGITS, array_pictures, digits
from jdp.data.images.from_hub import hub_pictures
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.files import read_by_datasets

PathLike = str | os.PathLike[str]
Classes = tuple[str, ...] | None


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None: those whose types or names point them out."""

    image: str | None = None
    label: str | None = None


def open_pictures(source: PathLike, columns: Columns, classes: Classes = None) -> tuple[Pictures, int]:
    """Return the pictures of a source, and the channels that they have; `classes` number the labels."""
    if source == DIGITS:
        return digits(), 1
    if str(source).startswith(HF):
        return hub_pictures(str(source), columns.image, columns.label, classes=classes), 3
    path = user_path(source)
    if path.suffix != ".npz":
        builder = read_by_datasets(path, Path("1.png") if path.is_dir() else None)
        raise ValueError(
            f'images must be "{DIGITS}", an .npz file or "{HF}…"; given {source}, looked for at {path.absolute()}: '
            f"{builder}"
        )
    arrays, name = read_arrays(path)
    if missing := {"images", "labels"} - arrays.keys():
        raise ValueError(
            f"an .npz of images must have images and labels; given {', '.join(arrays)} in {name}: name the arrays so "
            f"(missing: {', '.join(sorted(missing))})"
        )
    pictures = array_pictures(arrays["images"], arrays["labels"], name, classes=classes)
    return pictures, pictures.images.shape[3]
