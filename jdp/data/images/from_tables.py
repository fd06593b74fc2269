"""Pictures in tables: parquet and Arrow files with a column of encoded pictures and one of labels.

1. The columns: what Hugging Face `datasets` notes of a table's own columns says which holds pictures, which classes and
   what these are called; else a column of bytes and a column named label.
2. Their values, by random access. An Arrow file is mapped into memory; of a parquet file these two columns are read,
   the pictures still encoded.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.core.notices import notice
from jdp.core.toml import cut
from jdp.data.held_out import ends_score
from jdp.data.labels import Labels, labels_of
from jdp.data.sources.arrow_files import read_arrow
from jdp.data.sources.hub import HF
from jdp.data.sources.optional_packages import optional

TABLE_SUFFIXES = (".parquet", ".arrow")
_LABEL_NAMES = ("label", "labels", "fine_label", "class")


@dataclass(frozen=True, eq=False)
class TablePictures:
    """See `jdp.data.images.decode.Pictures`.

    Attributes:
      pictures: a column of bytes.
      paths: a column of where to read a picture whose bytes are not there; or None.
      starts: the first row of each of `files`.
    """

    name: str
    pictures: Any
    paths: Any
    labels: Labels
    files: tuple[str, ...]
    starts: tuple[int, ...]
    most: float = 255.0

    @cached_property
    def _scores(self) -> NDArray[np.float64]:
        return np.fromiter(map(self._score, range(len(self.pictures))), np.float64, len(self.pictures))

    @property
    def scores(self) -> NDArray[np.float64]:
        return self._scores

    def where(self, index: int, /) -> str:
        file = bisect_right(self.starts, index) - 1
        return f"{self.files[file]}, row {index - self.starts[file]}"

    def content(self, index: int, /) -> bytes:
        value = self.pictures[index].as_py()
        if value is not None:
            return value
        path = self.paths[index].as_py() if self.paths is not None else None
        if path is None:
            raise OSError("the picture is missing (null)")
        return Path(path).read_bytes()

    def _score(self, index: int) -> float:
        scalar = self.pictures[index]
        if scalar.is_valid:
            buffer = memoryview(scalar.as_buffer())
            return ends_score(len(buffer), lambda start, stop: bytes(buffer[start:stop]))
        try:
            content = self.content(index)
        except OSError as error:
            raise ValueError(
                f"every row must have a picture, got {self.where(index)}: {error}; leave the row out, or mend its file"
            ) from error
        return ends_score(len(content), lambda start, stop: content[start:stop])


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None finds them."""

    image: str | None = None
    label: str | None = None


def file_table_pictures(
    files: Sequence[Path], name: str, columns: Columns, *, classes: tuple[str, ...] | None = None
) -> TablePictures:
    """The pictures of parquet and Arrow files with the same columns.

    Raises:
      ValueError: pyarrow is not installed; a file that cannot be read; columns that are not there or not clear; labels
        that are no classes.
    """
    tables = [read_arrow(file, lambda schema, file=file: _columns(schema, str(file), columns)) for file in files]
    return table_pictures(tables, tuple(map(str, files)), name, columns, classes=classes)


def table_pictures(
    tables: Sequence[Any],
    files: tuple[str, ...],
    name: str,
    columns: Columns,
    *,
    classes: tuple[str, ...] | None = None,
) -> TablePictures:
    """The pictures of pyarrow tables; `files` says what to call each."""
    pa, pc = optional("pyarrow", name), optional("pyarrow.compute", name)
    found = [_columns(table.schema, file, columns) for table, file in zip(tables, files, strict=True)]
    image = pa.chunked_array(
        [chunk for table, (key, _) in zip(tables, found, strict=True) for chunk in table[key].chunks],
        type=tables[0][found[0][0]].type,
    )
    values = [value for table, (_, key) in zip(tables, found, strict=True) for value in table[key].to_pylist()]
    starts = tuple(np.cumsum([0, *(len(table) for table in tables[:-1])]).tolist())
    if not len(image):
        raise ValueError(f"a table must have rows, got none in {name}: give some data")
    if None in values:
        raise ValueError(
            f"every row must have a label, got none for sample {values.index(None)} of {name}: leave it out"
        )
    labels = labels_of(values, name, names=classes or _class_names(tables[0].schema, found[0][1], name))
    if not pa.types.is_struct(image.type):
        return TablePictures(name, image, None, labels, files, starts)
    names = {field.name for field in image.type}
    if "bytes" not in names:
        raise ValueError(
            f"a column of images must have their bytes, got {', '.join(sorted(names))} in {name}: write the table "
            "again, with the files embedded"
        )
    paths = pc.struct_field(image, "path") if "path" in names else None
    pictures = pc.struct_field(image, "bytes")
    if paths is not None and pictures.null_count:
        _say_what_lies_outside(paths.filter(pc.is_null(pictures)).to_pylist(), name)
    return TablePictures(name, pictures, paths, labels, files, starts)


def _say_what_lies_outside(paths: Sequence[str | None], name: str) -> None:
    """A table may name any file of this disk for a picture: that is read, and said."""
    folder = Path(name.removeprefix(HF)).absolute()
    folder = folder if folder.is_dir() else folder.parent
    outside = [
        path for path in paths if path and not Path(os.path.normpath(Path(path).absolute())).is_relative_to(folder)
    ]
    if outside:
        notice(
            f"{name}: {len(outside)} pictures are files outside of {folder} that it names, such as {cut(outside[0])}"
        )


def _columns(schema: Any, where: str, columns: Columns) -> tuple[str, str]:
    """The column of pictures and the column of labels."""
    kinds = _noted(schema, where)
    images = [name for name in schema.names if kinds.get(name, {}).get("_type") == "Image"]
    images = images or [name for name in schema.names if _holds_bytes(schema.field(name).type)]
    labels = [name for name in schema.names if kinds.get(name, {}).get("_type") == "ClassLabel"]
    labels = labels or [name for name in schema.names if name in _LABEL_NAMES]
    return _one(columns.image, images, "image", schema, where), _one(columns.label, labels, "label", schema, where)


def _one(chosen: str | None, found: list[str], role: str, schema: Any, where: str) -> str:
    if chosen is not None and chosen in schema.names:
        return chosen
    if chosen is None and len(found) == 1:
        return found[0]
    given = f'"{chosen}"' if chosen is not None else f"{len(found)} that may be it"
    raise ValueError(
        f"a table must have a column of {role}s, got {given} in {where}, whose columns are {', '.join(schema.names)}: "
        f'say which, {role} = "…" (in an experiment file data.{"field" if role == "image" else "label"})'
    )


def _holds_bytes(kind: Any) -> bool:
    pt = optional("pyarrow.types", "a column of bytes")
    if pt.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def _class_names(schema: Any, column: str, where: str) -> tuple[str, ...] | None:
    names = _noted(schema, where).get(column, {}).get("names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"the names of classes must be a list of text, got {cut(repr(names))} in {where}: mend them")
    return tuple(names) if names else None


def _noted(schema: Any, where: str) -> dict[str, dict[str, Any]]:
    """What `datasets` wrote of each column into the table's metadata."""
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        noted = json.loads(written)["info"]["features"] if written else {}
        if all(isinstance(kind, dict | list) for kind in noted.values()):
            return {name: kind if isinstance(kind, dict) else {} for name, kind in noted.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(
        f"a table's note for Hugging Face datasets must be JSON that describes its columns, got "
        f"{cut(repr(written))} in {where}: write the table again"
    )
