"""From what a user names to documents, in an order every process agrees on.

1. The files (jdp.data.sources.files), sorted by path; then data sets of Hugging Face ("hf:…"), in the order given.
2. A file of text is one document; of parquet, Arrow or JSON each row is one, and so is each of a data set.
3. Their contents, whole: bytes, so nothing is decoded and no encoding can be wrong; or token ids, where text was
   tokenised before. Each keeps its place, for errors.
"""

import bisect
import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from jdp.data.sources.array_files import load_arrays
from jdp.data.sources.compressed import read_bytes
from jdp.data.sources.files import STDLIB, Kinds, PathLike, find_files
from jdp.data.sources.hub import HF, hub_table
from jdp.data.sources.tables import Table, arrow_table, check_fields, is_table, read_table

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Of a directory: a plain .json is more often a setting than data, so it must be named; .json.gz is how data is shipped.
_ROWS = (".parquet", ".arrow", ".feather", ".jsonl", ".ndjson", ".json.gz", ".json.zst")
_ARRAYS = (".npz", ".npy")

Document = TypeVar("Document", bound=Sized)  # bytes, or integers [n]


@dataclass(frozen=True)
class Origin:
    """What one file gave: the first of its documents, its name, and the rows they are from, where it has rows."""

    first: int
    where: str
    unit: str = ""
    numbers: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Corpus(Generic[Document]):
    """Documents and where they are from. Empty documents are none: they hold nothing to learn.

    Attributes:
      name: what was read.
      documents: bytes each, or integers [n] each.
      origins: of the documents, in their order.
    """

    name: str
    documents: tuple[Document, ...]
    origins: tuple[Origin, ...]

    def place(self, document: int) -> str:
        """Where a document is from: "book.txt", or "rows.jsonl, line 7"; lines count from 1, rows from 0."""
        origin = self.origins[bisect.bisect_right(self.origins, document, key=lambda origin: origin.first) - 1]
        return (
            f"{origin.where}, {origin.unit} {origin.numbers[document - origin.first]}" if origin.unit else origin.where
        )


def read_corpus(
    source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None, field: str = "text"
) -> Corpus[bytes]:
    """Reads all of a source into memory, as it is: UTF-8 for rows, whatever bytes there are for files of text.

    Args:
      source: "stdlib", or a file, a glob (`**` goes down), a directory (all the way down), "hf:…" (see
        `jdp.data.sources.hub.hub_splits`), or a sequence of these. A file of your own by the name stdlib is "./stdlib".
        .parquet, .arrow, .feather, .jsonl, .ndjson and .json are rows, all others text; each may be compressed, .gz
        or .zst.
      suffixes: which files of a directory are data. By default text (.txt, .md, .rst, .py) or rows, whichever it holds.
      field: the column that is the text of a row.

    Raises:
      ValueError: nothing there, something unreadable or not whole, a row that is not text, or nothing but empty text.
    """
    kinds = Kinds("text", TEXT_SUFFIXES, _ROWS) if suffixes is None else Kinds("text", _tuple(suffixes))
    return _read(source, kinds, field, of_rows=lambda table: table.texts(field), of_file=read_bytes)


def read_token_ids(
    source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None, field: str = "input_ids"
) -> Corpus[NDArray[Any]]:
    """The same of text that was tokenised before: each row's `field` is a list of token ids.

    The array `field` of an .npz, or all of an .npy, is one document [n], or a document a row [rows, n].

    Raises:
      ValueError: see `read_corpus`; a row that is not a list of whole numbers.
    """
    kinds = Kinds("tokenised", (*_ROWS, *_ARRAYS) if suffixes is None else _tuple(suffixes))
    of_file = functools.partial(_array_rows, field=field)
    return _read(source, kinds, field, of_rows=lambda table: table.integer_lists(field), of_file=of_file)


def _read(
    source: PathLike | Sequence[PathLike],
    kinds: Kinds,
    field: str,
    *,
    of_rows: Callable[[Table], list[Document]],
    of_file: Callable[[Path], Document | list[Document]],
) -> Corpus[Document]:
    entries = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not entries:
        raise ValueError('source must name some text, got an empty list: give "stdlib", a file, a glob or a directory')
    files = find_files([entry for entry in entries if not str(entry).startswith(HF)], kinds)
    documents: list[Document] = []
    origins: list[Origin] = []
    empty = 0

    def add(found: list[Document], where: str, unit: str, numbers: Sequence[int]) -> None:
        nonlocal empty
        kept = [place for place, document in enumerate(found) if len(document)]
        empty += len(found) - len(kept)
        if kept:
            rows = numbers if len(kept) == len(found) else [numbers[place] for place in kept]
            origins.append(Origin(len(documents), where, unit, rows))
            documents.extend(found[place] for place in kept)

    for path in files:
        if is_table(path):
            table = read_table(path, [field])
            add(of_rows(table), table.where, table.unit, table.numbers)
        else:
            found = of_file(path)
            rows = found if isinstance(found, list) else [found]
            add(rows, str(path), "row" if isinstance(found, list) else "", range(len(rows)))
    for table in _hub_tables(entries, field):
        add(of_rows(table), table.where, table.unit, table.numbers)
    name = _name(entries)
    if not documents:
        raise ValueError(f"text must not be empty, got {name}: {empty} empty file(s) or row(s); give some text")
    return Corpus(name, tuple(documents), tuple(origins))


def _hub_tables(entries: Sequence[PathLike], field: str) -> Iterator[Table]:
    for name in dict.fromkeys(str(entry) for entry in entries):
        if name.startswith(HF):
            table, split = hub_table(name)
            yield arrow_table(table, [field], f"{name} (split {split})")


def _array_rows(path: Path, *, field: str) -> NDArray[Any] | list[NDArray[Any]]:
    """Of an .npz or .npy file: one document, or a list of them. Objects stay unread: unpickling them would run code."""
    if path.suffix not in _ARRAYS:
        raise ValueError(
            f"token ids must be in {', '.join((*_ROWS, *_ARRAYS))} files, got {path}: name a tokenizer, if that is text"
        )
    arrays = load_arrays(path)
    if path.suffix == ".npz":
        check_fields([field], list(arrays), str(path))
    loaded = arrays[field if path.suffix == ".npz" else path.stem]
    if loaded.dtype.kind not in "iu" or loaded.ndim not in (1, 2):
        raise ValueError(
            f"token ids must be whole numbers [n] or [rows, n], got {loaded.dtype} {list(loaded.shape)} in {path}: "
            "convert them"
        )
    return loaded if loaded.ndim == 1 else list(loaded)


def _tuple(suffixes: Sequence[str]) -> tuple[str, ...]:
    return (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)


def _name(entries: Sequence[PathLike]) -> str:
    first = f"stdlib (Python {platform.python_version()})" if entries[0] == STDLIB else str(entries[0])
    return first if len(entries) == 1 else f"{first} and {len(entries) - 1} more"
