"""Documents as tokens, end to end in one array, and split into training and held-out sides.

Documents are split by their content; if a side stays empty, the tail of each document is held out, or the row with
weights nearest to that side. For text larger than memory, one process writes files while the other processes of the
host wait for its lock, which ends with the process. A complete folder gets its final name: a hash of the source's files
(path, size, time), the tokenizer and the split. So a restarted run finds it without reading text.

A folder holds index.json, and for each side SIDE.tokens, SIDE.bounds, and SIDE.weights if rows have weights. Tokens
are the smallest unsigned integers that hold the vocabulary, little-endian, documents end to end. Bounds are int64: the
start of each document, and the end of the last. Weights are float32.
"""

import errno
import fcntl
import hashlib
import io
import json
import mmap
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.disk_cache import Cache, default_folder, make_folder
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.data.held_out import check_fraction, document_tails, split_samples

_PAGE_BYTES = 2**16  # bytes that the kernel maps around a page that is read (fault_around_bytes)
_MAPPED_BYTES = 2**25  # mapped bytes before all are released
IN_FILES_BYTES = 2**26  # of a source: less takes a second or two to read
_SIDES = ("train", "heldout")
_VERSION = 3  # of the files' format


class MappedTokens:
    """Tokens, or their weights, in a memory-mapped file: slices are copies, and no process grows as it reads."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # samples are random: no read-ahead
        self._tokens = np.frombuffer(self._map, dtype)
        self._mapped = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, tokens: slice) -> NDArray[Any]:
        copy = self._tokens[tokens].copy()
        self._mapped += copy.nbytes + _PAGE_BYTES  # a count lost between threads keeps a few pages longer
        if self._mapped > _MAPPED_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # the page cache keeps them
            self._mapped = 0
        return copy

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes


@dataclass(frozen=True, eq=False)
class TokenArray:
    """Documents as tokens, end to end."""

    ids: Any  # integers [tokens]: a NumPy array, or `MappedTokens` of a file
    bounds: NDArray[np.int64]  # int64 [documents + 1], the start of each document, and the end of the last
    weights: Any = None  # float32 [tokens] from 0 to 1, stored like `ids`: weight of each as a target; None: all 1

    @property
    def documents(self) -> NDArray[np.int64]:
        """The start and end of each document: int64 [documents, 2]."""
        return np.stack([self.bounds[:-1], self.bounds[1:]], axis=1)

    def joined(self, spans: NDArray[np.int64], separator: int | None = None) -> "TokenArray":
        """Return spans of tokens (int64 [spans, 2]) as documents, end to end, each closed by the separator if given."""
        closing = [] if separator is None else [np.array([separator], self.ids.dtype)]
        ids = [piece for start, end in spans.tolist() for piece in (self.ids[start:end], *closing)]
        weights = self.weights
        if weights is not None:
            weights = np.concatenate([weights[:0], *(weights[start:end] for start, end in spans.tolist())])
        bounds = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0] + len(closing))]).astype(np.int64)
        return TokenArray(np.concatenate([self.ids[:0], *ids]), bounds, weights)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Tokens that are read, or made from text, on demand."""

    name: str  # for messages
    size: int | None  # bytes of the source; None: unknown before reading
    identity: str  # identifies the content and its tokenizer
    vocab_size: int | None  # every token is below it; None: unknown before reading
    separator: int | None  # the token that closes a document; None: no token
    # some documents at a time, without separators, with their `content_score`s: float64 [documents]; read once
    parts: Iterator[tuple[TokenArray, NDArray[np.float64]]]


