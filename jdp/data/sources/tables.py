"""Rows of a table file: parquet, Arrow (IPC file or stream) and JSON, one object a line.

`read_arrow` reads columns of parquet and Arrow files as a `pyarrow.Table`. `table_pieces` reads columns of any table
file, some rows at a time. Each piece is a `Table`, which returns them as text or as lists of token ids, and names the
file and row in errors. An incomplete file is refused, by the last piece at the latest.
"""

import codecs
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from jdp.base.shorten import cut
from jdp.base.user_path import check_regular
from jdp.data.sources.compressed import (
    ALWAYS_READ,
    check_growth,
    is_compressed,
    plain_name,
    read_bytes,
    stream_bytes,
    unreadable,
)
from jdp.data.sources.optional_packages import optional

ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_IDS = "lists of token ids"
Field = str | tuple[str, ...]
"""A column's name, or several of which the first that is present is read."""
_PIECE_ROWS = 1024  # of a table, read at a time
_PIECE_BYTES = 2**22  # of lines of JSON, or of columns, parsed at a time
_DECODED_ROWS = 256  # of parquet at a time: one value, kept once in a dictionary, may be that of every row
_DENSE = 30  # times the bytes in a file: what text and numbers become at most when they are decompressed


@dataclass(frozen=True, eq=False)
class Table:
    """Some columns of a file, in memory."""

    name: str  # of the file or data set
    unit: str  # of the numbers: "row", counted from 0, or "line", counted from 1
    numbers: Sequence[int]  # the number of each row in the file
    columns: Mapping[Field, Any]  # field -> a list of Python values, or a `pyarrow.ChunkedArray`; None: not there

    def name_of(self, row: int) -> str:
        """Return a row's name for errors: "data.jsonl, line 7"."""
        return f"{self.name}, {self.unit} {self.numbers[row]}"

    def texts(self, field: str) -> list[bytes]:
        """Return a column of text, in UTF-8 (an Arrow column of bytes is returned as it is)."""
        column = self.columns[field]
        if isinstance(column, list):
            return [self._utf8(value, row, field) for row, value in enumerate(cast("list[Any]", column))]
        pyarrow = optional("pyarrow", self.name)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kinds = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
        if not any(getattr(pyarrow.types, f"is_{kind}")(column.type) for kind in kinds):
            raise _wrong(self.name, f"type {column.type}", field, "text")
        self._check_nulls(column, field, "text")
        return column.cast(pyarrow.large_binary()).to_pylist()

    def values(self, field: Field) -> list[Any]:
        """Return a column as Python values."""
        column = self.columns[field]
        if column is None:
            return [None] * len(self.numbers)
        return cast("list[Any]", column if isinstance(column, list) else column.to_pylist())

    def integer_lists(self, field: str) -> list[NDArray[Any]]:
        """Return a column of lists of integers: [n] of some integer dtype each."""
        column = self.columns[field]
        if isinstance(column, list):
            return [self._integers(value, row, field) for row, value in enumerate(cast("list[Any]", column))]
        pyarrow = optional("pyarrow", self.name)
        kind = column.type
        is_list = any(getattr(pyarrow.types, f"is_{name}")(kind) for name in ("list", "large_list", "fixed_size_list"))
        if not is_list or not pyarrow.types.is_integer(kind.value_type):
            raise _wrong(self.name, f"type {kind}", field, _IDS)
        self._check_nulls(column, field, _IDS)
        return self._split(column.cast(pyarrow.large_list(kind.value_type)), field)

    def _check_nulls(self, column: Any, field: str, rule: str) -> None:
        if column.null_count:
            raise _wrong(self.name_of(_first_null(column)), "nothing (null)", field, rule)

    def _split(self, column: Any, field: str) -> list[NDArray[Any]]:
        lists: list[NDArray[Any]] = []
        for chunk in column.chunks:
            offsets, flat = chunk.offsets.to_numpy(), chunk.values
            flat = flat.slice(offsets[0], offsets[-1] - offsets[0])
            if flat.null_count:
                row = len(lists) + int(np.searchsorted(offsets - offsets[0], _first_null(flat), side="right")) - 1
                raise _wrong(self.name_of(row), "a list with nothing (null) in it", field, _IDS)
            lists += np.split(flat.to_numpy(zero_copy_only=False), offsets[1:-1] - offsets[0]) if len(chunk) else []
        return lists

    def _utf8(self, value: Any, row: int, field: str) -> bytes:
        if not isinstance(value, str):
            raise _wrong(self.name_of(row), json.dumps(value)[:40], field, "text")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            given = f"half a surrogate pair at character {error.start}"
            raise _wrong(self.name_of(row), given, field, "text") from error

    def _integers(self, value: Any, row: int, field: str) -> NDArray[Any]:
        try:
            array = np.asarray(value) if isinstance(value, list) else np.zeros((), object)
        except ValueError:  # lists of unequal length
            array = np.zeros((), object)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise _wrong(self.name_of(row), json.dumps(value)[:40], field, _IDS)
        return array.astype(np.int64) if not array.size else array


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return True if a file holds rows, by its name."""
    return plain_name(path).endswith((*ARROW_SUFFIXES, *JSON_SUFFIXES))


def table_pieces(path: Path, fields: Sequence[Field], maybe: Sequence[str] = ()) -> Iterator[Table]:
    """Yield columns of a parquet, Arrow or JSON file, which may be compressed (.gz, .zst), some rows at a time.

    The columns in `maybe` need not be there: their values are then None.

    JSON is one object a line; a .json file may also be one array of objects, its rows. Such an array is read at once,
    and so is a compressed file of parquet or Arrow.
    """
    if plain_name(path).endswith(JSON_SUFFIXES):
        yield from _json_pieces(path, fields, maybe)
        return
    file, schema = _opened(path)
    there = [field for field in maybe if field in schema.names]
    names = _chosen(schema, [*(present_field(field, schema.names, str(path)) for field in fields), *there], path)
    yield from arrow_pieces(_pieces(file, names, path), fields, str(path), maybe)


def arrow_pieces(
    tables: Iterable[Any], fields: Sequence[Field], name: str, maybe: Sequence[str] = ()
) -> Iterator[Table]:
    """Yield columns of `pyarrow.Table`s that follow one another in `name`, some rows at a time."""
    row = 0
    for table in tables:
        names: dict[Field, str | None] = {field: field if field in table.column_names else None for field in maybe}
        names |= {field: present_field(field, table.column_names, name) for field in fields}
        for start in range(0, table.num_rows, _PIECE_ROWS):
            piece = table.slice(start, _PIECE_ROWS)
            numbers = range(row + start, row + start + piece.num_rows)
            columns = {field: column and piece.column(column) for field, column in names.items()}
            yield Table(name, "row", numbers, columns)
        row += table.num_rows


def read_arrow(path: Path, choose: Callable[[Any], Sequence[str]]) -> Any:
    """Return columns of a parquet or Arrow file as a `pyarrow.Table`; an uncompressed Arrow file is mapped."""
    file, schema = _opened(path)
    chosen = _chosen(schema, choose(schema), path)
    if hasattr(file, "iter_batches"):
        pieces = list(_pieces(file, chosen, path))
        return optional("pyarrow", str(path)).concat_tables(pieces) if pieces else schema.empty_table().select(chosen)
    try:
        table = file.read_all().select(chosen)
        table.validate(full=True)  # offsets that lead out of the file would end the process, not raise
    except Exception as error:
        raise ValueError(_incomplete(path, error)) from error
    check_growth(table.nbytes, path)
    return table


def _opened(path: Path) -> tuple[Any, Any]:
    """Return a `ParquetFile` or a reader of the IPC format, and the file's schema."""
    source = _open(path)
    try:
        if plain_name(path).endswith(".parquet"):
            parquet_file = optional("pyarrow.parquet", str(path)).ParquetFile
            file = parquet_file(source, page_checksum_verification=True, pre_buffer=False)
            schema = file.schema_arrow
        else:
            file = _ipc_file(source, path)
            schema = file.schema
        list(_column_names(schema, optional("pyarrow.types", str(path))))
    except Exception as error:  # a name that is no UTF-8 is not one of pyarrow's own exceptions
        raise ValueError(_incomplete(path, error)) from error
    return file, schema


