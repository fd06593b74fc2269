"""Find, read and tokenise the documents of a source, in the same order on every process.

The order is the files of text, sorted by path, then the data sets that `datasets` reads, in the given order. A file is
one document of any bytes, so no encoding can be wrong; a row is one document in UTF-8. Some documents are read and
tokenised at a time. `id_rows.py` reads rows of ids, which were tokenised before.
"""

import functools
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.hub_source import HF, STREAM
from jdp.base.machine import portions
from jdp.base.notices import notice
from jdp.data.held_out import content_score
from jdp.data.sources.files import STDLIB, PathLike, read_file, text_files
from jdp.data.sources.hub import HubRows, check_columns, hub_rows, optional
from jdp.data.text.token_array import TokenArray, TokenSource
from jdp.data.text.tokenizers import BYTES, Tokenizer

_PIECE_ROWS = 1024  # read at a time
_BATCH_BYTES = 2**22  # of text, tokenised at a time: a library's encodings are many times larger than the ids


@dataclass(frozen=True, eq=False)
class Found:
    """The files and data sets of a source, before reading."""

    name: str  # of the source
    files: tuple[Path, ...]  # sorted by path
    data_sets: tuple[HubRows, ...]  # that `datasets` reads

    @functools.cached_property
    def size(self) -> int | None:
        """Bytes of all files on disk; None if one is a stream, of unknown size."""
        sizes = [rows.size for rows in self.data_sets]
        return None if None in sizes else sum((file.stat().st_size for file in self.files), sum(filter(None, sizes)))

    @functools.cached_property
    def identity(self) -> str:
        """Identifies the content: path, size and time of each file, as in Make and rsync."""
        stats = [(str(file.resolve()), file.stat()) for file in self.files]
        files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return repr((files, [rows.identity for rows in self.data_sets]))


def entries(source: PathLike | Sequence[PathLike]) -> tuple[str, list[PathLike], tuple[HubRows, ...]]:
    """Return a source's name for messages, its files, globs and folders, and the rows for `datasets`."""
    every = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not every:
        raise UserError('source must name some text; given an empty list: use "stdlib", a file, a glob or a directory')
    first = f"stdlib (Python {platform.python_version()})" if every[0] == STDLIB else str(every[0])
    name = first if len(every) == 1 else f"{first} and {len(every) - 1} more"
    on_hub = [str(entry) for entry in every if str(entry).startswith((HF, STREAM))]
    return name, [entry for entry in every if str(entry) not in on_hub], tuple(map(hub_rows, dict.fromkeys(on_hub)))


def text_tokens(source: PathLike | Sequence[PathLike], field: str, tokenizer: Tokenizer) -> TokenSource:
    """Find the text of a source; it is read and tokenised on demand."""
    found = find_text(source)
    return TokenSource(
        found.name,
        found.size,
        f"{found.identity} {field} {tokenizer.identity} {tokenizer.separator}",
        tokenizer.vocab_size,
        tokenizer.separator,
        lambda: _tokenised(found, field, tokenizer),
    )


def find_text(source: PathLike | Sequence[PathLike]) -> Found:
    name, words, data_sets = entries(source)
    return Found(name, tuple(text_files(words)), data_sets)


def _tokenised(found: Found, field: str, tokenizer: Tokenizer) -> Iterator[tuple[TokenArray, NDArray[np.float64]]]:
    """Yield documents as tokens, with their scores, and report text that contains the separator."""
    doubtful = 0
    for batch in portions(text_documents(found, field), lambda named: len(named[1]), _BATCH_BYTES):
        names, documents = zip(*batch, strict=True)
        tokens = tokenizer.tokenize(documents, names)
        is_separator = tokens.ids == tokenizer.separator
        if tokenizer.adds_bos and tokenizer.bos == tokenizer.separator:
            is_separator[tokens.bounds[:-1]] = False  # it may open the document
        separators = np.flatnonzero(is_separator)
        doubtful += len(np.unique(np.searchsorted(tokens.bounds, separators, side="right")))
        yield tokens, np.array([content_score(document) for document in documents])
    if doubtful:
        unit = "byte" if tokenizer.name == BYTES else "token"
        closing = f"{unit} {tokenizer.separator}, which closes a document"
        notice(f"{found.name}: {closing}, is in {doubtful} of them; are they text?")


def text_documents(found: Found, field: str) -> Iterator[tuple[str, bytes]]:
    """Yield each document that is not empty, after its name for errors. Raises ValueError if there is none."""
    count = empty = 0
    for name, document in _every_document(found, field):
        count += 1
        if document:
            yield name, document
        else:
            empty += 1
    if empty == count:
        raise UserError(f"text must not be empty; given {found.name}: {empty} empty file(s) or row(s); add text")


def _every_document(found: Found, field: str) -> Iterator[tuple[str, bytes]]:
    for path in found.files:
        yield str(path), read_file(path)
    for rows in found.data_sets:
        check_columns(rows.name, rows.columns, {"field": field})
        for table, numbers in pieces(rows):
            texts = _texts(table.column(field), field, rows.name, numbers)
            yield from ((f"{rows.name}, row {number}", text) for number, text in zip(numbers, texts, strict=True))


def pieces(rows: HubRows) -> Iterator[tuple[Any, range]]:
    """Yield the rows of a data set as `pyarrow.Table`s, some rows each, with their numbers."""
    first = 0
    for table in rows.tables:
        for start in range(0, table.num_rows, _PIECE_ROWS):
            piece = table.slice(start, _PIECE_ROWS)
            yield piece, range(first + start, first + start + piece.num_rows)
        first += table.num_rows


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
        raise UserError(f'the field "{field}" must be text; given {wrong}: use another field, or remove that row')
    return column.cast(pyarrow.large_binary()).to_pylist()
