"""Rows of a table file: parquet, Arrow (IPC file or stream) and JSON, one object a line.

`read_table` reads the columns that are asked for into memory; a `Table` gives them as Python values, as text or as
lists of token ids, and tells the place of each row for errors. A file that is not whole is a ValueError that names it.
"""

import codecs
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from jdp.data.sources.arrow_files import read_arrow
from jdp.data.sources.compressed import plain_name, read_bytes
from jdp.data.sources.optional_packages import optional

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
ARROW_SUFFIXES = (".arrow", ".feather")
TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES, *JSON_SUFFIXES)


@dataclass(frozen=True, eq=False)
class Table:
    """Some columns of a file, in memory.

    Attributes:
      where: the file, or whatever else they are from.
      unit: what a row is called there: "row", counted from 0, or "line", counted from 1.
      numbers: of the rows: where each stands.
      columns: name -> a list of Python values, or a `pyarrow.ChunkedArray`.
    """

    where: str
    unit: str
    numbers: Sequence[int]
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        """Where a row is from, for errors: "data.jsonl, line 7"."""
        return f"{self.where}, {self.unit} {self.numbers[row]}"

    def values(self, field: str) -> list[Any]:
        """A column as Python values; None where there is none."""
        column = self.columns[field]
        return column if isinstance(column, list) else column.to_pylist()

    def texts(self, field: str) -> list[bytes]:
        """A column of text, in UTF-8 (an Arrow column of bytes is taken as it is).

        Raises:
          ValueError: a row that is not text.
        """
        column = self.columns[field]
        if isinstance(column, list):
            values = cast("list[Any]", column)
            return [self._utf8(value, row, field) for row, value in enumerate(values)]
        pyarrow = optional("pyarrow", self.where)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not (_is_text(pyarrow, column.type) or pyarrow.types.is_null(column.type)):
            raise ValueError(_not_text(self.where, f"type {column.type}", field))
        if column.null_count:
            raise ValueError(_not_text(self.place(_first_null(column)), "nothing (null)", field))
        return column.cast(pyarrow.large_binary()).to_pylist()

    def integer_lists(self, field: str) -> list[NDArray[Any]]:
        """A column of lists of whole numbers: [n] of some integer dtype each.

        Raises:
          ValueError: a row that is something else.
        """
        column = self.columns[field]
        if isinstance(column, list):
            values = cast("list[Any]", column)
            return [self._integers(value, row, field) for row, value in enumerate(values)]
        pyarrow = optional("pyarrow", self.where)
        kind = column.type
        is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        if not (is_list or pyarrow.types.is_fixed_size_list(kind)) or not pyarrow.types.is_integer(kind.value_type):
            raise ValueError(_not_integers(self.where, f"type {kind}", field))
        if column.null_count:
            raise ValueError(_not_integers(self.place(_first_null(column)), "nothing (null)", field))
        return self._split(column.cast(pyarrow.large_list(kind.value_type)), field)

    def _split(self, column: Any, field: str) -> list[NDArray[Any]]:
        lists: list[NDArray[Any]] = []
        for chunk in column.chunks:
            offsets, flat = chunk.offsets.to_numpy(), chunk.values
            flat = flat.slice(offsets[0], offsets[-1] - offsets[0])
            if flat.null_count:
                row = len(lists) + int(np.searchsorted(offsets - offsets[0], _first_null(flat), side="right")) - 1
                raise ValueError(_not_integers(self.place(row), "a list with nothing (null) in it", field))
            lists += np.split(flat.to_numpy(zero_copy_only=False), offsets[1:-1] - offsets[0]) if len(chunk) else []
        return lists

    def _utf8(self, value: Any, row: int, field: str) -> bytes:
        if not isinstance(value, str):
            raise ValueError(_not_text(self.place(row), json.dumps(value)[:40], field))
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            what = f"half a surrogate pair at character {error.start}"
            raise ValueError(_not_text(self.place(row), what, field)) from error

    def _integers(self, value: Any, row: int, field: str) -> NDArray[Any]:
        try:
            array = np.asarray(value) if isinstance(value, list) else np.zeros((), object)
        except ValueError:  # lists of unequal length
            array = np.zeros((), object)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(_not_integers(self.place(row), json.dumps(value)[:40], field))
        return array.astype(np.int64) if not array.size else array


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of rows, by its name."""
    return plain_name(path).endswith(TABLE_SUFFIXES)


def read_table(path: Path, fields: Sequence[str]) -> Table:
    """Columns of a parquet, Arrow or JSON file, which may be compressed (.gz, .zst).

    JSON is one object a line; a .json file may also be one array of objects, whose elements are then its rows.

    Raises:
      ValueError: a file that cannot be read or is not whole, a column it does not have, a line that is no JSON object.
    """
    if plain_name(path).endswith(JSON_SUFFIXES):
        return _read_json(path, fields)

    def asked(schema: Any) -> Sequence[str]:
        check_fields(fields, schema.names, str(path))
        return fields

    return arrow_table(read_arrow(path, asked), fields, str(path))


def arrow_table(table: Any, fields: Sequence[str], where: str) -> Table:
    """The same of a `pyarrow.Table` that is in memory already."""
    check_fields(fields, table.column_names, where)
    return Table(where, "row", range(table.num_rows), {field: table.column(field) for field in fields})


def check_fields(fields: Sequence[str], there: Sequence[str], where: str) -> None:
    """Raises ValueError where a column is asked for that is not there; names those that are."""
    for field in fields:
        if field not in there:
            shown = ", ".join(there[:20]) + ", …" * (len(there) > 20) if there else "none"
            raise ValueError(f'data must have the field "{field}", not found in {where}: give one that it has: {shown}')


def _read_json(path: Path, fields: Sequence[str]) -> Table:
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    if plain_name(path).endswith(".json") and content.lstrip()[:1] == b"[":
        rows = _parse(content, str(path))
        unit, numbers = "row", list(range(len(rows)))
    else:  # a raw line feed cannot stand inside of JSON text, and no other byte of UTF-8 looks like one
        lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        rows = [_parse(line, f"{path}, line {number}") for number, line in lines]
        unit, numbers = "line", [number for number, _ in lines]
    table = Table(str(path), unit, numbers, {})
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f'a line of JSON must be an object, as {{"text": …}}, got {json.dumps(row)[:40]} in '
                f"{table.place(place)}: mend it"
            )
        check_fields(fields, list(cast("dict[str, Any]", row)), table.place(place))
    return Table(str(path), unit, numbers, {field: [row[field] for row in rows] for field in fields})


def _parse(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8, got {error.object[error.start]:#04x} at byte {error.start} of {where}: convert it"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"JSON must be valid, got {content[:40]!r} … in {where}: {error}; mend it") from error


def _is_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return text or types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _first_null(column: Any) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _not_text(where: str, given: str, field: str) -> str:
    return f'the field "{field}" must be text, got {given} in {where}: give another field, or leave that out'


def _not_integers(where: str, given: str, field: str) -> str:
    return f'the field "{field}" must be lists of token ids, got {given} in {where}: give another field, or mend it'
