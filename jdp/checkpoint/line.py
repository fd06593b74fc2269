"""Where a run stands among the checkpoints of a directory, so that one that went back keeps what it learns.

Only numbers are known of a state, so what a number stands for follows from what was restored and saved through the
directory: a run that restored step 2 and saves step 3 writes another step 3 than the one that is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax


class Line:
    """The steps of one run, in the order of training.

    Attributes:
        at: the step that was saved or restored last; None before.
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self._own: set[int] = set()
        self._left: set[int] = set()
        self._arrays: list[weakref.ref[Any]] | None = None

    def restored(self, step: int, there: Sequence[int], state: Any) -> None:
        """The whole state of `step` was read; `there` are all steps. One of our own may be read only to look at it."""
        if step not in self._own:
            self._own = {other for other in there if other <= step}
            self._left = set(there) - self._own
        self.at, self._arrays = step, _references(state)

    def saved(self, step: int, there: Sequence[int], state: Any) -> None:
        """`state` was saved as `step`, after what is `left` was set aside."""
        self._own, self._left = {other for other in there if other < step} | {step}, set()
        self.at, self._arrays = step, _references(state)

    def failed(self) -> None:
        """What was saved last is not there."""
        self.at = self._arrays = None

    def left(self, step: int, there: Sequence[int]) -> list[int]:
        """Of `there`, the steps that are no longer this run's when it saves `step`: those from there on, of before it
        went back, and those after the one that it was resumed from."""
        return [other for other in there if other >= step or other in self._left]

    def skipped(self, step: int) -> list[int]:
        """Own steps between the one that was restored last and `step`: of a line that was left, unless that was
        restored only to look at it."""
        return [other for other in sorted(self._own) if self.at is not None and self.at < other < step]

    def is_other(self, state: Any) -> bool:
        """Whether `state` has other arrays than the one that was saved or restored last."""
        if self._arrays is None:
            return False
        leaves = _arrays_of(state)
        return len(leaves) != len(self._arrays) or any(
            ref() is not leaf for ref, leaf in zip(self._arrays, leaves, strict=True)
        )


def _references(state: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(leaf) for leaf in _arrays_of(state)]


def _arrays_of(state: Any) -> list[jax.Array]:
    """Its arrays; other leaves, such as scalars of NumPy, take no weak references."""
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
