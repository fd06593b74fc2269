"""What each value of a loss depends on: nothing of the batch, its own row, a sum over rows, or other rows.

A loss is traced for two numbers of rows. A dimension counts rows if its size differs between the two traces. The power
of a constant is how it grows with the rows: 0 not at all, 1 as they do, -1 inversely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

Pair = tuple[int, int]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""In each of the two traces."""
Known = tuple[Callable[[], Any], Callable[[], Any]]
"""How to compute a value without any argument of the loss, in each of the two traces."""
LARGEST = 1 << 22
"""Elements of a constant that is computed."""


@dataclass(frozen=True)
class Const:
    """Does not depend on the batch.

    Attributes:
        varies: the dimensions that count rows and along which elements may differ.
        power: how it grows with the number of rows; None: in no such way.
        known: how to compute it; None where it depends on parameters, state or key.
    """

    varies: frozenset[int] = frozenset()
    power: int | None = 0
    known: Known | None = field(default=None, compare=False)

    def values(self) -> tuple[Any, Any] | None:
        """Return the value in both traces; None where it is unknown."""
        return None if self.known is None else (np.asarray(self.known[0]()), np.asarray(self.known[1]()))

    @property
    def is_zero(self) -> bool:
        """True for what is known to be 0."""
        values = self.values()
        return values is not None and not values[0].any() and not values[1].any()


@dataclass(frozen=True)
class Rows:
    """Each element depends on one row of the batch: on that of its place along `dims`.

    The place along `dims` is (o · units + u) · inner + i, with o < outer and i < inner, for unit u of the batch.

    Attributes:
        dims: the dimensions along which rows differ, major first; () in a loop over rows.
        outer, inner: as above, in each of the two traces.
        power: as of `Const`.
        order: None for the batch's order; else a name for another one, equal where orders are equal.
    """

    dims: tuple[int, ...]
    outer: Pair = (1, 1)
    inner: Pair = (1, 1)
    power: int = 0
    order: Any = None

    @property
    def place(self) -> tuple[Any, ...]:
        """What two values have alike whose elements at equal places depend on the same row."""
        return self.dims, self.outer, self.inner, self.order


@dataclass(frozen=True)
class RowSum:
    """A sum over rows of values that each depend on one row; linear in them.

    Attributes:
        dims: the dimensions along which it is still to be summed.
        power: as of `Const`: of the factor before the sum.
        part: in a loop over rows "part" for the sum of this round's rows, "all" for that of all rounds so far.
    """

    dims: frozenset[int] = frozenset()
    power: int = 0
    part: str | None = None


@dataclass(frozen=True)
class Pieces:
    """An array of indices, concatenated along its last dimension of (size, state)."""

    parts: tuple[tuple[int, Any], ...]


@dataclass(frozen=True)
class Mixed:
    """Depends on other rows; `why` is a sentence's beginning, `line` the source line."""

    why: str
    line: str


@dataclass(frozen=True)
class Unknown:
    """Of no kind above, as far as can be seen."""

    why: str
    line: str


State = Const | Rows | RowSum | Pieces | Mixed | Unknown
S = TypeVar("S", bound="Const | Rows | RowSum")


def moved(state: S, mapping: Mapping[int, int]) -> S:
    """Return the state of a value whose dimensions went where `mapping` says; KeyError if one that counts is gone."""
    if isinstance(state, Const):
        return replace(state, varies=frozenset(map(mapping.__getitem__, state.varies)))
    if isinstance(state, Rows):
        return replace(state, dims=tuple(map(mapping.__getitem__, state.dims)))
    return replace(state, dims=frozenset(map(mapping.__getitem__, state.dims)))


def scales(first: tuple[int, ...], second: tuple[int, ...]) -> frozenset[int]:
    """Return the dimensions that count rows: whose sizes differ between the traces."""
    if first == second:
        return frozenset()
    return frozenset(dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)


def power_of(values: tuple[Any, Any] | None, ratio: float) -> int | None:
    """Return how a known value grows with the rows, of which the second trace has `ratio` times the first's."""
    if values is None or values[0].shape != values[1].shape or not np.issubdtype(values[0].dtype, np.number):
        return 0 if values is not None and np.array_equal(*values) else None
    wide = np.complex128 if np.iscomplexobj(values[0]) else np.float64
    first, second = values[0].astype(wide), values[1].astype(wide)
    for power in (0, 1, -1):
        if np.allclose(first * ratio**power, second, rtol=1e-5, atol=0, equal_nan=True):
            return power
    return None


def reshape_groups(old: Shapes, new: Shapes) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of neighbouring dimensions, old and new, of equally many elements in both traces."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    ranks = len(old[0]), len(new[0])
    while i < ranks[0] or j < ranks[1]:
        before, after = list(range(i, min(i + 1, ranks[0]))), list(range(j, min(j + 1, ranks[1])))
        i, j = i + len(before), j + len(after)
        while (sizes := (_sizes(old, before), _sizes(new, after)))[0] != sizes[1]:
            if j == ranks[1] or (i < ranks[0] and any(a < b for a, b in zip(*sizes, strict=True))):
                before, i = [*before, i], i + 1
            else:
                after, j = [*after, j], j + 1
        groups.append((before, after))
    return groups


def _sizes(shapes: Shapes, dims: list[int]) -> Pair:
    return math.prod(map(shapes[0].__getitem__, dims)), math.prod(map(shapes[1].__getitem__, dims))


def split_rows(state: Rows, old: Shapes, new: Shapes) -> Rows | None:
    """Return the state of `Rows` that are reshaped; None where a row's place cannot be told."""
    if not state.dims:
        return state
    for before, after in reshape_groups(old, new):
        if not set(state.dims) & set(before):
            continue
        first, last = state.dims[0], state.dims[-1]
        between = [dim for dim in before if first <= dim <= last and _sizes(old, [dim]) != (1, 1)]
        if between != [dim for dim in state.dims if _sizes(old, [dim]) != (1, 1)]:
            return None
        outer = _times(state.outer, _sizes(old, [dim for dim in before if dim < first]))
        inner = _times(state.inner, _sizes(old, [dim for dim in before if dim > last]))
        dims = list(after)
        while dims and (left := _divided(outer, _sizes(new, dims[:1]))) is not None:
            outer, dims = left, dims[1:]
        while dims and (left := _divided(inner, _sizes(new, dims[-1:]))) is not None:
            inner, dims = left, dims[:-1]
        return replace(state, dims=tuple(dims), outer=outer, inner=inner)
    return None


def _times(first: Pair, second: Pair) -> Pair:
    return first[0] * second[0], first[1] * second[1]


def _divided(pair: Pair, by: Pair) -> Pair | None:
    """Return what is left of both; None if one does not divide."""
    return None if pair[0] % by[0] or pair[1] % by[1] else (pair[0] // by[0], pair[1] // by[1])