def _chosen(schema: Any, fields: Iterable[str], path: Path) -> list[str]:
    """Return each field once. Raises ValueError for one that the schema has twice."""
    chosen, names = list(dict.fromkeys(fields)), list(schema.names)
    if twice := next((name for name in chosen if names.count(name) > 1), None):
        raise ValueError(
            f'a table must have a column once; given "{cut(twice)}" {names.count(twice)} times in {path}: rename one'
        )
    return chosen


def _pieces(file: Any, chosen: list[str], path: Path) -> Iterator[Any]:
    """Yield the columns as `pyarrow.Table`s, some rows each. Raises ValueError for an incomplete or a huge file."""
    tables, total = _tables(file, chosen, path), 0
    while piece := _next_piece(tables):
        total += sum(table.nbytes for table in piece)
        check_growth(total, path)
        yield piece[0] if len(piece) == 1 else optional("pyarrow", str(path)).concat_tables(piece).combine_chunks()


def _next_piece(tables: Iterator[Any]) -> list[Any]:
    """Return the next tables that have `_PIECE_ROWS` or `_PIECE_BYTES` together."""
    piece, rows, size = list[Any](), 0, 0
    while rows < _PIECE_ROWS and size < _PIECE_BYTES and (table := next(tables, None)) is not None:
        piece.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
    return piece


