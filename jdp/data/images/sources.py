"""Open the pictures of a source, to split later, or of a training and a held-out source.

Pictures may be arrays: an .npz of "images" and "labels", or scikit-learn's handwritten digits (NIST's, reduced by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998). Or `datasets` reads rows with a column of encoded
pictures and a column of labels; a picture is in its row, or in a file that the row names.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.hub_source import HF
from jdp.base.user_path import check_regular, user_path
from jdp.data.arrays import labels_of
from jdp.data.held_out import content_score, ends_score
from jdp.data.images.decode import Pictures
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.files import read_by_datasets, unreadable
from jdp.data.sources.hub import hub_data, optional

DIGITS = "digits"
LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")


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
    return ArrayPictures(name=name, images=images, labels=labels_of(labels, name, names=classes), most=most)


def open_pictures(
    source: str | os.PathLike[str],
    image: str | None = None,
    label: str | None = None,
    *,
    classes: tuple[str, ...] | None = None,
) -> tuple[Pictures, int]:
    """Return the pictures of a source, numbered by its classes or the given ones, and their number of channels.

    `image` and `label` name the columns; None: chosen by type or name.
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


# Data sets that `datasets` reads.


@dataclass(frozen=True, eq=False, kw_only=True)
class HubPictures(Pictures):
    contents: Any  # a `pyarrow.ChunkedArray` of bytes; null if the picture is in a file
    paths: Any  # a `pyarrow.ChunkedArray` of the files' paths

    def name_of(self, index: int, /) -> str:
        return self.paths[index].as_py() or f"row {index}"

    def content(self, index: int, /) -> bytes:
        value = self.contents[index].as_py()
        if value is not None:
            return value
        path = self.paths[index].as_py()
        if path is None:
            raise OSError("the picture is missing (null)")
        return Path(path).read_bytes()

    def score(self, index: int, /) -> float:
        scalar = self.contents[index]
        if scalar.is_valid:
            return ends_score(optional("pyarrow", self.name).BufferReader(scalar.as_buffer()))
        path = self.paths[index].as_py()
        if path is None:
            raise UserError(f"every row must have a picture; given none in row {index} of {self.name}: remove the row")
        try:
            check_regular(path)
            with Path(path).open("rb") as file:
                return ends_score(file)
        except OSError as error:
            raise UserError(unreadable(error, Path(path))) from error


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
    labels = labels or [column for column in LABEL_NAMES if column in kinds]
    image = _chosen("image", "data.field", image, images, list(kinds), name)
    label = _chosen("label", "data.label", label, labels, list(kinds), name)
    if not len(data):
        raise UserError(f"a data set must have rows; given none in {name}: add data")
    encoded = data.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    pictures = (encoded if encoded._indices is None else encoded.flatten_indices()).data.table.column(image)
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


def _chosen(what: str, key: str, given: str | None, found: list[str], columns: list[str], name: str) -> str:
    if given in columns:
        return given
    if given is None and len(found) == 1:
        return found[0]
    problem = f'no column "{given}"' if given else f"several: {', '.join(found)}" if found else "none that is known"
    raise UserError(
        f"a column of {what}s must be named, or be the only one; given {problem}, in {name} with {', '.join(columns)}: "
        f'name it, {what} = "…" (in an experiment file {key})'
    )
