"""All documents of a source as one array of tokens, with the score of each, by which they are split."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jdp.core.notices import notice
from jdp.data.held_out import content_score
from jdp.data.text.documents import Corpus, PathLike, read_corpus, read_token_ids
from jdp.data.text.token_array import TokenArray, bounds_of, smallest_uint
from jdp.data.text.tokenizers import BYTES, Tokenizer

_MOST_IDS = 2**31  # samples are int32


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """A source, read and tokenised.

    Attributes:
        name: of the source.
        tokens: its documents, without separators.
        scores: float64 [documents], the `content_score` of each: of its text, or of its ids if it holds no text.
        vocab_size: every id is below it.
    """

    name: str
    tokens: TokenArray
    scores: NDArray[np.float64]
    vocab_size: int


def read_tokens(
    source: PathLike | Sequence[PathLike],
    tokenizer: Tokenizer | None,
    *,
    suffixes: Sequence[str] | None,
    field: str | None,
    vocab_size: int | None,
) -> TokenCorpus:
    """Read and tokenise a source.

    Args:
        source: see `read_corpus`.
        tokenizer: None for a source that holds token ids.
        suffixes: which files of a directory are data.
        field: the column that is read of rows; None: "text", or "input_ids" without a tokenizer.
        vocab_size: token ids must be below it; None: they may be anything in [0, 2³¹).

    Raises ValueError: see `read_corpus` and `read_token_ids`; an id out of range, with the file and the row.
    """
    if tokenizer is None:
        ids = read_token_ids(source, suffixes=suffixes, field=field or "input_ids")
        # Signed, as signed and unsigned integers of 64 bits would meet in floats.
        signed = [document.astype(np.int64) if document.dtype == np.uint64 else document for document in ids.documents]
        tokens = TokenArray(np.concatenate(signed), bounds_of(ids.documents))
        highest = _check_ids(tokens, ids.name_of, vocab_size)
        size = highest + 1 if vocab_size is None else vocab_size
        tokens = TokenArray(tokens.ids.astype(smallest_uint(size), copy=False), tokens.bounds)
        scores = _scores(document.astype("<u4").tobytes() for document in ids.documents)
        return TokenCorpus(ids.name, tokens, scores, size)
    corpus = read_corpus(source, suffixes=suffixes, field=field or "text")
    tokens = tokenizer.tokenize(corpus.documents, corpus.name_of)
    _report_separators(corpus, tokens, tokenizer)
    return TokenCorpus(corpus.name, tokens, _scores(corpus.documents), tokenizer.vocab_size)


def join_spans(tokens: TokenArray, spans: NDArray[np.int64], separator: int | None) -> TokenArray:
    """Return spans of tokens as documents, end to end, each closed by the separator.

    Args:
        tokens: to take them from.
        spans: int64 [spans, 2], from and up to.
        separator: a token; None: nothing closes a document.
    """
    pieces = [tokens.ids[start:end] for start, end in spans.tolist()]
    sizes = spans[:, 1] - spans[:, 0]
    if separator is not None:
        closing = np.array([separator], tokens.ids.dtype)
        pieces = [piece for document in pieces for piece in (document, closing)]
        sizes = sizes + 1
    ids = np.concatenate(pieces) if pieces else tokens.ids[:0]
    return TokenArray(ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


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


def _report_separators(corpus: Corpus[bytes], tokens: TokenArray, tokenizer: Tokenizer) -> None:
    """Report text that contains what closes a document: it would be read as the end of one."""
    separators = np.flatnonzero(tokens.ids == tokenizer.separator)
    if doubtful := len(np.unique(np.searchsorted(tokens.bounds, separators, side="right"))):
        unit = "byte" if tokenizer.name == BYTES else "token"
        notice(
            f"{corpus.name}: {unit} {tokenizer.separator}, which closes a document, is in {doubtful} of them; are they "
            "text?"
        )


def _scores(documents: Iterable[bytes]) -> NDArray[np.float64]:
    return np.array([content_score(document) for document in documents])
