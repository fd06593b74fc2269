"""Find and read the documents of a source, in an order that is the same on every process.

1. Find the files (jdp.data.sources.files), sorted by path; then data sets of Hugging Face ("hf:…", "hf-stream:…"), in
   the order given.
2. A file of text is one document; of parquet, Arrow or JSON each row is one, and so is each of a data set.
3. Read their contents, some documents at a time: bytes, so nothing is decoded and no encoding can be wrong; or token
   ids, if text was tokenised before. The file and row of each are known for errors.
"""

import bisect
import functools
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from jdp.data.sources.array_files import load_arrays
from jdp.data.sources.compressed import read_bytes
from jdp.data.sources.files import STDLIB, Kinds, PathLike, find_files
from jdp.data.sources.hub import HF, STREAM, HubRows, hub_rows
from jdp.data.sources.tables import ARROW_SUFFIXES, Field, Table, arrow_pieces, is_table, present_field, table_pieces

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Of a directory: a plain .json is more often a setting than data, so it must be named; .json.gz is how data is shipped.
_ROWS = (*ARROW_SUFFIXES, ".jsonl", ".ndjson", ".json.gz", ".json.zst")
_ARRAYS = (".npz", ".npy")

Document = TypeVar("Document", bound=Sized)  # bytes, or integers [n]


@dataclass(frozen=True, eq=False)
class Part(Generic[Document]):
    """Some documents of one file or data set, in a row. Empty ones are left out: they hold nothing to learn."""

    documents: Sequence[Document]  # bytes each, or integers [n] each
    name: str  # of the file or data set
    unit: str = ""  # of its numbers, "row" or "line"; "": the file is one document
    numbers: Sequence[int] = ()  # of each in the file

    def name_of(self, document: int) -> str:
        """Return a document's name for errors: "book.txt", or "rows.jsonl, line 7"."""
        return f"{self.name}, {self.unit} {self.numbers[document]}" if self.unit else self.name


@dataclass(frozen=True, eq=False)
class Corpus(Generic[Document]):
    """Documents in memory, and the parts they were read in."""

    name: str  # of the source
    documents: tuple[Document, ...]  # bytes each, or integers [n] each
    parts: tuple[Part[Document], ...]  # of the documents, in their order

    def name_of(self, document: int) -> str:
        """Return a document's name for errors: "book.txt", or "rows.jsonl, line 7"."""
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
    data_sets: tuple[HubRows, ...]  # of Hugging Face

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


def find_text(source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None) -> Found:
    """Find the text that a source names; nothing is read."""
    return _find(source, Kinds("text", TEXT_SUFFIXES, _ROWS) if suffixes is None else Kinds("text", _tuple(suffixes)))


def find_token_ids(source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None) -> Found:
    """Find the token ids that a source names; nothing is read."""
    return _find(source, Kinds("tokenised", (*_ROWS, *_ARRAYS) if suffixes is None else _tuple(suffixes)))


def text_parts(found: Found, field: str = "text") -> Iterator[Part[bytes]]:
    """Yield all text, some documents at a time: UTF-8 of rows, whatever bytes a file of text has."""
    return _parts(found, field, of_rows=lambda table: table.texts(field), of_file=read_bytes)


def token_id_parts(found: Found, field: str = "input_ids") -> Iterator[Part[NDArray[Any]]]:
    """Yield all documents of token ids, some at a time: each row's `field` is a list of integers.

    The array `field` of an .npz, or all of an .npy, is one document [n], or a document a row [rows, n].
    """
    of_file = functools.partial(_array_rows, field=field)
    return _parts(found, field, of_rows=lambda table: table.integer_lists(field), of_file=of_file)


def corpus_of(name: str, parts: Iterable[Part[Document]]) -> Corpus[Document]:
    """Return the documents of all parts, in memory."""
    read = tuple(parts)
    return Corpus(name, tuple(document for part in read for document in part.documents), read)


def _find(source: PathLike | Sequence[PathLike], kinds: Kinds) -> Found:
    entries = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not entries:
        raise ValueError(
            'source must name some text; given an empty list: give "stdlib", a file, a glob or a directory'
        )
    on_hub = [str(entry) for entry in entries if str(entry).startswith((HF, STREAM))]
    files = find_files([entry for entry in entries if str(entry) not in on_hub], kinds)
    return Found(_name(entries), tuple(files), tuple(map(hub_rows, dict.fromkeys(on_hub))))


def _parts(
    found: Found,
    *fields: Field,
    maybe: Sequence[str] = (),
    of_rows: Callable[[Table], list[Document]],
    of_file: Callable[[Path], Document | list[Document]],
) -> Iterator[Part[Document]]:
    def all_parts() -> Iterator[Part[Document]]:
        for path in found.files:
            if is_table(path):
                tables = table_pieces(path, fields, maybe)
                yield from (Part(of_rows(table), table.name, table.unit, table.numbers) for table in tables)
            elif isinstance(content := of_file(path), list):
                yield Part(content, str(path), "row", range(len(content)))
            else:
                yield Part([content], str(path))
        for rows in found.data_sets:
            tables = arrow_pieces(rows.tables, fields, rows.name, maybe)
            yield from (Part(of_rows(table), table.name, table.unit, table.numbers) for table in tables)

    held = empty = 0
    for part in all_parts():
        kept = [index for index, document in enumerate(part.documents) if len(document)]
        empty += len(part.documents) - len(kept)
        held += len(kept)
        if len(kept) == len(part.documents):
            yield part
        elif kept:
            numbers = [part.numbers[index] for index in kept]
            yield Part([part.documents[index] for index in kept], part.name, part.unit, numbers)
    if not held:
        raise ValueError(f"text must not be empty; given {found.name}: {empty} empty file(s) or row(s); give some text")


def _array_rows(path: Path, *, field: str) -> NDArray[Any] | list[NDArray[Any]]:
    """Return the document of an .npz or .npy file, or a list of them."""
    if path.suffix not in _ARRAYS:
        raise ValueError(
            f"token ids must be in {', '.join((*_ROWS, *_ARRAYS))} files; given {path}: name a tokenizer, if it is text"
        )
    arrays = load_arrays(path)
    if path.suffix == ".npz":
        present_field(field, list(arrays), str(path))
    loaded = arrays[field if path.suffix == ".npz" else path.stem]
    if loaded.dtype.kind not in "iu" or loaded.ndim not in (1, 2):
        raise ValueError(
            f"token ids must be whole numbers [n] or [rows, n]; given {loaded.dtype} {list(loaded.shape)} in {path}: "
            "convert them"
        )
    return loaded if loaded.ndim == 1 else list(loaded)


def _tuple(suffixes: Sequence[str]) -> tuple[str, ...]:
    return (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)


def _name(entries: Sequence[PathLike]) -> str:
    first = f"stdlib (Python {platform.python_version()})" if entries[0] == STDLIB else str(entries[0])
    return first if len(entries) == 1 else f"{first} and {len(entries) - 1} more"
