"""The random numbers of stochastic rounding: from the step's key, so that rounding is right on average over steps.

A seed is a uint32 scalar that all devices have: one for each microbatch, and under zero3, which reduces in the backward
pass, for each parameter and layer. Each shard of the batch makes a key of its own from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp.core.sharding.mesh import batch_axes
from jdp.core.types import PyTree
from jdp.core.wire.settings import QUANTISED, Wire

_ROUNDING = 0x726F756E
"""Folded into a step's key: the loss draws from the key itself."""


def seeds(wire: Wire, key: jax.Array) -> Callable[[Any], jax.Array | None]:
    """Return a function: number -> seed; None for a wire that rounds nothing."""
    if wire.gradients not in QUANTISED:
        return lambda number: None
    rounding = jax.random.fold_in(key, _ROUNDING)
    return lambda number: jax.random.bits(jax.random.fold_in(rounding, number), (), jnp.uint32)


def seeds_by_row(placements: PyTree, shards: PyTree, seed: jax.Array) -> PyTree:
    """Return `Held.seed` of each parameter that the backward pass reduces; None for the others."""
    leaves, tree = jax.tree.flatten(placements)
    firsts = jax.random.bits(jax.random.fold_in(jax.random.key(0), seed), (len(leaves),), jnp.uint32)
    reduced = [placement.trained and placement.dim is not None for placement in leaves]
    each = zip(firsts, tree.flatten_up_to(shards), reduced, strict=True)
    return tree.unflatten([f + jnp.arange(len(x), dtype=f.dtype) if at_use else None for f, x, at_use in each])


def own_key(seed: jax.Array | None, mesh: Mesh) -> jax.Array | None:
    """Return a shard of the batch's own key; None without a seed.

    Along the model's axes it is the same: there devices may have copies, which have to stay equal.
    """
    if seed is None:
        return None
    key = jax.random.fold_in(jax.random.key(0), seed)
    return jax.random.fold_in(key, jax.lax.axis_index(batch_axes(mesh)))
