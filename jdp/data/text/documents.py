"""Find and read the documents of a source, in an order that is the same on every process.

1. Find the files of text (jdp.data.sources.files), sorted by path; then what `datasets` reads
   (jdp.data.sources.hub), in the order given.
2. A file of text is one document, whatever bytes it has, so no encoding can be wrong. Of rows each is one: UTF-8.
   `id_rows.py` reads rows of ids, which were made of text before.
3. Read their contents, some documents at a time. The file and row of each are known for errors.
"""

import bisect
import functools
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jdp.base.errors import UserError
from jdp.base.hub_source import HF, STREAM
from jdp.data.sources.files import STDLIB, PathLike, read_file, text_files
from jdp.data.sources.hub import HubRows, check_columns, hub_rows, optional

_PIECE_ROWS = 1024  # read at a time


@dataclass(frozen=True, eq=False)
class Part:
    """Some documents of one file or data set, in a row. Empty ones are left out: they hold nothing to learn."""

    documents: Sequence[bytes]
    name: str  # of the file or data set
    rows: Sequence[int] = ()  # the number of each in it; (): the file is one document

    def name_of(self, document: int) -> str:
        """Return a document's name for errors: "book.txt", or "hf:json:rows.jsonl (split train), row 7"."""
        return f"{self.name}, row {self.rows[document]}" if self.rows else self.name


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in memory, and the parts they were read in."""

    name: str  # of the source
    documents: tuple[bytes, ...]
    parts: tuple[Part, ...]  # of the documents, in their order

    def name_of(self, document: int) -> str:
        """Return a document's name for errors, as `Part.name_of` does."""
        part = bisect.bisect_right(self._firsts, document) - 1
        return self.parts[part].name_of(document - self._firsts[part])

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return list(itertools.accumulate((len(part.documents) for part in self.parts), initial=0))[:-1]


@dataclass(frozen=True, eq=False)
class Found:
    """What a source names; nothing of it is read yet."""

    name: str  # of the source
    files: tuple[Path, ...]  # sorted by path
    data_sets: tuple[HubRows, ...]  # that `datasets` reads

    @functools.cached_property
    def size(self) -> int | None:
        """Bytes of all files, as they are on disk; None: not known, as one is a stream."""
        sizes = [rows.size for rows in self.data_sets]
        return None if None in sizes else sum((file.stat().st_size for file in self.files), sum(filter(None, sizes)))

    @functools.cached_property
    def identity(self) -> str:
        """What distinguishes this content from others': path, size and time of each file, as Make and rsync do."""
        stats = [(str(file.resolve()), file.stat()) for file in self.files]
        files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return repr((files, [rows.identity for rows in self.data_sets]))


def find_text(source: PathLike | Sequence[PathLike]) -> Found:
    """Find the text that a source names; nothing is read."""
    words, data_sets = entries(source)
    return Found(name_of(source), tuple(text_files(words)), data_sets)


def entries(source: PathLike | Sequence[PathLike]) -> tuple[list[PathLike], tuple[HubRows, ...]]:
    """Return the files, globs and directories that a source names, and the rows that `datasets` reads."""
    every = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not every:
        raise UserError('source must name some text; given an empty list: give "stdlib", a file, a glob or a directory')
    on_hub = [str(entry) for entry in every if str(entry).startswith((HF, STREAM))]
    return [entry for entry in every if str(entry) not in on_hub], tuple(map(hub_rows, dict.fromkeys(on_hub)))


def name_of(source: PathLike | Sequence[PathLike]) -> str:
    """Return a source's name for people."""
    every = [source] if isinstance(source, str | os.PathLike) else list(source)
    first = f"stdlib (Python {platform.python_version()})" if every[0] == STDLIB else str(every[0])
    return first if len(every) == 1 else f"{first} and {len(every) - 1} more"


def text_parts(found: Found, field: str) -> Iterator[Part]:
    """Yield all text, some documents at a time. Raises ValueError if there is none."""
    held = empty = 0
    for part in _every_part(found, field):
        kept = [index for index, document in enumerate(part.documents) if len(document)]
        empty += len(part.documents) - len(kept)
        held += len(kept)
        if len(kept) == len(part.documents):
            yield part
        elif kept:
            yield Part([part.documents[i] for i in kept], part.name, [part.rows[i] for i in kept])
    if not held:
        raise UserError(f"text must not be empty; given {found.name}: {empty} empty file(s) or row(s); give some text")


def corpus_of(found: Found, field: str) -> Corpus:
    """Return the documents of a source, in memory."""
    read = tuple(text_parts(found, field))
    return Corpus(found.name, tuple(document for part in read for document in part.documents), read)


def pieces(rows: HubRows) -> Iterator[tuple[Any, range]]:
    """Yield the rows of a data set as `pyarrow.Table`s, some rows each, with their numbers."""
    first = 0
    for table in rows.tables:
        for start in range(0, table.num_rows, _PIECE_ROWS):
            piece = table.slice(start, _PIECE_ROWS)
            yield piece, range(first + start, first + start + piece.num_rows)
        first += table.num_rows


def _every_part(found: Found, field: str) -> Iterator[Part]:
    for path in found.files:
        yield Part([read_file(path)], str(path))
    for rows in found.data_sets:
        check_columns(rows.name, rows.columns, {"field": field})
        for table, numbers in pieces(rows):
            yield Part(_texts(table.column(field), field, rows.name, numbers), rows.name, numbers)


def _texts(column: Any, field: str, name: str, numbers: range) -> list[bytes]:
    """Return a column of text, in UTF-8."""
    pyarrow = optional("pyarrow", name)
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    wrong = None
    if not any(getattr(pyarrow.types, f"is_{kind}")(column.type) for kind in ("string", "large_string", "null")):
        wrong = f"{column.type} in {name}"
    elif column.null_count:
        wrong = f"nothing (null) in {name}, row {numbers[int(np.argmax(column.is_null().to_numpy()))]}"
    if wrong is not None:
        raise UserError(f'the field "{field}" must be text; given {wrong}: give another field, or leave that out')
    return column.cast(pyarrow.large_binary()).to_pylist()
