"""Text as samples of fixed length, by random access.

1. Read the documents (`documents.py`), and make tokens of them (`tokenizers.py`): by default a byte is a token.
2. Split them into training and held-out text (jdp.data.held_out) by a hash of their content, whatever the tokenizer.
3. Join a side's documents end to end, each closed by a separator, in one array of the smallest unsigned integers that
   hold a token: the only copy kept. It is in memory, or for 64 MiB of text and more in files (`token_files.py`), with
   the same samples either way. int32 rows are made when a sample is read.
4. Cut it into samples: anywhere ("stream"), or documents side by side ("documents", jdp.data.text.packing). In a
   stream, the last target of a sample is the first token of the next, so every token but the very first is a target
   exactly once.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes, format_percent
from jdp.base.notices import notice
from jdp.base.public import public
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import check_fraction
from jdp.data.text.documents import Found, PathLike, find_text
from jdp.data.text.id_rows import IdColumns, find_ids
from jdp.data.text.packing import PackedSamples
from jdp.data.text.token_array import MappedTokens, TokenArray, smallest_uint
from jdp.data.text.token_files import VERSION, TokenFiles, can_be_written, once
from jdp.data.text.tokenizers import BYTES, Bytes, Tokenizer, open_tokenizer
from jdp.data.text.tokens import IdReader, Reader, TextReader, TextSides, sides_in_memory

Packing = Literal["stream", "documents"]
_BYTES = Bytes()
IN_FILES_BYTES = 2**26  # of a source: less is read in a second or two
_HASHED = 2**22  # tokens at a time


@dataclass(frozen=True, eq=False)
class TextSamples:
    """One side of the text, as a sequence of samples.

    Attributes:
        tokens: unsigned integers [tokens], all text of this side.
        length: targets in a sample.
        bounds: int64 [documents + 1], the start of each document, and the end of the last; None: one document.
        weights: float32 [tokens], from 0 to 1, of each token as a target; None: all are 1.

    Sample i is a dict of "tokens" int32 [length], "targets" int32 [length] (the tokens one further on) and "weights"
    float32 [length] (the targets'). The last sample may be short of text: it is filled with zeros of weight 0.

    Raises:
        ValueError: a length below 1, or fewer than two tokens.

    >>> samples = TextSamples(encode("abcdefg"), length=3)
    >>> decode(samples[1]["tokens"]), decode(samples[1]["targets"])
    ('def', 'efg')
    """

    tokens: NDArray[Any] | MappedTokens
    length: int
    bounds: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | MappedTokens | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"length must be at least 1; given {self.length}: give the targets in a sample")
        if len(self.tokens) < 2:
            unit = "byte" if self.tokens.dtype == np.uint8 else "token"
            raise UserError(
                f"text must hold at least one token and its target; given {len(self.tokens)} {unit}(s): give more text"
            )

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        first = range(len(self))[index] * self.length
        text = self.tokens[first : first + self.length + 1]
        present = len(text) - 1
        row = np.zeros((2, self.length), np.int32)
        row[0, :present], row[1, :present] = text[:-1], text[1:]
        weights = np.zeros(self.length, np.float32)
        weights[:present] = 1 if self.weights is None else self.weights[first + 1 : first + present + 1]
        return {"tokens": row[0], "targets": row[1], "weights": weights}


@dataclass(frozen=True, eq=False)
class TextData:
    """A text split in two: `train` and `heldout` are sources for `global_batches`; `str()` is one line of text.

    Attributes:
        name: of the source.
        documents: the number of files or rows that hold text.
        train: the samples to train on.
        heldout: the samples kept from training.
        whole: whether documents were held out whole; else the tail of each.
        vocab_size: every token is below it.
        tokenizer: it made the tokens; None if the source held token ids.
        folder: that holds the tokens; None: they are in memory.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = pathlib.Path(folder, "book.txt").write_text("All work and no play. " * 20)
    ...     data = text_data(folder, length=16)
    >>> data.documents, data.vocab_size, data.whole
    (1, 256, False)
    """

    name: str
    documents: int
    train: TextSamples | PackedSamples
    heldout: TextSamples | PackedSamples
    whole: bool
    vocab_size: int = _BYTES.vocab_size
    tokenizer: Tokenizer | None = _BYTES
    folder: Path | None = None

    def __str__(self) -> str:
        train, heldout = self.train, self.heldout
        rule = "whole documents, by a hash of their content" if self.whole else "the tail of each document"
        unit = "bytes" if self.tokenizer == _BYTES else "tokens"
        size, place = train.tokens.nbytes + heldout.tokens.nbytes, "memory" if self.folder is None else "files"
        kept = f" ({format_bytes(size)} in {place})" if unit == "tokens" or self.folder else ""
        by = f" by {self.tokenizer.name}" if unit == "tokens" and self.tokenizer else ""
        packed = "" if isinstance(train, TextSamples) else f", {format_percent(train.waste)} of them empty"
        if train.weights is not None:
            packed += f", {format_percent(float(np.mean(train.weights[:] > 0)))} of its tokens count"
        return (
            f"{self.name}: {self.documents:,} documents, {len(train.tokens) + len(heldout.tokens):,} {unit}{by}{kept}; "
            f"train {len(train.tokens):,} {unit} in {len(train):,} samples of {train.length}{packed}, "
            f"held out {len(heldout.tokens):,} {unit} in {len(heldout):,} ({rule})"
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits: alike on two machines, or before and after a resume, only if every sample is (1 s a GB).

        Of tokens in files it is computed once, and kept beside them.
        """
        if self.folder is None:
            return self._fingerprint()
        packing = "stream" if isinstance(self.train, TextSamples) else "documents"
        return once(self.folder / f"fingerprint-{packing}-{self.train.length}", self._fingerprint)

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self.train.length} {len(self.train.tokens)} ".encode(), digest_size=8)
        for side in (self.train, self.heldout):
            for start in range(0, len(side.tokens), _HASHED):
                digest.update(side.tokens[start : start + _HASHED].data)
                if side.weights is not None:
                    digest.update(side.weights[start : start + _HASHED].data)
            if not isinstance(side, TextSamples):
                digest.update(side.bounds.data)
        return digest.hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return text as tokens: int32 [n].

        Args:
            text: of any length.

        Raises:
            ValueError: the source held token ids, so the tokenizer is not known.
        """
        return self._tokenizer().encode(text)

    def decode(self, tokens: ArrayLike) -> str:
        """Return tokens as text.

        Args:
            tokens: integers [n].

        Raises:
            ValueError: a token outside the vocabulary; the source held token ids, so the tokenizer is not known.
        """
        return self._tokenizer().decode(tokens)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"text and tokens are made of each other by a tokenizer only; given {self.name}, rows of ids: name the "
                "tokenizer that made them"
            )
        return self.tokenizer


@public()
def text_data(
    source: PathLike | Sequence[PathLike] = "stdlib",
    *,
    length: int,
    heldout_fraction: float = 0.05,
    field: str = "text",
    tokenizer: str | None = None,
    packing: Packing = "stream",
    ids: str | None = None,
    weights: str | None = None,
    labels: str | None = None,
    attention_mask: str | None = None,
    vocab_size: int | None = None,
    in_files: bool | None = None,
) -> TextData:
    """Read text and make samples of it.

    Args:
        source: "stdlib", files of text (.txt, .md, .rst, .py), globs or directories. `datasets` reads others, such as
            "hf:json:PATH", "hf:parquet:PATH", "hf:NAME" and "hf-stream:NAME:train". "stdlib" is the source text of
            Python's own standard library, about 12 MB, different in each version of Python. With `ids` also .npz files.
        length: targets in a sample.
        heldout_fraction: in (0, 1), about the share of the text kept from training, by a hash of the content.
        field: the column of text in rows.
        tokenizer: "bytes", the default of text; a tokenizer.json of Hugging Face tokenizers, or the folder that holds
            it. Rows of ids need none; it decodes them.
        packing: "stream" joins documents end to end and cuts anywhere; "documents" keeps them whole and separate, with
            "segments" in each sample.
        ids: the column or array of token ids, in place of text. A row is a document, to which nothing is added.
        weights: the column of each id's weight as a target, from 0 to 1. Rows of which no target counts are left out.
        labels: in place of weights, the column of the ids again, or -100 where the weight is 0.
        attention_mask: the column of 1, and 0 at padding, which is left out.
        vocab_size: of the model: token ids are below it. By default that of the tokenizer, or of the source.
        in_files: True keeps the tokens, of 1, 2 or 4 bytes, in files in jdp's cache folder, which the processes of a
            host share. False keeps them in the memory of each process. None: in files from 64 MiB on, and of a stream,
            whose size is not known. A single plain file is one document, which must fit in memory.

    Returns:
        The data, with `train`, `heldout`, `vocab_size`, `tokenizer`, `fingerprint`.

    Raises:
        ValueError: text that does not exist, cannot be read, is empty or shorter than one training sample. A token that
            is not below vocab_size (the message names the file and row). A number out of its range.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = pathlib.Path(folder, "book.txt").write_text("All work and no play. " * 20)
    ...     data = text_data(folder, length=16)
    >>> decode(data.train[0]["tokens"])
    'All work and no '
    """
    if length < 1:
        raise UserError(f"length must be at least 1; given {length}: give the targets in a sample")
    if packing not in ("stream", "documents"):
        raise UserError(f'packing must be "stream" or "documents"; given "{packing}": give one of them')
    if ids is None and (weights or labels or attention_mask):
        raise UserError('weights, labels and attention_mask are of rows of ids; given none: give ids = "input_ids"')
    opened = None
    if tokenizer is not None or ids is None:
        opened = _fitting(open_tokenizer(tokenizer or BYTES), vocab_size)
    if ids is not None:
        limit = vocab_size if opened is None or vocab_size is not None else opened.vocab_size
        reader, found = IdReader(IdColumns(ids, weights, labels, attention_mask), limit), find_ids(source)
    else:
        assert opened is not None
        reader, found = TextReader(field, opened), find_text(source)
    sides = _sides(found, reader, heldout_fraction, in_files)
    if packing == "stream":
        _check_fills(sides, length, "bytes" if opened == _BYTES else "tokens")
    if not sides.whole:
        notice(f"{sides.name}: too few documents to hold some out whole, so the tail of each is held out")
    return TextData(
        name=sides.name,
        documents=sides.documents,
        train=_samples(sides.train, length, packing),
        heldout=_samples(sides.heldout, length, packing),
        whole=sides.whole,
        vocab_size=sides.vocab_size,
        tokenizer=opened,
        folder=sides.folder,
    )


def _fitting(tokenizer: Tokenizer, vocab_size: int | None) -> Tokenizer:
    """Return the tokenizer if a model of this vocabulary has all its tokens."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"a model must have all tokens of its tokenizer; given vocab_size {vocab_size} and {tokenizer.vocab_size} "
            f"in {tokenizer.name}: set vocab_size to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def _check_fills(sides: TextSides, length: int, unit: str) -> None:
    train, every = len(sides.train.ids), len(sides.train.ids) + len(sides.heldout.ids)
    if train < length + 1:
        raise UserError(
            f"training text must fill one sample: length {length} needs {length + 1} {unit}; given {train} (of {every} "
            f"in {sides.name}, the others held out): give more text or a smaller length"
        )


