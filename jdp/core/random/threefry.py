"""Threefry, JAX's usual random numbers, where XLA would take long to compile them.

The words are those of `jax.random` (Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3", section 3.3); the bits of an element follow from the key and its index alone.

- `random_bits`: JAX has the rounds in a loop on CPUs, which XLA compiles in four times the time and does not fuse with
  what uses the bits. Here they are written out.
- `derived`: keys made of keys, in NumPy, without a program.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def random_bits(keys: jax.Array, shape: Sequence[int], bit_width: int) -> jax.Array | None:
    """Return `jax.random.bits` of each key: uint32 [*keys.shape, *shape]; None where they are not of this kind."""
    if not _is_ours(keys) or bit_width != 32 or math.prod(shape) >= 2**32:
        return None
    words = jax.random.key_data(keys).reshape(*keys.shape, *(1 for _ in shape), 2)
    counts: Any = jnp.zeros(tuple(shape), jnp.uint32)
    for i in range(len(shape)):
        stride = np.uint32(math.prod(shape[i + 1 :]))
        counts += jax.lax.broadcasted_iota(jnp.uint32, tuple(shape), i) * stride
    one, other = _threefry(words[..., 0], words[..., 1], jnp.zeros_like(counts), counts)
    return one ^ other


def derived(operation: str, keys: jax.Array, data: Any = None, shape: Sequence[int] = ()) -> jax.Array | None:
    """Return the keys that `jax.random.fold_in` or `split` makes of keys; None where they are not of this kind."""
    if not _is_ours(keys) or not keys.is_fully_addressable or math.prod(shape) >= 2**32:
        return None
    words = np.asarray(jax.random.key_data(keys)).reshape(*keys.shape, *(1 for _ in shape), 2)
    if operation == "random_split":
        counts = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    else:
        counts = np.asarray(data).astype(np.uint32)
    with np.errstate(over="ignore"):  # sums are modulo 2**32
        pair: Any = _threefry(words[..., 0], words[..., 1], np.zeros_like(counts), counts)
    return jax.random.wrap_key_data(jnp.asarray(np.stack(pair, axis=-1)), impl=jax.random.key_impl(keys))


def _is_ours(keys: jax.Array) -> bool:
    partitionable: bool = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return partitionable and str(jax.random.key_impl(keys)) == "threefry2x32"


def _threefry(key0: Any, key1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << rotation | x1 >> 32 - rotation)
        x0, x1 = x0 + schedule[(group + 1) % 3], x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