def _tables(file: Any, chosen: list[str], path: Path) -> Iterator[Any]:
    """Yield the columns as `pyarrow.Table`s, as many rows each as are decoded at a time."""
    from_batches = optional("pyarrow", str(path)).Table.from_batches
    if hasattr(file, "iter_batches"):
        rows = [_rows_at_once(file.metadata.row_group(group), chosen, path) for group in range(file.num_row_groups)]
        batches = itertools.chain.from_iterable(
            file.iter_batches(batch_size=most, row_groups=[group], columns=chosen) for group, most in enumerate(rows)
        )
    elif hasattr(file, "get_batch"):
        batches = map(file.get_batch, range(file.num_record_batches))
    else:
        batches = iter(file)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            table = from_batches([batch]).select(chosen)
            table.validate(full=True)  # offsets that lead out of the file would end the process, not raise
        except Exception as error:
            raise ValueError(_incomplete(path, error)) from error
        yield from _without_dictionaries(table, path)


def _without_dictionaries(table: Any, path: Path) -> Iterator[Any]:
    """Yield a table with the values of its columns' dictionaries in their places, a few rows at a time."""
    pyarrow = optional("pyarrow", str(path))
    plain = [column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type for column in table]
    if plain == table.schema.types:
        yield table
        return
    schema = pyarrow.schema(list(zip(table.column_names, plain, strict=True)), metadata=table.schema.metadata)
    for start in range(0, table.num_rows, _DECODED_ROWS):
        yield table.slice(start, _DECODED_ROWS).cast(schema)


