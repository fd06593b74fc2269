"""What an entry of the table of losses is, and short ways to say which parameters and batches it takes.

`losses_that_sum` and `losses_that_mix` hold the table; `test_losses_table` checks by computing that it is true. Nothing
here knows how `jdp` decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MARK = "# mixes"


@dataclass(frozen=True)
class Entry:
    """A loss function, and what it is called with.

    Attributes:
        name: of the function.
        init: (rng) -> parameters, or an NNX module.
        batch: (rows) -> arrays whose leading dimension is the row.
        loss: (model, batch, rng) -> `jdp.Loss`, or a scalar.
        as_sum: (model, batch, rng) -> the total and weight whose quotient a scalar is; None for a `jdp.Loss` and for a
            mean over the rows.
        draws: whether it draws from `rng`, or its module from its own.
    """

    name: str
    init: Callable[[Any], Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable[[Any, Any, Any], Any]
    as_sum: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    draws: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def marked_lines(self) -> list[int]:
        """The lines of its file at which it mixes rows; any of them is right to name."""
        lines, first = inspect.getsourcelines(self.loss)
        return [number for number, line in enumerate(lines, first) if line.rstrip().endswith(MARK)]


def entry(table, init, batch, as_sum=None, draws=False):
    """Put the function below into `table`."""

    def put(loss):
        table.append(Entry(loss.__name__, init, batch, loss, as_sum, draws))
        return loss

    return put


def quotient(terms):
    """An `as_sum`: of what `terms(model, batch, rng)` returns, values and their weights."""

    def as_sum(model, batch, rng):
        values, weights = terms(model, batch, rng)
        return (values * weights).sum(), weights.sum()

    return as_sum


def weights_of(**shapes):
    """An `init`: normal matrices by name, scaled by their number of inputs."""

    def init(rng):
        keys = jax.random.split(rng, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        return {
            name: jax.random.normal(key, shape) / np.sqrt(max(shape[-2:-1] or (1,))) for key, (name, shape) in pairs
        }

    return init


def batch_of(**leaves):
    """A `batch`: each leaf is drawn as `floats`, `below`, `lengths` or `uneven` say."""

    def batch(rows):
        random = np.random.default_rng(7)
        return {name: leaf(random, rows) for name, leaf in leaves.items()}

    return batch


def floats(*shape):
    return lambda random, rows: random.normal(size=(rows, *shape)).astype(np.float32)


def below(limit, *shape):
    """Integers from 0 to `limit` - 1: tokens, labels, actions."""
    return lambda random, rows: random.integers(0, limit, (rows, *shape), dtype=np.int32)


def lengths(length, kind=np.float32):
    """A mask of padding: 1 where a token counts, of rows of 1 to `length` tokens."""
    return lambda random, rows: (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(kind)


def uneven(random, rows):
    """Weights of rows, zeros among them."""
    return random.permutation(np.arange(rows) % 4).astype(np.float32)


def layer_norm(x, eps=1e-5):
    """Normalise the features of one position."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps)


def mlp(params, x):
    """Two layers: `up` and `down`."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def unit(x):
    """Scale the last dimension to length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
