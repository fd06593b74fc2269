"""Values on which a loss is tried: weights and rows in general position, and keys that draw a constant."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdp.core.gradients.loss_call import traced_dtype
from jdp.core.types import Batch, PyTree


def moved_weights(params: PyTree, amount: jax.Array) -> PyTree:
    """Return parameters, plus noise if `amount` is not 0: weights such as zeros hide that rows change each other."""
    size = jnp.minimum(amount, 1)

    def moved(number: int, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # constant arrays get more noise, because effects of several zeros (a head, the last scale of a block) multiply
        noise, spread = jax.random.normal(jax.random.key(number), x.shape), jnp.std(x)
        return (x + size * jnp.where(spread > 0, 0.1 * spread + 0.02, 0.3) * noise).astype(x.dtype)

    return _map_numbered(moved, params)


def _map_numbered(function: Callable[[int, jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Map a function of a leaf's number and the leaf itself."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(function, range(len(leaves)), leaves))


def rows_at(batch: Batch, numbers: np.ndarray, sharding: NamedSharding) -> Batch:
    """Return the rows of a batch with these numbers, [*numbers.shape, ...]."""

    def taken(x: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(x[numbers.ravel()], sharding)
        return rows.reshape(*numbers.shape, *x.shape[1:])

    return jax.tree.map(taken, batch)


def moved_rows(batch: Batch, amount: jax.Array) -> Batch:
    """Return rows [sets, count, ...] that all differ if `amount` is 1, also in their means; with 2, not in integers.

    Positive numbers stay positive, and no integer exceeds the largest of its array.
    """
    size = jnp.minimum(amount, 1)

    def moved(number: int, x: jax.Array) -> jax.Array:
        uniform, dtype = jax.random.uniform(jax.random.key(number), x.shape), x.dtype
        if jnp.issubdtype(x.dtype, jnp.floating):
            largest = jnp.max(jnp.abs(x), initial=0.0)
            sizes = jax.random.uniform(jax.random.key(-1), (*x.shape[:2], *(1,) * (x.ndim - 2)))
            x = x * (1 + size * (uniform - 0.5)) + size * 0.3 * largest * (1 - uniform)
            return (x * (1 + size * (sizes - 0.5))).astype(dtype)
        if x.dtype == jnp.bool_:
            return x ^ ((uniform < 0.3) & (amount > 0))
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return x
        low, high = jnp.minimum(0, jnp.min(x, initial=0)), jnp.max(x, initial=0)
        drawn = (low + uniform * (high - low + 1).astype(jnp.float32)).astype(x.dtype)
        return jnp.where(amount > 1, x[:1, :1], jnp.where(amount > 0, jnp.minimum(drawn, high), x))

    return _map_numbered(moved, jax.tree.map(jnp.asarray, batch))


def drawn_like(tree: PyTree, shardings: PyTree, *, integers: int = 1, positive: bool = False) -> PyTree:
    """Return sharded arrays with these shapes: integers up to `integers`, other numbers near 0, or 1 if `positive`."""

    def drawn(number: int, like: Any) -> jax.Array:
        key, shape, dtype = jax.random.key(number), like.shape, like.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            floats = jax.random.uniform(key, shape) + 0.5 if positive else 0.3 * jax.random.normal(key, shape)
            return floats.astype(dtype)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), shape)
        return jax.random.randint(key, shape, 0, integers + 1).astype(dtype)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, traced_dtype(x)), tree)
    return jax.jit(lambda: _map_numbered(drawn, shapes), out_shardings=shardings)()


@functools.cache
def _constant_impl() -> Any:
    return jexr.define_prng_impl(
        key_shape=(1,),
        seed=jnp.atleast_1d,  # it is never called
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=lambda key, width, shape: jnp.full(shape, 0x7333333333333333 >> (64 - width), f"uint{width}"),
        fold_in=lambda key, data: key,
        name="jdp_constant",
        tag="jdpc",
    )


def constant_key() -> jax.Array:
    """Return a key that always draws the same: uniform 0.45, normal -0.13, the identity as permutation."""
    return jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_constant_impl())
