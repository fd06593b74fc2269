"""The documents of a source as tokens, with the score of each, by which they are split.

The tokens of large texts are kept on disk, and found again by content: a resumed run does not tokenise anew.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.base.disk_cache import Cache, default_folder
from jdp.base.notices import notice
from jdp.data.held_out import Spans, content_score, split_documents, split_samples
from jdp.data.text.documents import Found, corpus_of, text_parts
from jdp.data.text.id_rows import IdColumns, id_parts
from jdp.data.text.token_array import TokenArray, TokenisedPart, join_spans, joined, smallest_uint
from jdp.data.text.tokenizers import BYTES, Tokenizer

WORTHWHILE_BYTES = 2**23  # of text: less is tokenised in a few seconds, so it is not kept on disk


@dataclass(frozen=True, eq=False)
class TextSides:
    """A source, read, tokenised and split in two."""

    name: str  # of the source
    documents: int  # their number
    train: TokenArray  # the documents to train on, each closed by the separator
    heldout: TokenArray  # the documents held out, likewise
    whole: bool  # whether documents were held out whole; else the tail of each
    vocab_size: int  # every token is below it
    folder: Path | None = None  # that holds the tokens; None: they are in memory


@dataclass(frozen=True)
class TextReader:
    """Reads rows or files of text, and tokenises them."""

    field: str  # of rows
    tokenizer: Tokenizer

    @property
    def identity(self) -> str:
        """What the tokens depend on beside the source."""
        return f"{self.field} {self.tokenizer.identity} {self.tokenizer.separator}"

    @property
    def separator(self) -> int | None:
        """The token that closes a document; None: nothing is added."""
        return self.tokenizer.separator

    def vocab_size(self, tokens: TokenArray) -> int:
        """Return a number that every token is below."""
        return self.tokenizer.vocab_size

    def parts(self, found: Found) -> Iterator[TokenisedPart]:
        """Read and tokenise a source, some documents at a time."""
        doubtful = documents = 0
        for part in text_parts(found, self.field):
            tokens = self.tokenizer.tokenize(part.documents, part.name_of)
            doubtful += _with_separator(tokens, self.tokenizer)
            documents += len(part.documents)
            yield TokenisedPart(tokens, _scores(part.documents))
        _report(found.name, doubtful, self.tokenizer)

    def whole(self, found: Found) -> TokenisedPart:
        """Read and tokenise all of a source."""
        corpus = corpus_of(found, self.field)
        entry = None if self.tokenizer.name == BYTES else _entry_name(self.tokenizer.identity, corpus.documents)
        if (tokens := _load(entry)) is None:
            tokens = self.tokenizer.tokenize(corpus.documents, corpus.name_of)
            _store(entry, tokens)
        _report(found.name, _with_separator(tokens, self.tokenizer), self.tokenizer)
        return TokenisedPart(tokens, _scores(corpus.documents))


@dataclass(frozen=True)
class IdReader:
    """Reads rows of ids, with their weights."""

    columns: IdColumns
    limit: int | None  # ids are below it; None: any

    separator = None

    @property
    def identity(self) -> str:
        """What the tokens depend on beside the source."""
        return f"{self.columns} {self.limit}"

    def vocab_size(self, tokens: TokenArray) -> int:
        """Return a number that every token is below."""
        return int(tokens.ids.max()) + 1 if self.limit is None else self.limit

    def parts(self, found: Found) -> Iterator[TokenisedPart]:
        """Read a source, some rows at a time."""
        return id_parts(found, self.columns, self.limit)

    def whole(self, found: Found) -> TokenisedPart:
        """Read all of a source."""
        parts = list(self.parts(found))
        return TokenisedPart(joined([part.tokens for part in parts]), np.concatenate([part.scores for part in parts]))


Reader = TextReader | IdReader


def sides_in_memory(found: Found, reader: Reader, heldout_fraction: float) -> TextSides:
    """Read a source, all of it in memory, and split it."""
    part = reader.whole(found)
    size = reader.vocab_size(part.tokens)
    tokens = part.tokens.astype(smallest_uint(size))
    if tokens.weights is None:
        spans = split_documents(part.scores, tokens.bounds, heldout_fraction)
    else:  # the tail of a row would be held out without what leads to it
        rows = np.stack([tokens.bounds[:-1], tokens.bounds[1:]], axis=1)
        train, heldout = split_samples(part.scores, heldout_fraction, found.name)
        spans = Spans(rows[train], rows[heldout], whole=True)
    train, heldout = (join_spans(tokens, side, reader.separator) for side in (spans.train, spans.heldout))
    return TextSides(found.name, len(part.scores), train, heldout, spans.whole, size)


def _with_separator(tokens: TokenArray, tokenizer: Tokenizer) -> int:
    """Return the number of documents that contain the separator."""
    separators = np.flatnonzero(tokens.ids == tokenizer.separator)
    return len(np.unique(np.searchsorted(tokens.bounds, separators, side="right")))


def _report(name: str, doubtful: int, tokenizer: Tokenizer) -> None:
    """Report text that contains the separator: it would be read as the end of a document."""
    if doubtful:
        unit = "byte" if tokenizer.name == BYTES else "token"
        notice(
            f"{name}: {unit} {tokenizer.separator}, which closes a document, is in {doubtful} of them; are they text?"
        )


def _scores(documents: Iterable[bytes]) -> NDArray[np.float64]:
    return np.array([content_score(document) for document in documents])


# Tokens on disk.


def _entry_name(identity: str, documents: Sequence[bytes]) -> str | None:
    """Return the file name of an entry; None for a text too small to be kept."""
    if sum(map(len, documents)) < WORTHWHILE_BYTES:
        return None
    digest = hashlib.blake2b(identity.encode(), digest_size=20)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return f"{digest.hexdigest()}.npz"


def _load(name: str | None) -> TokenArray | None:
    """Return the tokens of an entry; None if there is no entry that can be read."""
    return _cache().load(name, _read) if name is not None else None


def _store(name: str | None, tokens: TokenArray) -> None:
    """Store tokens as an entry, unless its name is None."""
    if name is not None:
        _cache().store(name, lambda file: np.savez(file, ids=tokens.ids, bounds=tokens.bounds))


def _cache() -> Cache:
    return Cache(default_folder() / "tokens", limit_bytes=2**34, names=r"[0-9a-f]{40}\.npz", contents="tokens")


def _read(file: BinaryIO) -> TokenArray:
    with np.load(file) as arrays:
        return TokenArray(arrays["ids"], arrays["bounds"])
