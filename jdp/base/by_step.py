"""A value that changes at given steps: constant from each one to the next, such as the batch size of a run."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Other = TypeVar("Other")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class ByStep(Generic[Value]):
    """Values, and the steps (or positions) from which on each of them holds.

    >>> sizes = ByStep.of([(0, 64), (1000, 128)])
    >>> sizes.at(999), sizes.at(1000), sizes.total(1002)
    (64, 128, 64256)
    """

    starts: tuple[int, ...]  # ascending, the first is 0
    values: tuple[Value, ...]

    @staticmethod
    def of(given: Any) -> ByStep[Any]:
        """Return a value for all steps, or pairs of a step and a value, as an object. Raises ValueError."""
        if isinstance(given, ByStep):
            return given
        return ByStep(*pairs(given)) if isinstance(given, list | tuple) else ByStep((0,), (given,))

    @property
    def changes(self) -> bool:
        """Whether there is more than one value."""
        return len(self.starts) > 1

    def phase(self, step: int) -> int:
        """Return the index of the value that holds at a step."""
        return bisect.bisect_right(self.starts, step) - 1

    def at(self, step: int) -> Value:
        """Return the value at a step."""
        return self.values[self.phase(step)]

    def total(self: ByStep[Number], step: int) -> Number:
        """Return the sum of the values of all steps before this one."""
        phase = self.phase(step)
        return self._sums[phase] + self.values[phase] * (step - self.starts[phase])

    def reaches(self: ByStep[int], total: int) -> int:
        """Return the first step whose `total` is this or more."""
        phase = max(bisect.bisect_left(self._sums, total) - 1, 0)
        return self.starts[phase] - (self._sums[phase] - total) // self.values[phase]

    @functools.cached_property
    def _sums(self) -> list[Any]:
        sums: list[Any] = [0]
        for (start, end), value in zip(pairwise(self.starts), self.values, strict=False):
            number: Any = value
            sums.append(sums[-1] + number * (end - start))
        return sums

    def map(self, change: Callable[[Value], Other]) -> ByStep[Other]:
        """Return the changed values, at the same steps."""
        return ByStep(self.starts, tuple(map(change, self.values)))


def together(parts: Sequence[ByStep[Value]]) -> ByStep[tuple[Value, ...]]:
    """Return the values of several as one, which changes where any of them does."""
    starts = tuple(sorted({start for part in parts for start in part.starts}))
    return ByStep(starts, tuple(tuple(part.at(start) for part in parts) for start in starts))


def pairs(given: Sequence[Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return the steps and the values of pairs. Raises ValueError unless the steps ascend from 0."""
    if not given or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given):
        raise ValueError("must be one value, or pairs of a step and a value, such as [[0, 64], [1000, 128]]")
    starts = tuple(pair[0] for pair in given)
    if not all(type(start) is int for start in starts):
        raise ValueError("must have whole numbers as steps, as in [[0, 64], [1000, 128]]")
    if starts[0] != 0 or any(first >= second for first, second in pairwise(starts)):
        raise ValueError("must have steps that ascend from 0, as in [[0, 64], [1000, 128]]")
    return starts, tuple(pair[1] for pair in given)
