"""From what a user names to documents, in an order that is the same on every process.

1. Find the files (jdp.data.sources.files), sorted by path; then data sets of Hugging Face ("hf:…"), in the order given.
2. A file of text is one document; of parquet, Arrow or JSON each row is one, and so is each of a data set.
3. Read their contents: bytes, so nothing is decoded and no encoding can be wrong; or token ids, if text was tokenised
   before. The file and row of each are kept for errors.
"""

import bisect
import functools
import os
import platform
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from jdp.data.sources.array_files import load_arrays
from jdp.data.sources.compressed import read_bytes
from jdp.data.sources.files import STDLIB, Kinds, PathLike, find_files
from jdp.data.sources.hub import HF, hub_splits, main_split
from jdp.data.sources.tables import ARROW_SUFFIXES, Table, arrow_table, check_fields, is_table, read_table

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Of a directory: a plain .json is more often a setting than data, so it must be named; .json.gz is how data is shipped.
_ROWS = (*ARROW_SUFFIXES, ".jsonl", ".ndjson", ".json.gz", ".json.zst")
_ARRAYS = (".npz", ".npy")

Document = TypeVar("Document", bound=Sized)  # bytes, or integers [n]


@dataclass(frozen=True)
class Origin:
    """The documents of one file: the index of the first, the file's name, and the number of each row, if any."""

    first: int
    name: str
    unit: str = ""
    numbers: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Corpus(Generic[Document]):
    """Documents and the files they are from. Empty ones are left out: they hold nothing to learn.

    Attributes:
        name: of the source.
        documents: bytes each, or integers [n] each.
        origins: of the documents, in their order.
    """

    name: str
    documents: tuple[Document, ...]
    origins: tuple[Origin, ...]

    def name_of(self, document: int) -> str:
        """Return what to call a document in errors: "book.txt", or "rows.jsonl, line 7"."""
        origin = self.origins[bisect.bisect_right(self.origins, document, key=lambda origin: origin.first) - 1]
        row = f", {origin.unit} {origin.numbers[document - origin.first]}" if origin.unit else ""
        return f"{origin.name}{row}"


def read_corpus(
    source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None, field: str = "text"
) -> Corpus[bytes]:
    """Read all of a source into memory as it is: UTF-8 of rows, whatever bytes a file of text has.

    Args:
        source: "stdlib", or a file, a glob (`**` goes down), a directory (all the way down), "hf:…" (see
            `jdp.data.sources.hub.hub_splits`), or a sequence of these. A file of your own by the name stdlib is
            "./stdlib". .parquet, .arrow, .feather, .jsonl, .ndjson and .json are rows, all others text; each may be
            compressed, .gz or .zst.
        suffixes: which files of a directory are data. By default text (.txt, .md, .rst, .py) or rows, whichever it
            holds.
        field: the column that is the text of a row.

    Raises ValueError: a source that does not exist, something unreadable or not whole, a row that is not text, or
    nothing but empty text.
    """
    kinds = Kinds("text", TEXT_SUFFIXES, _ROWS) if suffixes is None else Kinds("text", _tuple(suffixes))
    return _read(source, kinds, field, of_rows=lambda table: table.texts(field), of_file=read_bytes)


def read_token_ids(
    source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] | None = None, field: str = "input_ids"
) -> Corpus[NDArray[Any]]:
    """Read text that was tokenised before: each row's `field` is a list of token ids.

    The array `field` of an .npz, or all of an .npy, is one document [n], or a document a row [rows, n].

    Args:
        source: see `read_corpus`.
        suffixes: which files of a directory are data; by default those of rows and of arrays.
        field: the column of a table, or the array of an .npz.

    Raises ValueError: what `read_corpus` refuses; a row that is not a list of integers.
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
        raise ValueError(
            'source must name some text; given an empty list: give "stdlib", a file, a glob or a directory'
        )
    files = find_files([entry for entry in entries if not str(entry).startswith(HF)], kinds)
    documents: list[Document] = []
    origins: list[Origin] = []
    empty = 0

    def add(read: list[Document], name: str, unit: str, numbers: Sequence[int]) -> None:
        nonlocal empty
        kept = [index for index, document in enumerate(read) if len(document)]
        empty += len(read) - len(kept)
        if kept:
            rows = numbers if len(kept) == len(read) else [numbers[index] for index in kept]
            origins.append(Origin(len(documents), name, unit, rows))
            documents.extend(read[index] for index in kept)

    def add_rows(table: Table) -> None:
        add(of_rows(table), table.name, table.unit, table.numbers)

    for path in files:
        if is_table(path):
            add_rows(read_table(path, [field]))
        else:
            content = of_file(path)
            rows = content if isinstance(content, list) else [content]
            add(rows, str(path), "row" if isinstance(content, list) else "", range(len(rows)))
    for data_set in dict.fromkeys(str(entry) for entry in entries if str(entry).startswith(HF)):
        splits = hub_splits(data_set)
        split = main_split(splits, data_set)
        add_rows(arrow_table(splits[split], [field], f"{data_set} (split {split})"))
    name = _name(entries)
    if not documents:
        raise ValueError(f"text must not be empty; given {name}: {empty} empty file(s) or row(s); give some text")
    return Corpus(name, tuple(documents), tuple(origins))


def _array_rows(path: Path, *, field: str) -> NDArray[Any] | list[NDArray[Any]]:
    """Return the document of an .npz or .npy file, or a list of them."""
    if path.suffix not in _ARRAYS:
        raise ValueError(
            f"token ids must be in {', '.join((*_ROWS, *_ARRAYS))} files; given {path}: name a tokenizer, if it is text"
        )
    arrays = load_arrays(path)
    if path.suffix == ".npz":
        check_fields([field], list(arrays), str(path))
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
