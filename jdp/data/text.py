"""Text as samples of fixed length, by random access; a token is a byte.

1. Read the documents (jdp.data.documents) and part them into training and held-out text (jdp.data.split).
2. Lay a side's documents end to end, each closed by a separator byte, in one uint8 array: the only copy kept, a byte
   a token. int32 rows are made when a sample is read.
3. Cut it into samples. Neighbours share one token, the last target of one being the first token of the next, so every
   token but the very first is a target exactly once.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.data.batches import NumpyBatch
from jdp.data.documents import TEXT_SUFFIXES, PathLike, read_corpus
from jdp.data.split import split_documents
from jdp.notices import notice

VOCAB_SIZE = 256
SEPARATOR = 0  # the byte that closes each document: text does not use it (but UTF-16 and binaries do)


@dataclass(frozen=True, eq=False)
class TextSamples:
    """One side of the text, as a sequence of samples.

    Attributes:
      tokens: uint8 [bytes], the whole text of this side.
      length: targets in a sample.

    Sample i is a dict of "tokens" int32 [length], "targets" int32 [length] (the tokens one further on) and "weights"
    float32 [length] (1). The last sample may be short of text: it is filled with zeros of weight 0.
    """

    tokens: NDArray[np.uint8]
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}: give the targets in a sample")
        if len(self.tokens) < 2:
            raise ValueError(f"text must hold at least one token and its target, got {len(self.tokens)} byte(s)")

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
    """A corpus parted in two: `train` and `heldout` are sources for `global_batches`; `str()` is one line on it all.

    Attributes:
      name: what was read.
      documents: how many files held text.
      whole: whether documents were held out whole; else the tail of each.
    """

    name: str
    documents: int
    train: TextSamples
    heldout: TextSamples
    whole: bool

    def __str__(self) -> str:
        train, heldout = self.train, self.heldout
        rule = "whole documents, by a hash of their content" if self.whole else "the tail of each document"
        return (
            f"{self.name}: {self.documents:,} documents, {len(train.tokens) + len(heldout.tokens):,} bytes; "
            f"train {len(train.tokens):,} bytes in {len(train):,} samples of {train.length}, "
            f"held out {len(heldout.tokens):,} bytes in {len(heldout):,} ({rule})"
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits: alike on two machines, or before and after a resume, only if every sample is (1 s a GB)."""
        digest = hashlib.blake2b(f"{self.train.length} {len(self.train.tokens)} ".encode(), digest_size=8)
        digest.update(self.train.tokens.data)
        digest.update(self.heldout.tokens.data)
        return digest.hexdigest()


def text_data(
    source: PathLike | Sequence[PathLike] = "stdlib",
    *,
    length: int,
    heldout_fraction: float = 0.05,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
) -> TextData:
    """Reads text and makes samples of it.

    Args:
      source: "stdlib" (the source text of Python's own standard library, about 12 MB, different from one version of
        Python to the next), or files, globs, directories: see `read_corpus`. All of it is held in memory.
      length: targets in a sample.
      heldout_fraction: in (0, 1), about the share of the text kept from training; by content, see `split_documents`.
      suffixes: which files of a directory are text.

    Raises:
      ValueError: text that is not there, cannot be read, is empty or shorter than one training sample; a number out of
        its range.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}: give the targets in a sample")
    corpus = read_corpus(source, suffixes=suffixes)
    split = split_documents(corpus.documents, heldout_fraction)
    train, heldout = _end_to_end(split.train), _end_to_end(split.heldout)
    if len(train) < length + 1:
        raise ValueError(
            f"training text must fill one sample: length {length} needs {length + 1} bytes, got {len(train)} "
            f"(of {len(train) + len(heldout)} in {corpus.name}, the rest held out): give more text or a smaller length"
        )
    if not split.whole:
        notice(f"{corpus.name}: too few documents to hold some out whole, so the tail of each is held out")
    if doubtful := sum(SEPARATOR in document for document in corpus.documents):
        notice(f"{corpus.name}: byte {SEPARATOR}, which closes a document, is in {doubtful} of them; are they text?")
    return TextData(
        name=corpus.name,
        documents=len(corpus.documents),
        train=TextSamples(train, length),
        heldout=TextSamples(heldout, length),
        whole=split.whole,
    )


def encode(text: str) -> NDArray[np.int32]:
    """Text as tokens: int32 [bytes of its UTF-8]."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: ArrayLike) -> str:
    """Tokens [n], integers below 256, as text; bytes that are not UTF-8 (a character cut in two) show as �.

    Raises:
      ValueError: a token that is not a byte.
    """
    values = np.asarray(tokens)
    if values.size and not 0 <= values.min() <= values.max() < VOCAB_SIZE:
        raise ValueError(
            f"a token is a byte, 0 to {VOCAB_SIZE - 1}, got {values.min()} to {values.max()}: "
            f"decode the samples of a model whose vocab_size is {VOCAB_SIZE}"
        )
    return values.astype(np.uint8).tobytes().decode(errors="replace")


def _end_to_end(documents: Sequence[bytes]) -> NDArray[np.uint8]:
    closing = bytes([SEPARATOR])
    return np.frombuffer(b"".join(part for document in documents for part in (document, closing)), np.uint8)