def smallest_uint(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below `vocab_size`, at least 1."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


@dataclass(frozen=True, eq=False)
class TextSides:
    """A source, read, tokenised and split in two."""

    documents: int
    train: TokenArray  # documents to train on, each closed by the separator
    heldout: TokenArray  # documents held out, each closed by the separator
    whole: bool  # True: whole documents are held out; False: the tail of each
    vocab_size: int  # every token is below it
    digest: str  # of all tokens, bounds and weights
    folder: Path | None = None  # of the tokens; None: they are in memory


def text_sides(source: TokenSource, heldout_fraction: float, in_files: bool | None) -> TextSides:
    """Return the tokens of both sides; `in_files` None: in files if the source is large or of unknown size."""
    check_fraction(heldout_fraction)
    if in_files is None:
        in_files = source.size is None or source.size >= IN_FILES_BYTES
    sides = _in_files(source, source.vocab_size, heldout_fraction) if in_files and source.vocab_size else None
    sides = sides or _split(source, heldout_fraction, smallest_uint(source.vocab_size or 2**32))
    if source.vocab_size is not None:
        return sides
    size = 1 + max(int(side.ids.max(initial=0)) for side in (sides.train, sides.heldout))
    train, heldout = (replace(side, ids=side.ids.astype(smallest_uint(size))) for side in (sides.train, sides.heldout))
    return replace(sides, train=train, heldout=heldout, vocab_size=size)


def _in_files(source: TokenSource, vocab_size: int, heldout_fraction: float) -> TextSides | None:
    """Return the tokens in files, written if missing; None if they cannot be written, which is reported."""
    dtype = smallest_uint(vocab_size).newbyteorder("<")
    key = Cache.key(f"tokens {_VERSION}", source.identity, repr((vocab_size, heldout_fraction)))
    folder, host = default_folder() / "token_files" / key, re.sub(r"[^\w-]", "_", platform.node())
    own = folder.with_name(f"{key}.{host}.{os.getpid()}")
    if (written := _opened(folder, dtype, vocab_size)) is not None:
        return written
    try:
        make_folder(folder.parent)
        lock = folder.with_name(f"{folder.name}.lock").open("ab")
    except OSError as error:
        notice(
            f"each process holds the tokens in memory, because {folder.parent} cannot be written ({error.strerror}): "
            "set JDP_CACHE_DIR to another folder"
        )
        return None
    with lock:  # one process of the host at a time; the lock ends with its process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice(f"waiting for another process to write tokens to {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            notice(f"{folder.parent} has no locks ({error.strerror}): each process of a host writes the same tokens")
        if (written := _opened(folder, dtype, vocab_size)) is not None:
            return written
        for leftover in (folder, *folder.parent.glob(f"{key}.{host}.*")):
            shutil.rmtree(leftover, ignore_errors=True)  # damaged, or left by a killed process of this host
        own.mkdir()
        try:
            sides = _split(source, heldout_fraction, dtype, own)
            sizes = {file.name: file.stat().st_size for file in own.iterdir()}
            facts = {"documents": sides.documents, "whole": sides.whole, "digest": sides.digest, "sizes": sizes}
            Path(own, "index.json").write_text(json.dumps({"source": source.name, "dtype": dtype.name, **facts}))
            own.replace(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another host has written it meanwhile
                raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
        written = _opened(folder, dtype, vocab_size)
    assert written is not None, f"{folder} was deleted"
    size = format_bytes(written.train.ids.nbytes + written.heldout.ids.nbytes)
    notice(f"{source.name}: tokens are stored in {folder} ({size}); delete that folder when no run needs it")
    return written


def _opened(folder: Path, dtype: np.dtype[Any], vocab_size: int) -> TextSides | None:
    """Return the tokens of a folder; None if it is missing or incomplete."""
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if any((folder / file).stat().st_size != size for file, size in index["sizes"].items()):
            return None
        train, heldout = (_mapped(folder / side, dtype) for side in _SIDES)
        return TextSides(index["documents"], train, heldout, index["whole"], vocab_size, index["digest"], folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mapped(path: Path, dtype: np.dtype[Any]) -> TokenArray:
    tokens, weights = path.with_suffix(".tokens"), path.with_suffix(".weights")
    return TokenArray(
        MappedTokens(tokens, dtype) if tokens.stat().st_size else np.zeros(0, dtype),
        np.asarray(np.memmap(path.with_suffix(".bounds"), np.dtype("<i8"), mode="r")),
        MappedTokens(weights, np.dtype("<f4")) if weights.stat().st_size else None,
    )


def _split(source: TokenSource, heldout_fraction: float, dtype: np.dtype[Any], folder: Path | None = None) -> TextSides:
    """Read a source and split it, in memory or into the files of a folder."""
    scores = [np.zeros(0)]
    with ExitStack() as files:
        sides = [_Side(files, folder, side, dtype) for side in _SIDES]
        for tokens, part in source.parts:
            for side, chosen in zip(sides, (part >= heldout_fraction, part < heldout_fraction), strict=True):
                side.append(tokens.joined(tokens.documents[chosen], source.separator))
            scores.append(part)
        whole = all(side.tokens for side in sides)
        if not whole:
            every = next(side for side in sides if side.tokens).finished()
            if every.weights is None:
                spans = document_tails(every.documents - [0, source.separator is not None], heldout_fraction)
            else:  # the tail of a row would be held out without its beginning
                rows = split_samples(np.concatenate(scores), heldout_fraction, source.name)
                whole, spans = True, [every.documents[side] for side in rows]
            sides = [_Side(files, folder, side, dtype) for side in _SIDES]
            for side, chosen in zip(sides, spans, strict=True):
                for index in range(len(chosen)):  # one by one: together they may exceed memory
                    side.append(every.joined(chosen[index : index + 1], source.separator))
        train, heldout = (side.finished() for side in sides)
    digest = " ".join(side.digest for side in sides)
    return TextSides(sum(map(len, scores)), train, heldout, whole, source.vocab_size or 0, digest)


class _Side:
    """Documents of one side, appended to arrays in memory, or to files of a folder."""

    def __init__(self, files: ExitStack, folder: Path | None, side: str, dtype: np.dtype[Any]) -> None:
        self.tokens, self._path = 0, None if folder is None else folder / side
        self._dtypes = {".tokens": dtype, ".bounds": np.dtype("<i8"), ".weights": np.dtype("<f4")}
        self._files: dict[str, Any] = {kind: io.BytesIO() for kind in self._dtypes}
        if self._path is not None:
            for path in map(self._path.with_suffix, self._dtypes):
                path.unlink(missing_ok=True)  # not truncated: it may be mapped
                self._files[path.suffix] = files.enter_context(path.open("wb"))
        self._digests = {kind: hashlib.blake2b(digest_size=8) for kind in self._dtypes}
        self._write(".bounds", np.zeros(1))

    def append(self, tokens: TokenArray) -> None:
        self._write(".tokens", tokens.ids)
        self._write(".bounds", tokens.bounds[1:] + self.tokens)
        if tokens.weights is not None:
            self._write(".weights", tokens.weights)
        self.tokens += len(tokens.ids)

    def _write(self, kind: str, values: Any) -> None:
        content = np.asarray(values, self._dtypes[kind]).data
        self._files[kind].write(content)
        self._digests[kind].update(content)

    @property
    def digest(self) -> str:
        return " ".join(digest.hexdigest() for digest in self._digests.values())

    def finished(self) -> TokenArray:
        if self._path is not None:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            return _mapped(self._path, self._dtypes[".tokens"])
        ids, bounds, weights = (
            np.frombuffer(file.getvalue(), self._dtypes[kind]) for kind, file in self._files.items()
        )
        return TokenArray(ids, bounds.astype(np.int64, copy=False), weights if len(weights) else None)
