"""Pictures in tables: parquet and Arrow files with a column of encoded pictures and one of labels.

1. Choose the columns. Hugging Face `datasets` notes in a table's metadata which column holds pictures, which holds
   classes, and their names. Without the note, they are a column of bytes and a column named label.
2. Read them. An Arrow file is mapped into memory; of a parquet file these two columns are read, the pictures still
   encoded. Values are then taken by random access.
"""

import functools
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jdp.base.notices import notice
from jdp.base.shorten import cut
from jdp.data.held_out import ends_score
from jdp.data.images.decode import Pictures
from jdp.data.labels import labels_of
from jdp.data.sources.hub import HF
from jdp.data.sources.optional_packages import optional
from jdp.data.sources.tables import read_arrow

LABEL_NAMES = ("label", "labels", "fine_label", "class")


@dataclass(frozen=True, eq=False, kw_only=True)
class TablePictures(Pictures):
    """Pictures in columns of tables."""

    pictures: Any  # a column of bytes
    paths: Any  # a column of the files of pictures whose bytes are not in the table; or None
    files: tuple[str, ...]
    starts: tuple[int, ...]  # the first row of each of `files`

    def name_of(self, index: int, /) -> str:
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

    def score(self, index: int, /) -> float:
        scalar = self.pictures[index]
        if scalar.is_valid:
            buffer = memoryview(scalar.as_buffer())
            return ends_score(len(buffer), lambda start, stop: bytes(buffer[start:stop]))
        try:
            content = self.content(index)
        except OSError as error:
            raise ValueError(
                f"every row must have a picture; given {self.name_of(index)}: {error}; leave it out, or fix its file"
            ) from error
        return ends_score(len(content), lambda start, stop: content[start:stop])


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None: those that the table's note or their names and types point out."""

    image: str | None = None
    label: str | None = None


def file_table_pictures(
    files: Sequence[Path], name: str, columns: Columns, *, classes: tuple[str, ...] | None = None
) -> TablePictures:
    """Return the pictures of parquet and Arrow files with the same columns."""
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
    """Return the pictures of pyarrow tables."""
    pa, pc = optional("pyarrow", name), optional("pyarrow.compute", name)
    chosen = [_columns(table.schema, file, columns) for table, file in zip(tables, files, strict=True)]
    image = pa.chunked_array(
        [chunk for table, (key, _) in zip(tables, chosen, strict=True) for chunk in table[key].chunks],
        type=tables[0][chosen[0][0]].type,
    )
    values = [value for table, (_, key) in zip(tables, chosen, strict=True) for value in table[key].to_pylist()]
    starts = tuple(np.cumsum([0, *(len(table) for table in tables[:-1])]).tolist())
    if not len(image):
        raise ValueError(f"a table must have rows; given none in {name}: give some data")
    if None in values:
        raise ValueError(
            f"every row must have a label; given none for sample {values.index(None)} of {name}: leave it out"
        )
    labels = labels_of(values, name, names=classes or _class_names(tables[0].schema, chosen[0][1], name))
    made = functools.partial(TablePictures, name=name, labels=labels, files=files, starts=starts)
    if not pa.types.is_struct(image.type):
        return made(pictures=image, paths=None)
    names = {field.name for field in image.type}
    if "bytes" not in names:
        raise ValueError(
            f"a column of images must have their bytes; given {', '.join(sorted(names))} in {name}: write the table "
            "again, with the files embedded"
        )
    paths = pc.struct_field(image, "path") if "path" in names else None
    pictures = pc.struct_field(image, "bytes")
    if paths is not None and pictures.null_count:
        _report_files_outside(paths.filter(pc.is_null(pictures)).to_pylist(), name)
    return made(pictures=pictures, paths=paths)


def _report_files_outside(paths: Sequence[str | None], name: str) -> None:
    """Report pictures that are files outside the table's folder: a table may name any file of this disk."""
    folder = Path(name.removeprefix(HF)).absolute()
    folder = folder if folder.is_dir() else folder.parent
    outside = [
        path for path in paths if path and not Path(os.path.normpath(Path(path).absolute())).is_relative_to(folder)
    ]
    if outside:
        notice(
            f"{name}: {len(outside)} pictures are files outside of {folder} that it names, such as {cut(outside[0])}"
        )


def _columns(schema: Any, name: str, columns: Columns) -> tuple[str, str]:
    """Return the column of pictures and the column of labels; `name` is the file's."""
    noted = _noted(schema, name)
    pictures = [key for key in schema.names if noted.get(key, {}).get("_type") == "Image"]
    pictures = pictures or [key for key in schema.names if _holds_bytes(schema.field(key).type)]
    labels = [key for key in schema.names if noted.get(key, {}).get("_type") == "ClassLabel"]
    labels = labels or [key for key in schema.names if key in LABEL_NAMES]
    return _one(columns.image, pictures, "image", schema, name), _one(columns.label, labels, "label", schema, name)


def _one(chosen: str | None, candidates: list[str], role: str, schema: Any, name: str) -> str:
    if chosen is not None and chosen in schema.names:
        return chosen
    if chosen is None and len(candidates) == 1:
        return candidates[0]
    given = f'"{chosen}"' if chosen is not None else f"{len(candidates)} that may be it"
    raise ValueError(
        f"a table must have a column of {role}s; given {given} in {name}, whose columns are {', '.join(schema.names)}: "
        f'name the one that is meant, {role} = "…" (in an experiment file data.'
        f"{'field' if role == 'image' else 'label'})"
    )


def _holds_bytes(kind: Any) -> bool:
    pt = optional("pyarrow.types", "a column of bytes")
    if pt.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def _class_names(schema: Any, column: str, name: str) -> tuple[str, ...] | None:
    names = _noted(schema, name).get(column, {}).get("names")
    if names is not None and not (isinstance(names, list) and all(isinstance(entry, str) for entry in names)):
        raise ValueError(f"the names of classes must be a list of text; given {cut(repr(names))} in {name}: fix them")
    return tuple(names) if names else None


def _noted(schema: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the note of each column that `datasets` wrote into the table's metadata."""
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(written)["info"]["features"] if written else {}
        if all(isinstance(note, dict | list) for note in features.values()):
            return {column: note if isinstance(note, dict) else {} for column, note in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(
        f"a table's note for Hugging Face datasets must be JSON that describes its columns; given "
        f"{cut(repr(written))} in {name}: write the table again"
    )