def _rows_at_once(group: Any, chosen: list[str], path: Path) -> int:
    """Return how many rows of a parquet file's group to decode at a time: fewer where a value may be large."""
    columns = [group.column(index) for index in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.split(".")[0] in chosen]
    stored = sum(column.total_compressed_size for column in columns)
    unpacked = sum(column.total_uncompressed_size for column in columns)
    numbers = sum(4 * column.num_values for column in columns if "BYTE_ARRAY" not in column.physical_type)
    check_growth(max(unpacked, numbers), path)
    return _DECODED_ROWS if unpacked <= _DENSE * stored else max(1, min(_DECODED_ROWS, ALWAYS_READ // unpacked))


def present_field(field: Field, present: Sequence[str], name: str) -> str:
    """Return the name of the column that is read. Raises ValueError with those that are present, if it is not."""
    wanted = (field,) if isinstance(field, str) else field
    for each in wanted:
        if each in present:
            return each
    shown = ", ".join(present[:20]) + ", …" * (len(present) > 20) if present else "none"
    words = " or ".join(f'"{each}"' for each in wanted)
    raise ValueError(f"data must have the field {words}; given {name} without it: give one that it has: {shown}")


def _open(path: Path) -> Any:
    """Return a pyarrow file: mapped into memory; if it is compressed or empty, read into memory."""
    pyarrow = optional("pyarrow", str(path))
    try:
        check_regular(path)
        if not is_compressed(path) and path.stat().st_size > 0:
            return pyarrow.memory_map(str(path))
    except OSError as error:
        raise ValueError(unreadable(error, path)) from error
    return pyarrow.BufferReader(read_bytes(path))


def _ipc_file(source: Any, path: Path) -> Any:
    """Open the IPC format: a file, with a magic word and a footer, or a stream, as `datasets` writes it."""
    ipc, start = optional("pyarrow.ipc", str(path)), source.read_buffer(6).to_pybytes()
    source.seek(0)
    return ipc.open_file(source) if start == b"ARROW1" else ipc.open_stream(source)


def _column_names(fields: Iterable[Any], types: Any) -> Iterator[str]:
    """Yield the columns' names; those of fields inside columns are read as well, as reading one can fail."""
    for field in fields:
        yield field.name
        if types.is_struct(field.type):
            list(_column_names(field.type, types))


def _incomplete(path: Path, error: Exception) -> str:
    words = cut((str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__, 300)
    return f"a data file must be complete; given {path}: {words}; fetch or write it again"


def _json_pieces(path: Path, fields: Sequence[Field], maybe: Sequence[str]) -> Iterator[Table]:
    pieces = stream_bytes(path)
    first = next(pieces, b"").removeprefix(codecs.BOM_UTF8)
    if plain_name(path).endswith(".json") and first.lstrip()[:1] == b"[":
        rows = _parse(b"".join((first, *pieces)), str(path))
        yield _json_table(path, "row", list(range(len(rows))), rows, fields, maybe)
        return
    for lines in _lines(itertools.chain((first,), pieces)):
        rows = [_parse(line, f"{path}, line {number}") for number, line in lines]
        yield _json_table(path, "line", [number for number, _ in lines], rows, fields, maybe)


def _lines(pieces: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the lines that are not empty, with their numbers from 1, some at a time.

    JSON text holds no raw line feed, and no other byte of UTF-8 looks like one.
    """
    number, size, open_line, lines = 1, 0, list[bytes](), list[tuple[int, bytes]]()
    for piece in itertools.chain(pieces, (b"\n",)):  # which closes the last line
        head, *tail = piece.split(b"\n")
        open_line.append(head)
        for following in tail:
            line = b"".join(open_line)
            if line.strip():
                lines.append((number, line))
                size += len(line)
            number, open_line = number + 1, [following]
        if size >= _PIECE_BYTES:
            yield lines
            size, lines = 0, []
    yield lines


def _json_table(
    path: Path, unit: str, numbers: list[int], rows: list[Any], fields: Sequence[Field], maybe: Sequence[str]
) -> Table:
    columns: dict[Field, list[Any]] = {field: [] for field in (*fields, *maybe)}
    table = Table(str(path), unit, numbers, columns)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f'a line of JSON must be an object, as {{"text": …}}; given {json.dumps(row)[:40]} in '
                f"{table.name_of(index)}: fix it"
            )
        values = cast("dict[str, Any]", row)
        for field in fields:
            columns[field].append(values[present_field(field, list(values), table.name_of(index))])
        for field in maybe:
            columns[field].append(values.get(field))
    return table


def _parse(content: bytes, name: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8; given {error.object[error.start]:#04x} at byte {error.start} of {name}: convert it"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"JSON must be valid; given {content[:40]!r} … in {name}: {error}; fix it") from error


def _first_null(column: Any) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _wrong(name: str, given: str, field: str, rule: str) -> ValueError:
    fix = "leave that out" if rule == "text" else "fix it"
    return ValueError(f'the field "{field}" must be {rule}; given {given} in {name}: give another field, or {fix}')
