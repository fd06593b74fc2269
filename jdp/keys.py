"""Random keys that know which rows of the global batch they stand for.

A loss that draws `jax.random.bernoulli(rng, 0.9, x.shape)` should get the same masks on one device and on a thousand,
in one microbatch and in eight. Under jit with a global view JAX's partitionable threefry gives that for the whole
batch. Inside `shard_map`, or over a microbatch, the loss sees some of the rows only, and a plain key would give every
shard the same mask.

So there the loss gets a *batch key*: an ordinary typed key whose PRNG implementation is threefry, plus the affine map
from its local rows to the global ones, row = offset + stride × local row. A draw whose leading size is the number of
local rows, or a multiple of it (examples flattened into tokens: [rows × length, width]), is taken to be per example,
and yields exactly the rows that the global draw would have. Any other draw is the plain threefry draw: the same on
every shard, as a draw without a batch dimension is in the global view. What all examples share, but has a leading size
of that kind, is drawn per shard: good noise, which then depends on the mesh.

`fold_in` and `split` carry the map along. `split(rng, rows)`, the idiom for one key an example, gives the examples' own
keys, and so does a multiple of `rows` (`jax.random.gamma` splits a key for each element); `split(rng)` in two always
gives two streams.

Counter layout: jax's `threefry2x32` in its partitionable form hashes the 64-bit linear index of each element
(Salmon et al. 2011, doi:10.1145/2063384.2063405; jax-ml/jax design note 3263).
"""

import functools
import math
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp

from jdp.notices import notice

THREEFRY = "threefry2x32"


def batch_key(key: jax.Array, *, rows: int, offset: Any, stride: int) -> jax.Array:
    """A key for `rows` local rows, of which row r is row `offset + stride * r` of the global batch.

    Args:
        key: a typed threefry key, the same on every shard. Other implementations cannot be indexed by element: they get
            `fold_in(key, offset)` instead, which differs between meshes, and that is said once.
        rows: local rows of the batch.
        offset: uint32 scalar, may be traced.
        stride: distance in the global batch between two local rows.
    """
    if str(jax.random.key_impl(key)) != THREEFRY:
        notice(
            f"dropout masks depend on the mesh: the PRNG {jax.random.key_impl(key)} cannot be indexed by row; "
            "use jax.random.key(seed), which is threefry2x32"
        )
        return jax.random.fold_in(key, offset)
    words = jax.random.key_data(key)
    place = jnp.stack([jnp.asarray(offset, jnp.uint32), jnp.asarray(stride, jnp.uint32)])
    return jax.random.wrap_key_data(jnp.concatenate([words, place]), impl=_impl(rows))


@functools.cache
def _impl(rows: int) -> Any:
    """The PRNG implementation for a given number of local rows. Key words: [threefry, threefry, offset, stride]."""
    return jexr.define_prng_impl(
        key_shape=(4,),
        seed=_seed,
        split=functools.partial(_split, rows),
        random_bits=functools.partial(_random_bits, rows),
        fold_in=_fold_in,
        name=f"jdp_rows_{rows}",
        tag=f"jdp{rows}",
    )


def _plain(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words[:2], impl=THREEFRY)


def _seed(seed: jax.Array) -> jax.Array:
    words = jax.random.key_data(jax.random.key(seed, impl=THREEFRY))
    return jnp.concatenate([words, jnp.array([0, 1], jnp.uint32)])


def _fold_in(words: jax.Array, data: Any) -> jax.Array:
    folded = jax.random.key_data(jax.random.fold_in(_plain(words), data))
    return jnp.concatenate([folded, words[2:]])


def _split(rows: int, words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if shape == (rows,) != (2,) or (len(shape) == 1 and shape[0] > rows > 2 and shape[0] % rows == 0):
        bits = _hash(words, *_row_counts(rows, words, shape))  # these keys draw for themselves from here on
        alone = jnp.broadcast_to(jnp.array([0, 1], jnp.uint32), (*shape, 2))
        return jnp.concatenate([jnp.stack(bits, axis=-1), alone], axis=-1)
    keys = jax.random.key_data(jax.random.split(_plain(words), shape))
    return jnp.concatenate([keys, jnp.broadcast_to(words[2:], (*shape, 2))], axis=-1)


def _random_bits(rows: int, words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    dtype = jnp.dtype(f"uint{bit_width}")
    if not shape or shape[0] % rows or not math.prod(shape):
        return jax.random.bits(_plain(words), shape, dtype)
    high, low = _hash(words, *_row_counts(rows, words, shape))
    if bit_width == 64:
        return (high.astype(dtype) << 32) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _row_counts(rows: int, words: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """High and low words of the linear index, in the global draw, of every element of `shape` (row-major by row)."""
    size = math.prod(shape) // rows
    assert size < 2**32, f"a draw of {size} elements an example cannot be indexed"
    row = words[2] + words[3] * jnp.arange(rows, dtype=jnp.uint32)
    high, low = (word[:, None] for word in _multiply(row, size))
    total = low + jnp.arange(size, dtype=jnp.uint32)
    carried = high + (total < low).astype(jnp.uint32)
    return carried.reshape(shape), total.reshape(shape)


def _multiply(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of uint32 `a` times `b` < 2**32, by 16-bit halves."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    low, cross = a_low * b_low, a_high * b_low
    middle = (low >> 16) + (cross & 0xFFFF) + a_low * b_high  # < 2**16 + 2**16 + (2**16 - 1)**2 < 2**32
    return a_high * b_high + (cross >> 16) + (middle >> 16), (middle << 16) | (low & 0xFFFF)


def _hash(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry of 64-bit counts: both result words, shaped like the counts."""
    counts = jnp.concatenate([high.ravel(), low.ravel()])
    first, second = jnp.split(jexr.threefry_2x32(words[:2], counts), 2)
    return first.reshape(high.shape), second.reshape(low.shape)
