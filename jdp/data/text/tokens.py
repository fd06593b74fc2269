"""All documents of a source as one line of tokens, with what splitting needs to know of each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.core.notices import notice
from jdp.data.split import content_score
from jdp.data.text.documents import Corpus, PathLike, read_corpus, read_token_ids
from jdp.data.text.token_array import TokenArray, bounds_of, smallest_uint
from jdp.data.text.tokenizers import BYTES, Tokenizer

_MOST_IDS = 2**31  # samples are int32


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """A source, read.

    Attributes:
      name: of the source.
      line: its documents as tokens, without separators.
      scores: float64 [documents], the `content_score` of each: of its text, or of its ids where it holds no text.
      vocab_size: every id is below it.
    """

    name: str
    line: TokenArray
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
    """Reads and tokenises a source; without a tokenizer it holds token ids, which must be below `vocab_size`.

    Raises:
      ValueError: see `read_corpus` and `read_token_ids`; an id out of range, with the file and the row.
    """
    if tokenizer is None:
        ids = read_token_ids(source, suffixes=suffixes, field=field or "input_ids")
        line = _joined(ids.documents)
        highest = _check_ids(line, ids.place, vocab_size)
        size = highest + 1 if vocab_size is None else vocab_size
        line = TokenArray(line.ids.astype(smallest_uint(size), copy=False), line.bounds)
        scores = _scores(document.astype("<u4").tobytes() for document in ids.documents)
        return TokenCorpus(ids.name, line, scores, size)
    corpus = read_corpus(source, suffixes=suffixes, field=field or "text")
    line = tokenizer.line(corpus.documents, corpus.place)
    _report_separators(corpus, line, tokenizer)
    return TokenCorpus(corpus.name, line, _scores(corpus.documents), tokenizer.vocab_size)


def closed(line: TokenArray, spans: NDArray[np.int64], separator: int | None) -> TokenArray:
    """Some stretches of a line, end to end, each closed by the separator (None: by nothing).

    Args:
      spans: int64 [stretches, 2], from and up to.
    """
    parts = [line.ids[start:end] for start, end in spans.tolist()]
    sizes = spans[:, 1] - spans[:, 0]
    if separator is not None:
        closing = np.array([separator], line.ids.dtype)
        parts = [part for document in parts for part in (document, closing)]
        sizes = sizes + 1
    ids = np.concatenate(parts) if parts else line.ids[:0]
    return TokenArray(ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _joined(documents: Sequence[NDArray[Any]]) -> TokenArray:
    """Ids end to end, still in the integers they came in (signed and unsigned ones of 64 bits would meet in floats)."""
    signed = [document.astype(np.int64) if document.dtype == np.uint64 else document for document in documents]
    return TokenArray(np.concatenate(signed), bounds_of(documents))


def _check_ids(line: TokenArray, place: Callable[[int], str], vocab_size: int | None) -> int:
    """The highest id."""
    limit = _MOST_IDS if vocab_size is None else vocab_size
    lowest, highest = int(line.ids.min()), int(line.ids.max())
    if lowest < 0 or highest >= limit:
        at = int(np.argmax((line.ids < 0) | (line.ids >= limit)))
        document = int(np.searchsorted(line.bounds, at, side="right")) - 1
        raise ValueError(
            f"token ids must be 0 to {limit - 1}, below vocab_size {limit}, got {line.ids[at]} as token "
            f"{at - line.bounds[document]} of {place(document)} (ids from {lowest} to {highest} in all): give the "
            "vocab_size of the tokenizer that made them, or mend them"
        )
    return highest


def _report_separators(corpus: Corpus[bytes], line: TokenArray, tokenizer: Tokenizer) -> None:
    """Text that spells what closes a document would be taken for the end of one."""
    found = np.flatnonzero(line.ids == tokenizer.separator)
    if doubtful := len(np.unique(np.searchsorted(line.bounds, found, side="right"))):
        what = f"byte {tokenizer.separator}" if tokenizer.name == BYTES else f"token {tokenizer.separator}"
        notice(f"{corpus.name}: {what}, which closes a document, is in {doubtful} of them; are they text?")


def _scores(documents: Iterable[bytes]) -> NDArray[np.float64]:
    return np.array([content_score(document) for document in documents])
