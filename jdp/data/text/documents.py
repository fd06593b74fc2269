"""Find, read and tokenise the documents of a source, in the same order on every process.

The order is the files of text, sorted by path, each file once, then the data sets that `datasets` reads, in the given
order. A file is one document of any bytes, so no encoding can be wrong; a row is one document in UTF-8. Some documents
are read and tokenised at a time.
"""

import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.machine import portions
from jdp.base.notices import notice
from jdp.base.user_path import HF, STREAM, builder_of, check_regular, matching, user_path
from jdp.data.held_out import content_score
from jdp.data.sources import (
    HubRows,
    PathLike,
    check_columns,
    hub_rows,
    optional,
    read_by_datasets,
    refuse_unreadable,
    walk,
)
from jdp.data.text.tokenizers import Tokenizer
from jdp.data.text.tokens import TokenArray, TokenSource

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Not the library's own text: packages installed beside it, and its tests, which some distributions leave out.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_BATCH_BYTES = 2**22  # of text, tokenised at a time: a library's encodings are many times larger than the ids


@dataclass(frozen=True, eq=False)
class Found:
    """The files and data sets of a source, before reading."""

    name: str  # of the source
    files: tuple[Path, ...]  # sorted by path
    data_sets: tuple[HubRows, ...]  # that `datasets` reads

    @property
    def size(self) -> int | None:
        """Bytes of all files on disk; None if one is a stream, of unknown size."""
        sizes = [rows.size for rows in self.data_sets]
        return None if None in sizes else sum((file.stat().st_size for file in self.files), sum(filter(None, sizes)))

    @property
    def identity(self) -> str:
        """Identifies the content: path, size and time of each file, as in Make and rsync."""
        stats = [(str(file.resolve()), file.stat()) for file in self.files]
        files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return repr((files, [rows.identity for rows in self.data_sets]))


def find(source: PathLike | Sequence[PathLike], files_of: Callable[[list[PathLike]], list[Path]]) -> Found:
    """Return the files of a source, found by `files_of`, and the rows for `datasets`."""
    every = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not every:
        raise UserError('source must name some text; given an empty list: use "stdlib", a file, a glob or a directory')
    first = f"stdlib (Python {platform.python_version()})" if every[0] == STDLIB else str(every[0])
    name = first if len(every) == 1 else f"{first} and {len(every) - 1} more"
    on_hub = [str(entry) for entry in every if str(entry).startswith((HF, STREAM))]
    files = files_of([entry for entry in every if str(entry) not in on_hub])
    return Found(name, tuple(files), tuple(map(hub_rows, dict.fromkeys(on_hub))))


def text_files(entries: Sequence[PathLike]) -> list[Path]:
    """Return the files of "stdlib", files, globs and directories (at any depth, without hidden files)."""
    unique: dict[Path, Path] = {}
    for path in sorted(path for entry in entries for path in _files(entry)):
        unique.setdefault(path.resolve(), path)  # through any links
    return list(unique.values())


def _files(entry: PathLike) -> list[Path]:
    if entry == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [Path(file) for file in walk(root, leave_out=_NOT_STDLIB) if file.endswith(".py")]
    path = user_path(entry)
    if path.is_dir():
        return _directory_files(path)
    files = [*map(Path, matching(path))]
    if not files:
        raise UserError(
            f"source must be a directory that exists, a file, or a glob of files; given {entry}, looked for at "
            f'{path.absolute()}: fix the path, or use "{STDLIB}" for Python\'s own source text'
        )
    if others := [file for file in files if not file.name.endswith(TEXT_SUFFIXES)]:
        fix = read_by_datasets(path, others[0])
        raise UserError(f"files of text end with {', '.join(TEXT_SUFFIXES)}; given {others[0]}: {fix}")
    return files


def _directory_files(directory: Path) -> list[Path]:
    every = [*map(Path, walk(directory))]
    files = [file for file in every if file.name.endswith(TEXT_SUFFIXES)]
    others = [file for file in every if not file.name.endswith(TEXT_SUFFIXES)]
    rows = [file for file in others if builder_of(file.name) not in (None, "imagefolder") and file.suffix != ".json"]
    kinds = ", ".join(TEXT_SUFFIXES)
    if rows or not files:
        other = next(iter(rows or others), None)
        such = "" if other is None else f" such as {other.name}"
        raise UserError(
            f"a directory of text must hold {kinds} files, and no rows; given {directory} with {len(files)} of these "
            f"and {len(others)} others{such}: {read_by_datasets(directory, other)}, or name the text by a glob, as "
            f"{directory}/**/*.txt"
        )
    if others:
        notice(f"{directory}: reading {len(files)} files ({kinds}), ignoring {len(others)} others")
    return files


def text_tokens(source: PathLike | Sequence[PathLike], field: str, tokenizer: Tokenizer) -> TokenSource:
    """Find the text of a source; it is read and tokenised on demand."""
    found = find(source, text_files)
    identity = f"{found.identity} {field} {tokenizer.identity} {tokenizer.separator}"
    parts = _tokenised(found, field, tokenizer)
    return TokenSource(found.name, found.size, identity, tokenizer.vocab_size, tokenizer.separator, parts)


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
        closing = f"token {tokenizer.separator}, which closes a document"
        notice(f"{found.name}: {closing}, is in {doubtful} of them; are they text?")


def text_documents(found: Found, field: str) -> Iterator[tuple[str, bytes]]:
    """Yield each document that is not empty, after its name for errors. Raises ValueError if there is none."""
    name = None
    for name, document in filter(itemgetter(1), _every_document(found, field)):
        yield name, document
    if name is None:
        raise UserError(f"text must not be empty; given {found.name}: add text")


def _every_document(found: Found, field: str) -> Iterator[tuple[str, bytes]]:
    for path in found.files:
        try:
            check_regular(path)
            yield str(path), path.read_bytes()
        except OSError as error:
            refuse_unreadable(error, path)
    for rows in found.data_sets:
        check_columns(rows.name, rows.columns, {"field": field})
        for batch, first in pieces(rows):
            texts = _texts(batch[field], field, rows.name, first)
            yield from ((f"{rows.name}, row {row}", text) for row, text in enumerate(texts, first))


def pieces(rows: HubRows) -> Iterator[tuple[Any, int]]:
    """Yield the rows of a data set, some at a time, with the number of the first."""
    first = 0
    for batch in rows.batches:
        yield batch, first
        first += batch.num_rows


def _texts(column: Any, field: str, name: str, first: int) -> list[bytes]:
    """Return a column of text, in UTF-8."""
    pyarrow = optional("pyarrow", name)
    wrong = None
    if column.type not in (pyarrow.string(), pyarrow.large_string(), pyarrow.null()):
        wrong = f"{column.type} in {name}"
    elif column.null_count:
        wrong = f"nothing (null) in {name}, row {first + int(np.argmax(column.is_null()))}"
    if wrong is not None:
        raise UserError(f'the field "{field}" must be text; given {wrong}: use another field, or remove that row')
    return column.cast(pyarrow.large_binary()).to_pylist()
