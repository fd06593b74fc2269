"""Leaves that are flat and padded at rest, because none of their dimensions divides by the number of devices.

The elements of such a leaf are in a row, followed by zeros, and each device has a part of that row. On 512 devices
GPT-2 then takes 0.7 % more than a 512th; padding one dimension would take 8 % more (experiments/LOG.md). An array of
two dimensions or more has such a row for each index of its leading dimension, if that costs no more than `ROW_BY_ROW`.
These may be the layers of a loop, which gathers one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

ROW_BY_ROW = 0.01
"""Share of a leaf that may be padding where each index of its leading dimension is padded by itself."""
LONGEST_ROW = 2**31 - 1
"""Elements of a row at most: XLA counts positions in 32 bits."""


@dataclass(frozen=True)
class Flat:
    """The form of one leaf that is flat and padded at rest.

    Attributes:
        shape: the leaf's own.
        at_rest: its shape at rest: [padded elements], or [leading, padded elements of one index]; the last dimension
            divides by the number of devices.
    """

    shape: tuple[int, ...]
    at_rest: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], count: int) -> Flat | None:
        """Return the flat form of a leaf on `count` devices; None for a scalar, none or too many elements."""
        if len(shape) == 0 or math.prod(shape) == 0:
            return None
        row = math.prod(shape[1:])
        wide = -(-row // count) * count
        by_row = len(shape) > 1 and wide - row <= ROW_BY_ROW * row
        flat = Flat(shape, (shape[0], wide) if by_row else (-(-math.prod(shape) // count) * count,))
        return flat if flat.at_rest[-1] <= LONGEST_ROW else None

    @property
    def row(self) -> int:
        """Elements of the last dimension at rest that are the leaf's own; zeros follow."""
        return math.prod(self.shape) // math.prod(self.at_rest[:-1])

    def to_rest(self, x: jax.Array) -> jax.Array:
        """Return a leaf in its shape at rest, with zeros after its own elements."""
        more = x.ndim - len(self.shape)
        head = (*x.shape[:more], *self.at_rest[:-1]) if more >= 0 else self.at_rest[-more:-1]
        rows = x.reshape(*head, self.row)
        behind = (0, self.at_rest[-1] - self.row, 0)
        return jax.lax.pad(rows, jnp.zeros((), x.dtype), [(0, 0, 0)] * len(head) + [behind])

    def from_rest(self, x: jax.Array) -> jax.Array:
        """Return a leaf in its own shape, the inverse of `to_rest`."""
        more = x.ndim - len(self.at_rest)
        shape = (*x.shape[:more], *self.shape) if more >= 0 else self.shape[-more:]
        return jax.lax.slice_in_dim(x, 0, self.row, axis=x.ndim - 1).reshape(shape)

    def masked(self, x: jax.Array, fill: jax.typing.ArrayLike = 0) -> jax.Array:
        """Return a leaf at rest with another value after its own elements."""
        own = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < self.row
        return jnp.where(own, x, jnp.asarray(fill, x.dtype))


@dataclass(frozen=True)
class Change:
    """A change of a leaf's form; None is its own shape. Equal changes are one program."""

    given: Flat | None
    wanted: Flat | None

    def __call__(self, x: jax.Array) -> jax.Array:
        own = x if self.given is None else self.given.from_rest(x)
        return own if self.wanted is None else self.wanted.to_rest(own)
