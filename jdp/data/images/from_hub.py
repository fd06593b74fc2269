"""Pictures that `datasets` reads: rows with a column of encoded pictures and a column of labels.

A picture is in its row, or in a file that the row names. Reading a sample reads either by random access.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdp.base.errors import UserError
from jdp.base.user_path import check_regular
from jdp.data.held_out import ends_score
from jdp.data.images.decode import Pictures
from jdp.data.labels import labels_of
from jdp.data.sources.files import unreadable
from jdp.data.sources.hub import hub_data, optional

LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")


@dataclass(frozen=True, eq=False, kw_only=True)
class HubPictures(Pictures):
    """Pictures in rows."""

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
    """Return the pictures of a split.

    Args:
        source: "hf:…".
        image: the column of pictures; None: the only one.
        label: the column of labels; None: the only column of classes, or a column with a usual name.
        classes: class names that number the labels; None: those of the data set.
    """
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
    """Return the column to read. Raises ValueError if it does not exist, or the choice is ambiguous."""
    if given in columns:
        return given
    if given is None and len(found) == 1:
        return found[0]
    problem = f'no column "{given}"' if given else f"several: {', '.join(found)}" if found else "none that is known"
    raise UserError(
        f"a column of {what}s must be named, or be the only one; given {problem}, in {name} with {', '.join(columns)}: "
        f'name it, {what} = "…" (in an experiment file {key})'
    )
