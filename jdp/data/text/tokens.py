"""The documents of a source as tokens, with the score of each, by which they are split.

The tokens of large texts are kept on disk, and found again by content: a resumed run does not tokenise anew.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.base.disk_cache import Cache, default_folder
from jdp.base.notices import notice
from jdp.data.held_out import content_score, split_documents
from jdp.data.text.documents import Found, corpus_of, text_parts, token_id_parts
from jdp.data.text.token_array import TokenArray, bounds_of, smallest_uint
from jdp.data.text.tokenizers import BYTES, Tokenizer

_MOST_IDS = 2**31  # samples are int32
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


@dataclass(frozen=True, eq=False)
class TokenisedPart:
    """Some documents as tokens."""

    tokens: TokenArray  # the documents, without separators
    # float64 [documents], the `content_score` of each: of its text, or of its ids if it holds no text
    scores: NDArray[np.float64]


def sides_in_memory(
    found: Found, tokenizer: Tokenizer | None, *, field: str | None, vocab_size: int | None, heldout_fraction: float
) -> TextSides:
    """Read and tokenise a source, all of it in memory.

    A tokenizer of None is for a source that holds token ids, below `vocab_size` (None: in [0, 2³¹)).
    """
    if tokenizer is None:
        ids = corpus_of(found.name, token_id_parts(found, field or "input_ids"))
        part, highest = _id_part(ids.documents, ids.name_of, vocab_size)
        size = highest + 1 if vocab_size is None else vocab_size
        tokens, scores = part.tokens.astype(smallest_uint(size)), part.scores
    else:
        corpus, size = corpus_of(found.name, text_parts(found, field or "text")), tokenizer.vocab_size
        entry = None if tokenizer.name == BYTES else _entry_name(tokenizer.identity, corpus.documents)
        if (tokens := _load(entry)) is None:
            tokens = tokenizer.tokenize(corpus.documents, corpus.name_of)
            _store(entry, tokens)
        _report(found.name, _doubtful(tokens, tokenizer), len(corpus.documents), tokenizer)
        scores = _scores(corpus.documents)
    spans = split_documents(scores, tokens.bounds, heldout_fraction)
    separator = None if tokenizer is None else tokenizer.separator
    train, heldout = (join_spans(tokens, side, separator) for side in (spans.train, spans.heldout))
    return TextSides(found.name, len(scores), train, heldout, spans.whole, size)


def tokenised_parts(
    found: Found, tokenizer: Tokenizer | None, *, field: str | None, vocab_size: int
) -> Iterator[TokenisedPart]:
    """Read and tokenise a source, some documents at a time."""
    if tokenizer is None:
        dtype = smallest_uint(vocab_size)
        for part in token_id_parts(found, field or "input_ids"):
            ids, _ = _id_part(part.documents, part.name_of, vocab_size)
            yield TokenisedPart(ids.tokens.astype(dtype), ids.scores)
        return
    doubtful = documents = 0
    for part in text_parts(found, field or "text"):
        tokens = tokenizer.tokenize(part.documents, part.name_of)
        doubtful += _doubtful(tokens, tokenizer)
        documents += len(part.documents)
        yield TokenisedPart(tokens, _scores(part.documents))
    _report(found.name, doubtful, documents, tokenizer)


def join_spans(tokens: TokenArray, spans: NDArray[np.int64], separator: int | None) -> TokenArray:
    """Return spans of tokens (int64 [spans, 2]) as documents, end to end, each closed by any separator."""
    pieces = [tokens.ids[start:end] for start, end in spans.tolist()]
    sizes = spans[:, 1] - spans[:, 0]
    if separator is not None:
        closing = np.array([separator], tokens.ids.dtype)
        pieces = [piece for document in pieces for piece in (document, closing)]
        sizes = sizes + 1
    ids = np.concatenate(pieces) if pieces else tokens.ids[:0]
    return TokenArray(ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _id_part(
    documents: Sequence[NDArray[Any]], name_of: Callable[[int], str], vocab_size: int | None
) -> tuple[TokenisedPart, int]:
    """Return documents of ids, and the highest id. Raises ValueError for one that is out of range."""
    # Signed, as signed and unsigned integers of 64 bits would meet in floats.
    signed = [document.astype(np.int64) if document.dtype == np.uint64 else document for document in documents]
    tokens = TokenArray(np.concatenate(signed), bounds_of(documents))
    highest = _check_ids(tokens, name_of, vocab_size)
    return TokenisedPart(tokens, _scores(document.astype("<u4").tobytes() for document in documents)), highest


def _check_ids(tokens: TokenArray, name_of: Callable[[int], str], vocab_size: int | None) -> int:
    """Return the highest id. Raises ValueError for one that is out of range."""
    limit = _MOST_IDS if vocab_size is None else vocab_size
    lowest, highest = int(tokens.ids.min()), int(tokens.ids.max())
    if lowest < 0 or highest >= limit:
        at = int(np.argmax((tokens.ids < 0) | (tokens.ids >= limit)))
        document = int(np.searchsorted(tokens.bounds, at, side="right")) - 1
        raise ValueError(
            f"token ids must be 0 to {limit - 1}, below vocab_size {limit}; given {tokens.ids[at]} as token "
            f"{at - tokens.bounds[document]} of {name_of(document)} (ids from {lowest} to {highest} in all): give the "
            "vocab_size of the tokenizer that made them, or fix them"
        )
    return highest


def _doubtful(tokens: TokenArray, tokenizer: Tokenizer) -> int:
    """Return the number of documents that contain the separator."""
    separators = np.flatnonzero(tokens.ids == tokenizer.separator)
    return len(np.unique(np.searchsorted(tokens.bounds, separators, side="right")))


def _report(name: str, doubtful: int, documents: int, tokenizer: Tokenizer) -> None:
    """Report text that contains the separator: it would be read as the end of a document."""
    if not doubtful:
        return
    unit = "byte" if tokenizer.name == BYTES else "token"
    notice(f"{name}: {unit} {tokenizer.separator}, which closes a document, is in {doubtful} of them; are they text?")


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
