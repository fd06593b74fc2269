"""Pairs of answers as samples: a row has both, so no device, microbatch or process ever parts them.

1. Both conversations are rendered and encoded as a chat's. A token is stored as 4·id, and 1 more where it is learnt, 2
   more in the rejected one. Only answers after the prompt are learnt.
2. A conversation that is longer than a row is cut at its end. A pair that has no answer left then, or two that are
   alike, is left out, and counted.
3. `reference` has the log-probabilities of both answers under the weights that training starts from.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jdp.data.batches import NumpyBatch
from jdp.data.text.chat import ChatTokenizer
from jdp.data.text.conversations import Conversation
from jdp.data.text.preferences import preference_of
from jdp.data.text.token_array import MappedTokens

_LEARNT, _REJECTED, _ID = 1, 2, 2  # two bits, and how far an id is shifted


@dataclass(frozen=True, eq=False, kw_only=True)
class PreferenceTokenizer(ChatTokenizer):
    """A tokenizer and its chat template. Documents are pairs; one of which an answer has no tokens gets none."""

    format: ClassVar[str] = "preferences"

    @property
    def stored(self) -> int:
        return self.vocab_size << _ID

    def _conversations(self, document: bytes) -> Iterator[tuple[Conversation, int]]:
        pair = preference_of(document)
        for answer in (pair.chosen, pair.rejected):
            yield Conversation([*pair.prompt, *answer], pair.tools), len(pair.prompt)

    def _documents(self, encoded: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        return [_joined(*both) for both in zip(encoded[::2], encoded[1::2], strict=True)]


def _joined(chosen: NDArray[np.int64], rejected: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 4·id and two bits for both, end to end, from 2·id + learnt of each: none if one of them is empty."""
    if not len(chosen) or not len(rejected):
        return chosen[:0]
    return np.concatenate([2 * chosen - (chosen & 1), 2 * rejected - (rejected & 1) + _REJECTED])


@dataclass(eq=False, repr=False)
class PreferenceSamples:
    """One side of the pairs, as a sequence of samples.

    Attributes:
        tokens: unsigned integers [tokens], the pairs of this side end to end, as `PreferenceTokenizer` stores them.
        bounds: int64 [pairs + 1], the start of each pair, and the end of the last.
        length: positions in each of the two rows of a sample.
        reference: float32 [samples, 2], log-probabilities of the chosen and the rejected answers; zeros until it is
            set.

    Sample i is a dict of "tokens" and "targets" int32 [2, length], "weights" float32 [2, length], and "reference"
    float32 [2]. First comes the chosen answer, then the rejected. The weight is 1 where a target is of an answer.

    Raises:
        ValueError: a length below 1, or no pair with two answers in a row of this length.

    >>> import numpy as np
    >>> stored = np.array([4, 9, 6, 15], np.uint8)  # ids 1 and 2, then 1 and 3; the last of each is learnt
    >>> pairs = PreferenceSamples(stored, bounds=np.array([0, 4]), length=2)
    >>> pairs[0]["targets"].tolist(), pairs[0]["weights"].tolist()
    ([[2, 0], [3, 0]], [[1.0, 0.0], [1.0, 0.0]])
    """

    tokens: NDArray[Any] | MappedTokens
    bounds: NDArray[np.int64]
    length: int
    reference: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1; given {self.length}: give the targets in a sample")
        if not len(self):
            raise ValueError(
                f"a row must hold a prompt and some of both answers; given length {self.length}, with which none of "
                f"{len(self.bounds) - 1:,} pairs does: give a larger length, or shorter prompts"
            )
        self.reference = np.zeros((len(self), 2), np.float32)

    @functools.cached_property
    def _layout(self) -> NDArray[np.int64]:
        """The start, the middle and the end of each pair that is kept: int64 [samples, 3]."""
        kept = [self._kept(*span) for span in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)]
        return np.array([pair for pair in kept if pair is not None], np.int64).reshape(-1, 3)

    def _kept(self, start: int, end: int) -> tuple[int, int, int] | None:
        """Return a pair's bounds and middle; None if what fits a row has no answer, or two that are alike."""
        both = self.tokens[start:end]
        middle = int(np.searchsorted(both & _REJECTED, _REJECTED))
        chosen, rejected = both[:middle][: self.length + 1], both[middle:][: self.length + 1] ^ _REJECTED
        learnt = all((each[1:] & _LEARNT).any() for each in (chosen, rejected))
        return (start, start + middle, end) if learnt and not np.array_equal(chosen, rejected) else None

    @property
    def too_long(self) -> int:
        """The number of pairs of which a conversation is cut."""
        return int((np.diff(self._layout, axis=1) - 1 > self.length).any(axis=1).sum())

    @property
    def left_out(self) -> int:
        """The number of pairs of which the cut leaves no answer, or two that are alike."""
        return len(self.bounds) - 1 - len(self)

    @property
    def waste(self) -> float:
        """The fraction of all positions that are empty."""
        return 1 - self._filled / (2 * len(self) * self.length)

    @functools.cached_property
    def learnt(self) -> float:
        """The fraction of the targets, of all but empty positions, that have weight 1."""
        counts = [int((row[1:] & _LEARNT).sum()) for index in range(len(self)) for row in self._rows(index)]
        return sum(counts) / self._filled

    @functools.cached_property
    def _filled(self) -> int:
        return int(np.minimum(np.diff(self._layout, axis=1) - 1, self.length).sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits: alike only if every sample is, but for the reference."""
        digest = hashlib.blake2b(f"{self.length} {self.tokens.dtype}".encode(), digest_size=8)
        for start, _, end in self._layout.tolist():
            digest.update(self.tokens[start:end].tobytes())
        digest.update(self._layout.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        index = range(len(self))[index]
        filled = np.zeros((3, 2, self.length), np.int32)
        tokens, targets, weights = filled
        for row, stored in enumerate(self._rows(index)):
            size = len(stored) - 1
            tokens[row, :size], targets[row, :size] = stored[:-1] >> _ID, stored[1:] >> _ID
            weights[row, :size] = stored[1:] & _LEARNT
        reference = self.reference[index]
        return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32), "reference": reference}

    def _rows(self, index: int) -> list[NDArray[Any]]:
        """Return both conversations of a sample as they are stored, cut."""
        start, middle, end = self._layout[index].tolist()
        return [self.tokens[at : min(stop, at + self.length + 1)] for at, stop in ((start, middle), (middle, end))]
