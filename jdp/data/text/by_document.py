"""The loss of text by document, and the bytes of its targets: from where each target of a sample stands in the text.

The document of a target is the one that its token is in, and the separator belongs to the document that it closes. So a
document that is cut into several samples, or that shares one, is counted once. Sums are in float64.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.data.batches import Source
from jdp.data.mixtures import Concatenated
from jdp.data.text.packing import PackedSamples
from jdp.data.text.samples import TextSamples
from jdp.data.text.tokenizers import Tokenizer

_BEGINNING = 80  # tokens, and characters


class DocumentSums:
    """Nats, tokens and bytes of the documents of a source, added up batch by batch."""

    def __init__(self, source: Source, tokenizer: Tokenizer | None) -> None:
        self._parts = list(_parts(source))
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        self._firsts = np.cumsum([0, *(len(_bounds(part)) - 1 for part in self._parts)])
        self._tokenizer, self._sizes = tokenizer, None if tokenizer is None else tokenizer.byte_counts()
        self._nats, self._tokens, self._bytes = (np.zeros(self._firsts[-1]) for _ in range(3))

    def add(self, first: int, nats: NDArray[Any]) -> None:
        """Add the nats of every target, [rows, length], of the samples from `first` on; rows past the last are none."""
        for index, of_row in enumerate(nats[: max(0, int(self._starts[-1]) - first)], first):
            number = int(np.searchsorted(self._starts, index, side="right")) - 1
            part, index = self._parts[number], index - int(self._starts[number])
            sample, places = part[index], _places(part, index)
            counted = np.flatnonzero((places >= 0) & (sample["weights"] > 0))
            documents = np.searchsorted(_bounds(part), places[counted], side="right") - 1 + self._firsts[number]
            self._nats += np.bincount(documents, of_row[counted], minlength=len(self._nats))
            self._tokens += np.bincount(documents, minlength=len(self._nats))
            if self._sizes is not None:
                sizes = self._sizes[sample["targets"][counted]]
                self._bytes += np.bincount(documents, sizes, minlength=len(self._nats))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each document with targets: its number, its sums, its loss, and how its text begins."""
        found: list[dict[str, Any]] = []
        for document in np.flatnonzero(self._tokens).tolist():
            nats, tokens = float(self._nats[document]), int(self._tokens[document])
            row: dict[str, Any] = {"document": document, "tokens": tokens, "nats": nats, "loss": nats / tokens}
            if self._sizes is not None:
                count = int(self._bytes[document])
                row |= {"bytes": count, "bits_per_byte": nats / math.log(2) / count if count else None}
            found.append(row | ({} if self._tokenizer is None else {"text": self._beginning(document)}))
        return found

    def _beginning(self, document: int) -> str:
        """Return how a document's text begins."""
        assert self._tokenizer is not None
        number = int(np.searchsorted(self._firsts, document, side="right")) - 1
        part, inside = self._parts[number], document - int(self._firsts[number])
        start, end = _bounds(part)[inside : inside + 2].tolist()
        tokens = part.tokens[start : min(end, start + _BEGINNING)]
        known = tokens[(tokens != self._tokenizer.separator) & (tokens < self._tokenizer.vocab_size)]
        return " ".join(self._tokenizer.decode(known).split())[:_BEGINNING]


def text_bytes(source: Source, indices: Iterable[int], tokenizer: Tokenizer) -> int:
    """Return the bytes of text that the targets with weight of some samples stand for."""
    sizes = tokenizer.byte_counts()
    assert sizes is not None
    total = 0
    for index in indices:
        sample = source[index]
        total += int(sizes[sample["targets"][sample["weights"] > 0]].sum())
    return total


def _parts(source: Source) -> Iterator[TextSamples | PackedSamples]:
    """Yield the texts that a source has one after another."""
    if isinstance(source, Concatenated):
        for inner in source.sources:
            yield from _parts(inner)
        return
    assert isinstance(source, TextSamples | PackedSamples)
    yield source


def _bounds(part: TextSamples | PackedSamples) -> NDArray[np.int64]:
    return np.array([0, len(part.tokens)]) if part.bounds is None else part.bounds


def _places(part: TextSamples | PackedSamples, index: int) -> NDArray[np.int64]:
    """Return where in the tokens each target of a sample is; -1 where there is none: int64 [length]."""
    if isinstance(part, PackedSamples):
        return part.places(index)
    places = index * part.length + 1 + np.arange(part.length)
    return np.where(places < len(part.tokens), places, -1)
