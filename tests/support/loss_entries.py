"""The table of losses: what an entry is, short ways to say its parameters and batches, and a language model.

`losses_table` holds it. Nothing here knows how `jdp` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclass(frozen=True)
class Entry:
    """A loss function, and what it is called with.

    Attributes:
        init: (rng) -> parameters, or an NNX module.
        batch: (rows) -> arrays whose leading dimension is the row.
        loss: (model, batch, rng) -> `jdp.Loss`, or the mean over the rows.
    """

    init: Callable[[Any], Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable[[Any, Any, Any], Any]

    def __repr__(self) -> str:
        return self.loss.__name__


def entry(table, init, batch):
    """Put the function below into `table`."""

    def put(loss):
        table.append(Entry(init, batch, loss))
        return loss

    return put


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


def mlp(params, x):
    """Two layers: `up` and `down`."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def unit(x):
    """Scale the last dimension to length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# A model: one block of a GPT.

WORDS, WIDTH, LENGTH = 11, 8, 6


class Block(nnx.Module):
    """One layer of a GPT, with dropout."""

    def __init__(self, rngs):
        self.embed, self.position = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.before, self.after = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        q, k, v = (part.reshape(*part.shape[:2], 2, -1) for part in jnp.split(self.qkv(self.before(x)), 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.reshape(x.shape)))
        return self.embed.attend(self.after(x))


def init_block(rng):
    return Block(nnx.Rngs(rng))
