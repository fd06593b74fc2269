"""Random numbers by global row: local rows draw what they would draw as rows of the whole batch.

A loss that draws `jax.random.bernoulli(rng, 0.9, x.shape)` should get the same masks on one device and on a thousand,
in one microbatch and in eight. Under jit with a global view JAX's partitionable threefry gives that for the whole
batch. Inside `shard_map`, or over a microbatch, the loss sees some of the rows only, and a plain key would give every
shard the same mask.

There the gradient code uses a `BatchKey`: the key, and which global rows the local ones are: row = offset + stride ×
local row. `replay.py` finds the dimension of a draw that counts the rows, and makes a
*row key* for that draw. This is a typed key whose PRNG is threefry of the elements' indices in the global draw.

Counter layout: jax's `threefry2x32` in its partitionable form hashes the 64-bit linear index of each element
(Salmon et al. 2011, doi:10.1145/2063384.2063405; jax-ml/jax design note 3263).
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np

from jdp.base.notices import notice

THREEFRY = "threefry2x32"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchKey:
    """The step's key, and which rows of the global batch the local rows are: local row r is `offset + stride * r`.

    Attributes:
        key: scalar typed key, the same on every shard.
        offset: uint32 scalar, may be traced.
        rows: number of local rows.
        total: number of rows of the global batch.
        stride: distance in the global batch between two local rows.
    """

    key: jax.Array
    offset: jax.Array
    rows: int = field(metadata={"static": True})
    total: int = field(metadata={"static": True})
    stride: int = field(metadata={"static": True})

    def global_indices(self, size: int) -> jax.Array:
        """Return the global indices, uint32 [size], along a dimension of `size` = rows × n, with n for each row."""
        rows = _rows(self.offset, jnp.uint32(self.stride), self.rows)
        each = size // self.rows
        return (rows[:, None] * jnp.uint32(each) + jnp.arange(each, dtype=jnp.uint32)).reshape(size)

    def row_key(self, key: jax.Array, before: int = 1) -> jax.Array:
        """Return a key for one draw of shape [before, rows, ...], which then gives these rows of the global draw.

        `split` with it gives plain streams of the rows' own, which have its type. PRNG implementations other than
        threefry cannot be indexed by element: then the draw differs between meshes, which is reported once.
        """
        if str(jax.random.key_impl(key)) != THREEFRY:
            notice(
                f"dropout masks depend on the mesh: the PRNG {jax.random.key_impl(key)} cannot be indexed by row; "
                "use jax.random.key(seed), which is threefry2x32"
            )
            return self.apart(key)
        assert before * self.total < 2**32, f"{before} × {self.total} rows cannot be indexed"
        words = jax.random.key_data(key)
        row_map = jnp.stack([jnp.asarray(word, jnp.uint32) for word in (self.offset, self.stride, self.total)])
        words = jnp.concatenate([words, jnp.broadcast_to(row_map, (*key.shape, 3))], axis=-1)
        return jax.random.wrap_key_data(words, impl=_impl((self.rows, before)))

    def apart(self, key: jax.Array) -> jax.Array:
        """Return `key` made different for each shard and microbatch."""
        return jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), self.offset).reshape(key.shape)


def batch_key(key: jax.Array, *, rows: int, total: int, offset: Any, stride: int) -> BatchKey:
    """Return a `BatchKey` for `rows` local rows of `total`; see its attributes."""
    return BatchKey(key, jnp.asarray(offset, jnp.uint32), rows, total, stride)


def plain(keys: jax.Array) -> jax.Array:
    """Return the threefry keys in an array of row keys; other keys are returned unchanged."""
    words = jax.random.key_data(keys)
    return jax.random.wrap_key_data(words[..., :2], impl=THREEFRY) if words.shape[-1] == 5 else keys


Layout = tuple[int, int]
"""(rows, before) of a draw of shape [before, rows, ...]."""


@functools.cache
def _impl(layout: Layout) -> Any:
    """Return the PRNG implementation for draws of this layout. Key words: [threefry × 2, offset, stride, total]."""
    rows, before = layout
    return jexr.define_prng_impl(
        key_shape=(5,),
        seed=lambda seed: _own_draw(rows, jax.random.key_data(jax.random.key(seed, impl=THREEFRY))),
        split=functools.partial(_split, layout),
        random_bits=functools.partial(_random_bits, layout),
        fold_in=_fold_in,
        name=f"jdp_rows_{before}x{rows}",
        tag=f"jdp{before}x{rows}",
    )


def _own_draw(rows: int, words: jax.Array) -> jax.Array:
    """Return keys of words [..., 2] whose draws are their own: the local rows are all rows of the batch."""
    row_map = jnp.array([0, 1, rows], jnp.uint32)
    return jnp.concatenate([words, jnp.broadcast_to(row_map, (*words.shape[:-1], 3))], axis=-1)


def _fold_in(words: jax.Array, data: Any) -> jax.Array:
    folded = jax.random.fold_in(jax.random.wrap_key_data(words[:2], impl=THREEFRY), data)
    return jnp.concatenate([jax.random.key_data(folded), words[2:]])


def _split(layout: Layout, words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    counts = _counts(layout, words, shape)
    return _own_draw(layout[0], jnp.stack(_hash(words, *counts), axis=-1))


def _random_bits(layout: Layout, words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    dtype = jnp.dtype(f"uint{bit_width}")
    high, low = _hash(words, *_counts(layout, words, shape))
    if bit_width == 64:
        return (high.astype(dtype) << 32) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _counts(layout: Layout, words: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the high and low words of the linear index, in the global draw, of every element of `shape`.

    If `shape` does not contain the rows, the key's draws are its own, and the index is that in `shape` itself.
    """
    rows, before = layout
    if math.prod(shape) % (rows * before) or not math.prod(shape):
        own = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
        return jnp.asarray((own >> 32).astype(np.uint32)), jnp.asarray(own.astype(np.uint32))
    size = math.prod(shape) // (rows * before)
    assert size < 2**32, f"a draw of {size} elements an example cannot be indexed"
    row = _rows(words[2], words[3], rows)
    if before > 1:
        row = (words[4] * jnp.arange(before, dtype=jnp.uint32)[:, None] + row).reshape(-1)
    high, low = (word[:, None] for word in _multiply(row, size))
    total = low + jnp.arange(size, dtype=jnp.uint32)
    carried = high + (total < low).astype(jnp.uint32)
    return carried.reshape(shape), total.reshape(shape)


def _rows(offset: jax.Array, stride: jax.Array, rows: int) -> jax.Array:
    """Return the global rows, uint32 [rows]."""
    return offset + stride * jnp.arange(rows, dtype=jnp.uint32)


def _multiply(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and low 32 bits of uint32 `a` times `b` < 2**32, by 16-bit halves."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    low, cross = a_low * b_low, a_high * b_low
    middle = (low >> 16) + (cross & 0xFFFF) + a_low * b_high  # < 2**16 + 2**16 + (2**16 - 1)**2 < 2**32
    return a_high * b_high + (cross >> 16) + (middle >> 16), (middle << 16) | (low & 0xFFFF)


def _hash(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return threefry of 64-bit counts: both result words, shaped like the counts."""
    counts = jnp.concatenate([high.ravel(), low.ravel()])
    first, second = jnp.split(jexr.threefry_2x32(words[:2], counts), 2)
    return first.reshape(high.shape), second.reshape(low.shape)
