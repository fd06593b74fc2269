"""Text as samples of fixed length, by random access.

1. Read the documents (`documents.py`), and make tokens of them (`tokenizers.py`): by default a byte is a token.
2. Split them into training and held-out text (jdp.data.held_out) by a hash of their content, whatever the tokenizer.
3. Join a side's documents end to end, each closed by a separator, in one array of the smallest unsigned integers that
   hold a token: the only copy kept. int32 rows are made when a sample is read.
4. Cut it into samples: anywhere ("stream": neighbours share one token, the last target of one being the first token of
   the next, so every token but the very first is a target exactly once), or whole documents side by side ("documents",
   jdp.data.text.packing).
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.core.formatting import format_bytes, format_percent
from jdp.core.notices import notice
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import split_documents
from jdp.data.text.documents import PathLike
from jdp.data.text.packing import PackedSamples
from jdp.data.text.token_array import TokenArray
from jdp.data.text.tokenizers import BYTES, NONE, Bytes, Tokenizer, open_tokenizer
from jdp.data.text.tokens import join_spans, read_tokens

_BYTES = Bytes()
Packing = Literal["stream", "documents"]


@dataclass(frozen=True, eq=False)
class TextSamples:
    """One side of the text, as a sequence of samples.

    Attributes:
        tokens: unsigned integers [tokens], all text of this side.
        length: targets in a sample.

    Sample i is a dict of "tokens" int32 [length], "targets" int32 [length] (the tokens one further on) and "weights"
    float32 [length] (1). The last sample may be short of text: it is filled with zeros of weight 0.

    Raises:
        ValueError: a length below 1, or fewer than two tokens.
    """

    tokens: NDArray[Any]
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1; given {self.length}: give the targets in a sample")
        if len(self.tokens) < 2:
            unit = "byte" if self.tokens.dtype == np.uint8 else "token"
            raise ValueError(
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
        return {"tokens": row[0], "targets": row[1], "weights": (np.arange(self.length) < present).astype(np.float32)}


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
        tokenizer: what made the tokens; None if the source held token ids.
    """

    name: str
    documents: int
    train: TextSamples | PackedSamples
    heldout: TextSamples | PackedSamples
    whole: bool
    vocab_size: int = _BYTES.vocab_size
    tokenizer: Tokenizer | None = _BYTES

    def __str__(self) -> str:
        train, heldout = self.train, self.heldout
        rule = "whole documents, by a hash of their content" if self.whole else "the tail of each document"
        unit = "bytes" if self.tokenizer == _BYTES else "tokens"
        kept = f" ({format_bytes(train.tokens.nbytes + heldout.tokens.nbytes)} in memory)" if unit == "tokens" else ""
        by = f" by {self.tokenizer.name}" if unit == "tokens" and self.tokenizer else ""
        packed = f", {format_percent(train.waste)} of them empty" if isinstance(train, PackedSamples) else ""
        return (
            f"{self.name}: {self.documents:,} documents, {len(train.tokens) + len(heldout.tokens):,} {unit}{by}{kept}; "
            f"train {len(train.tokens):,} {unit} in {len(train):,} samples of {train.length}{packed}, "
            f"held out {len(heldout.tokens):,} {unit} in {len(heldout):,} ({rule})"
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits: alike on two machines, or before and after a resume, only if every sample is (1 s a GB)."""
        digest = hashlib.blake2b(f"{self.train.length} {len(self.train.tokens)} ".encode(), digest_size=8)
        for side in (self.train, self.heldout):
            digest.update(side.tokens.data)
            if isinstance(side, PackedSamples):
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
            raise ValueError(
                f'text and tokens are made of each other by a tokenizer only; given "{NONE}" with {self.name}: '
                "take jdp.data.open_tokenizer on the file that made the tokens"
            )
        return self.tokenizer


def text_data(
    source: PathLike | Sequence[PathLike] = "stdlib",
    *,
    length: int,
    heldout_fraction: float = 0.05,
    suffixes: Sequence[str] | None = None,
    field: str | None = None,
    tokenizer: str = BYTES,
    packing: Packing = "stream",
    vocab_size: int | None = None,
) -> TextData:
    """Read text and make samples of it.

    Args:
        source: "stdlib" (the source text of Python's own standard library, about 12 MB, different from one version of
            Python to the next), or files, globs, directories, data sets ("hf:…"): see `read_corpus`. All of it is held
            in memory: while it is read as bytes, afterwards as tokens of 1, 2 or 4 bytes.
        length: targets in a sample.
        heldout_fraction: in (0, 1), about the share of the text kept from training, by a hash of the content.
        suffixes: which files of a directory are data.
        field: the column that is read of rows; "text" by default, "input_ids" where the tokenizer is "none".
        tokenizer: "bytes"; a tokenizer.json of Hugging Face tokenizers, or the folder that holds it; "none" for a
            source that holds lists of token ids, which are joined end to end as they are, without a separator.
        packing: "stream" joins documents end to end and cuts anywhere; "documents" keeps them whole and separate, with
            "segments" in each sample.
        vocab_size: of the model: token ids are below it. By default that of the tokenizer, or of the source.

    Returns:
        The data, with `train`, `heldout`, `vocab_size`, `tokenizer`, `fingerprint`.

    Raises:
        ValueError: text that does not exist, cannot be read, is empty or shorter than one training sample; a token that
            is not below vocab_size (the message names the file and row); a number out of its range.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1; given {length}: give the targets in a sample")
    if packing not in ("stream", "documents"):
        raise ValueError(f'packing must be "stream" or "documents"; given "{packing}": give one of them')
    opened = None if tokenizer == NONE else open_tokenizer(tokenizer)
    if opened is not None and vocab_size is not None and opened.vocab_size > vocab_size:
        raise ValueError(
            f"a model must have all tokens of its tokenizer; given vocab_size {vocab_size} and {opened.vocab_size} in "
            f"{opened.name}: set vocab_size to {opened.vocab_size} or more"
        )
    corpus = read_tokens(source, opened, suffixes=suffixes, field=field, vocab_size=vocab_size)
    spans = split_documents(corpus.scores, corpus.tokens.bounds, heldout_fraction)
    separator = None if opened is None else opened.separator
    train, heldout = (join_spans(corpus.tokens, side, separator) for side in (spans.train, spans.heldout))
    if packing == "stream" and len(train.ids) < length + 1:
        unit = "bytes" if opened == _BYTES else "tokens"
        raise ValueError(
            f"training text must fill one sample: length {length} needs {length + 1} {unit}; given {len(train.ids)} "
            f"(of {len(train.ids) + len(heldout.ids)} in {corpus.name}, the others held out): give more text or a "
            "smaller length"
        )
    if not spans.whole:
        notice(f"{corpus.name}: too few documents to hold some out whole, so the tail of each is held out")
    return TextData(
        name=corpus.name,
        documents=len(corpus.scores),
        train=_samples(train, length, packing),
        heldout=_samples(heldout, length, packing),
        whole=spans.whole,
        vocab_size=corpus.vocab_size,
        tokenizer=opened,
    )


def encode(text: str) -> NDArray[np.int32]:
    """Return text as bytes.

    Args:
        text: of any length.

    Returns:
        int32 [bytes of its UTF-8].
    """
    return _BYTES.encode(text)


def decode(tokens: ArrayLike) -> str:
    """Return bytes as text; what is not UTF-8 (a character cut in two) becomes �.

    Args:
        tokens: integers [n] below 256.

    Raises:
        ValueError: a token that is not a byte.
    """
    return _BYTES.decode(tokens)


def _samples(tokens: TokenArray, length: int, packing: Packing) -> TextSamples | PackedSamples:
    return TextSamples(tokens.ids, length) if packing == "stream" else PackedSamples(tokens.ids, tokens.bounds, length)
