"""The gather boundary: forward, a shard is cast and gathered; backward, its gradient is reduced to the shard's spec.

Under ZeRO-3 it is at each use of a parameter. Where weights are gathered already (`Held.copy`), it only reduces: the
gradient plus that of earlier microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jdp.core.layers import Gather
from jdp.core.precision import Precision
from jdp.core.sharding.placement import Placement
from jdp.core.tracing.collectives import parameter_scope, reduction_scope

Collective = Callable[[jax.Array, Placement, int], jax.Array]
"""(array, placement of its parameter, leading) -> array; `leading` counts dimensions that a layer loop sliced off."""


class Reduction(Protocol):
    """A `Collective` that sums gradients, and may draw how they are rounded from a seed (uint32 scalar)."""

    def __call__(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Return the sum of a gradient."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """A parameter as the gather boundary gets it, all of it or one layer's slice.

    Attributes:
        shard: at rest; the loss is differentiated with respect to it.
        narrow: the same in compute dtype, where there is nothing else: then only the dtype of `shard` counts.
        copy: gathered, in compute dtype; None where it is gathered at use.
        earlier: the sum of the gradients of the microbatches before, as stored; None where there is none. It is the
            device's own, or a shard where each was reduced.
        seed: uint32, from which the gradient's rounding is drawn; None where it is not rounded. There is one for each
            index of the shard's first dimension, which a layer loop may slice off.
    """

    shard: jax.Array
    narrow: jax.Array | None = None
    copy: jax.Array | None = None
    earlier: jax.Array | None = None
    seed: jax.Array | None = None


def gather_with_reduced_grad(
    send: Collective,
    reduce: Reduction,
    precision: Precision,
    whole: bool = False,
    finish: Collective | None = None,
) -> Gather:
    """Return the gather boundary. Without it XLA would move activations under ZeRO-3: 60 times the traffic."""

    def gather(operand: jax.Array | Held, placement: Placement, leading: int) -> jax.Array:
        held = operand if isinstance(operand, Held) else Held(operand)
        dtype = held.shard.dtype

        def gathered(held: Held) -> jax.Array:
            if held.copy is not None:
                return held.copy
            source = held.shard if held.narrow is None else held.narrow
            with parameter_scope(placement.path) if placement.dim is not None else nullcontext():
                return cast_and_gather(send, precision.compute_dtype, source, placement, leading)

        if not placement.trained:
            return gathered(held)
        at_use = is_reduced_at_use(placement, whole)
        if not at_use and held.narrow is None:
            return cast_and_gather(send, precision.compute_dtype, held.shard, placement, leading)

        def backward(kept: tuple[jax.Array | None, jax.Array | None], cotangent: jax.Array) -> tuple[Held]:
            earlier, seed = kept
            if not at_use:
                return (Held(cotangent.astype(dtype)),)
            gradient = cotangent.astype(precision.reduce_dtype)
            if earlier is not None and finish is None:
                gradient = earlier + gradient
            with reduction_scope(placement.path):
                reduced = reduce(gradient, placement, leading, seed if seed is None or leading else seed[0])
                if finish is not None:
                    reduced = finish(reduced if earlier is None else earlier + reduced, placement, leading)
                return (Held(reduced.astype(dtype)),)

        boundary = jax.custom_vjp(gathered)
        boundary.defvjp(lambda held: (gathered(held), (held.earlier, held.seed)), backward)
        return boundary(held)

    return gather


def is_reduced_at_use(placement: Placement, whole: bool) -> bool:
    """Return True for a parameter whose gradient the gather boundary reduces, if it is trained."""
    return whole or placement.dim is not None


def cast_and_gather(
    gather: Collective, dtype: jnp.dtype, shard: jax.Array, placement: Placement, leading: int
) -> jax.Array:
    """Cast, then gather: the barrier keeps XLA from moving the cast behind the gather, which doubles the bytes.

    Frozen weights of fewer bytes are cast after the gather. Only floating-point arrays are cast.
    """
    cast = jnp.issubdtype(shard.dtype, jnp.floating) and shard.dtype != dtype
    narrow = not placement.trained and shard.dtype.itemsize < dtype.itemsize
    if cast and not narrow:
        shard = shard.astype(dtype)
        if placement.dim is not None:
            shard = jax.lax.optimization_barrier(shard)
    gathered = gather(shard, placement, leading)
    return gathered.astype(dtype) if cast and narrow else gathered
