"""Text larger than memory: its tokens in files, written once and mapped into memory by every process of a host.

1. One process writes, and the others of the host wait for its lock, which ends with it. Documents are read and
   tokenised some at a time, split by their content, and appended to the file of their side.
2. A folder of files takes its name when it is complete. Its name is a hash of the source's files (path, size, time),
   the tokenizer and the split, so a run that is started again finds it without reading text.
3. Samples are copied out of the mapping, and its pages given back now and then. They stay in the kernel's page cache,
   one copy for all processes of the host, so a process' memory does not grow as it reads.

A folder holds index.json, and for each side SIDE.tokens, SIDE.bounds, and of rows with weights SIDE.weights. Tokens
are the smallest unsigned integers that hold the vocabulary, little-endian, documents end to end. Bounds are int64: the
start of each document, and the end of the last. Weights are float32.
"""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jdp.base.disk_cache import default_folder, make_folder
from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.data.held_out import document_tails, whole_documents
from jdp.data.text.token_array import MappedTokens, TokenArray, TokenisedPart, join_spans
from jdp.data.text.tokens import TextSides

_SIDES = ("train", "heldout")
VERSION = 2  # of the files' meaning
_WEIGHT = np.dtype("<f4")
_COPIED = 2**22  # tokens at a time
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True)
class TokenFiles:
    """Where the tokens of a source are, once they are written."""

    name: str  # of the source
    key: str  # 64 hex digits, of everything that the tokens follow from
    dtype: np.dtype[Any]  # of a token
    vocab_size: int  # every token is below it

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return default_folder() / "token_files" / self.key

    def open(self) -> TextSides | None:
        """Return the tokens; None if they are not written, or a file is incomplete."""
        try:
            index = json.loads((self.folder / "index.json").read_bytes())
            train, heldout = (self._side(side, index[side], index["weighted"]) for side in _SIDES)
            documents, whole = index["documents"], index["whole"]
            return TextSides(self.name, documents, train, heldout, whole, self.vocab_size, self.folder)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, parts: Iterable[TokenisedPart], *, separator: int | None, heldout_fraction: float) -> TextSides:
        """Write the tokens, unless another process does, for which this one waits; and return them."""
        host = re.sub(r"[^\w-]", "_", platform.node())
        own = self.folder.with_name(f"{self.key}.{host}.{os.getpid()}")
        with _one_process(self.folder):
            if (written := self.open()) is not None:
                return written
            for leftover in (self.folder, *self.folder.parent.glob(f"{self.key}.{host}.*")):
                shutil.rmtree(leftover, ignore_errors=True)  # damaged, or of a process of this host that was killed
            own.mkdir()
            try:
                index = _write(own, parts, self.dtype, separator, heldout_fraction, self.name)
                Path(own, "index.json").write_text(json.dumps({"source": self.name, "dtype": self.dtype.name, **index}))
                own.replace(self.folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # written meanwhile, by another host
                    raise
            finally:
                shutil.rmtree(own, ignore_errors=True)
            sides = self.open()
        assert sides is not None, f"{self.folder} was deleted"
        size = format_bytes(sides.train.ids.nbytes + sides.heldout.ids.nbytes)
        notice(f"{self.name}: its tokens are kept in {self.folder} ({size}); delete that folder when no run needs it")
        return sides

    def _side(self, side: str, tokens: int, weighted: bool) -> TokenArray:
        """Return one side. Raises ValueError if a file is incomplete."""
        path = self.folder / f"{side}.tokens"
        if path.stat().st_size != tokens * self.dtype.itemsize:
            raise UserError(f"{path} is incomplete")
        if weighted and path.with_suffix(".weights").stat().st_size != tokens * _WEIGHT.itemsize:
            raise UserError(f"{path.with_suffix('.weights')} is incomplete")
        ids = MappedTokens(path, self.dtype) if tokens else np.zeros(0, self.dtype)
        bounds = np.asarray(np.memmap(self.folder / f"{side}.bounds", np.dtype("<i8"), mode="r"))
        if bounds[0] != 0 or bounds[-1] != tokens:
            raise UserError(f"{path.with_suffix('.bounds')} is incomplete")
        return TokenArray(ids, bounds, MappedTokens(path.with_suffix(".weights"), _WEIGHT) if weighted else None)


def once(path: Path, compute: Callable[[], str]) -> str:
    """Return the text of a file; if there is none, write the text that `compute` returns."""
    try:
        return path.read_text()
    except FileNotFoundError:
        text = compute()
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        own.write_text(text)
        own.replace(path)
    except OSError:  # computed again by the next process
        own.unlink(missing_ok=True)
    return text


def can_be_written() -> bool:
    """Return True if there is a folder for token files; else report it."""
    folder = default_folder() / "token_files"
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        notice(
            f"tokens are held in memory, by each process, as {folder} cannot be written ({error.strerror}): "
            "JDP_CACHE_DIR names another folder"
        )
        return False


@contextmanager
def _one_process(folder: Path) -> Generator[None]:
    """Let one process of the host through at a time. The lock ends with the process that holds it."""
    with folder.with_name(f"{folder.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice(f"waiting for another process, which writes tokens to {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            notice(f"{folder.parent} has no locks ({error.strerror}): each process of a host writes the same tokens")
        yield


def _write(
    folder: Path,
    parts: Iterable[TokenisedPart],
    dtype: np.dtype[Any],
    separator: int | None,
    heldout_fraction: float,
    name: str,
) -> dict[str, Any]:
    """Write both sides, and return the facts for index.json."""
    with _both(folder, dtype) as sides:
        for part in parts:
            spans = whole_documents(part.scores, part.tokens.bounds, heldout_fraction)
            for side, chosen in zip(sides, (spans.train, spans.heldout), strict=True):
                side.append(join_spans(part.tokens, chosen, separator))
    documents, whole = sum(side.documents for side in sides), all(side.tokens for side in sides)
    weighted = any(side.weighted for side in sides)
    if not whole and weighted:
        raise UserError(
            f"heldout_fraction must leave rows on both sides; given {heldout_fraction} with {documents:,} in {name}: "
            "give a larger one"
        )
    if not whole:
        sides = _tails(next(side for side in sides if side.tokens), separator, heldout_fraction)
    tokens = {name: side.tokens for name, side in zip(_SIDES, sides, strict=True)}
    return {"documents": documents, "whole": whole, "weighted": weighted} | tokens


@contextmanager
def _both(folder: Path, dtype: np.dtype[Any]) -> Generator[list["_SideWriter"]]:
    """Open the files of both sides, and close them."""
    with ExitStack() as files:
        yield [files.enter_context(closing(_SideWriter(folder / side, dtype))) for side in _SIDES]


class _SideWriter:
    """Appends documents to the files of one side."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype, self.tokens, self.documents, self.weighted = dtype, 0, 0, False
        self.paths = [path.with_suffix(f".{kind}") for kind in ("tokens", "bounds", "weights")]
        self._files: list[BinaryIO] = [path.open("wb") for path in self.paths]
        self._files[1].write(np.zeros(1, "<i8").tobytes())

    def append(self, tokens: TokenArray) -> None:
        self._files[0].write(tokens.ids[:].astype(self.dtype, copy=False).data)
        self._files[1].write((tokens.bounds[1:] + self.tokens).astype("<i8").data)
        if tokens.weights is not None:
            self._files[2].write(tokens.weights[:].astype(_WEIGHT, copy=False).data)
            self.weighted = True
        self.tokens += len(tokens.ids)
        self.documents += len(tokens.bounds) - 1

    def append_long(self, tokens: MappedTokens, start: int, end: int, separator: int | None) -> None:
        """Append one document, some tokens at a time."""
        for first in range(start, end, _COPIED):
            self._files[0].write(tokens[first : min(end, first + _COPIED)].data)
        closing = [] if separator is None else [separator]
        self._files[0].write(np.array(closing, self.dtype).data)
        self.tokens += end - start + len(closing)
        self._files[1].write(np.array([self.tokens], "<i8").data)

    def close(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _tails(written: _SideWriter, separator: int | None, heldout_fraction: float) -> list[_SideWriter]:
    """Write both sides anew from the one that all documents fell on: the tail of each is held out."""
    every = [path.replace(path.with_stem("every")) for path in written.paths]
    tokens, bounds = MappedTokens(every[0], written.dtype), np.fromfile(every[1], "<i8")
    spans = document_tails(bounds[:-1], bounds[1:] - (separator is not None), heldout_fraction)
    with _both(every[0].parent, written.dtype) as sides:
        for side, chosen in zip(sides, (spans.train, spans.heldout), strict=True):
            for start, end in chosen.tolist():
                side.append_long(tokens, start, end, separator)
    for path in every:
        path.unlink()
    return sides