def _sides(found: Found, reader: Reader, heldout_fraction: float, in_files: bool | None) -> TextSides:
    """Return the tokens of both sides, in memory or in files."""
    vocab_size = reader.limit if isinstance(reader, IdReader) else reader.tokenizer.vocab_size
    if in_files is None:
        in_files = found.size is None or found.size >= IN_FILES_BYTES
    if not in_files or vocab_size is None:
        return sides_in_memory(found, reader, heldout_fraction)
    check_fraction(heldout_fraction)
    files = TokenFiles(
        found.name,
        Cache.key(f"tokens {VERSION}", found.identity, repr((reader.identity, vocab_size, heldout_fraction))),
        smallest_uint(vocab_size).newbyteorder("<"),
        vocab_size,
    )
    if (written := files.open()) is not None:
        return written
    if not can_be_written():
        return sides_in_memory(found, reader, heldout_fraction)
    return files.write(reader.parts(found), separator=reader.separator, heldout_fraction=heldout_fraction)


@public()
def encode(text: str) -> NDArray[np.int32]:
    """Return text as bytes.

    Args:
        text: of any length.

    Returns:
        int32 [bytes of its UTF-8].

    >>> encode("hé").tolist()
    [104, 195, 169]
    """
    return _BYTES.encode(text)


@public()
def decode(tokens: ArrayLike) -> str:
    """Return bytes as text; bytes that are not UTF-8 (a character cut in two) become �.

    Args:
        tokens: integers [n] below 256.

    Raises:
        ValueError: a token that is not a byte.

    >>> decode([104, 195, 169])
    'hé'
    """
    return _BYTES.decode(tokens)


def _samples(tokens: TokenArray, length: int, packing: Packing) -> TextSamples | PackedSamples:
    kind = TextSamples if packing == "stream" else PackedSamples
    return kind(tokens.ids, length=length, bounds=tokens.bounds, weights=tokens.weights)
