"""The gather boundary: forward, a shard is cast and gathered; backward, its gradient is summed to the shard's spec.

Each use of a parameter passes the boundary: at the top of the loss, or in a layer loop (`jdp.core.layer_loop`). With
several microbatches the values may be gathered before, and the gradients summed later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jdp.core.precision import Precision
from jdp.core.reading import parameter_scope, reduction_scope
from jdp.core.sharding.mesh import set_while
from jdp.core.sharding.placement import Placement

Collective = Callable[..., jax.Array]
"""(array, placement of its parameter, leading) -> array; `leading` counts dimensions that a layer loop sliced off. A
collective that sums gradients also takes a seed (uint32 scalar), from which it may draw their rounding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A parameter at the boundary: the stack of all layers, or one layer's slice."""

    value: Any  # its shard at rest, or gathered and in compute dtype
    # zeros in the form of its gradient: the loss is differentiated with respect to them; None for frozen parameters
    slot: jax.Array | None = None
    earlier: jax.Array | None = None  # the gradient of earlier microbatches, added before the sum over devices
    seed: jax.Array | None = None  # uint32 [first dimension], for the gradient's rounding; None if it is not rounded


@dataclass(frozen=True)
class Boundary:
    """How the weights of one call of the loss are gathered, and their gradients summed over devices."""

    gather: Collective | None = field(compare=False)  # of a shard; None if values are gathered before
    reduce: Collective | None = field(compare=False)  # sums a gradient over `data`; None if it is summed later
    finish: Collective | None = field(compare=False)  # sums it over the other batch axes; None if a step does so later
    precision: Precision
    with_replicated: bool = False  # replicated parameters go through `reduce` too (ddp); else they are summed later
    sends_twice: bool = False  # `finish` sends sharded gradients too, over a `replica` axis
    again: bool = False  # the backward pass gathers again (zero3); else it uses the forward pass' weights
    # `scan_layers` gathers one layer ahead and reduces one behind; else, without `again`, it uses weights that were
    # gathered at the top of the loss
    in_loops: bool = False

    def reduces(self, placement: Placement) -> bool:
        """Return True for a parameter whose gradient leaves the loss as a sum over devices, if it is trained."""
        return self.reduce is not None and (self.with_replicated or placement.dim is not None)

    def gathered(self, weight: Weight, placement: Placement, leading: int = 0) -> jax.Array:
        """Return a parameter at its compute spec, in compute dtype."""
        if self.gather is None:
            return weight.value
        with parameter_scope(placement.path) if placement.dim is not None else nullcontext():
            return cast_and_gather(self.gather, self.precision.compute_dtype, weight.value, placement, leading)

    def reduced(self, gradient: jax.Array, weight: Weight, placement: Placement, leading: int = 0) -> jax.Array:
        """Return the gradient of a parameter as it is accumulated; `finished` sums a sharded one over the replicas."""
        gradient = gradient.astype(self.precision.reduce_dtype)
        if weight.earlier is not None:
            gradient = weight.earlier + gradient
        if self.reduce is None or not self.reduces(placement):
            return gradient
        seed = weight.seed if weight.seed is None or leading else weight.seed[0]
        with reduction_scope(placement.path, of_layer=leading > 0):
            gradient = self.reduce(gradient, placement, leading, seed)
            finish = self.finish if placement.dim is None else None
            return gradient if finish is None else finish(gradient, placement, leading)

    def finished(self, gradient: jax.Array, placement: Placement, leading: int = 0) -> jax.Array:
        """Sum the result of `reduced` over the replicas."""
        if self.finish is None or placement.dim is None:
            return gradient
        with reduction_scope(placement.path, of_layer=leading > 0):
            return self.finish(gradient, placement, leading)

    def __call__(self, weight: Weight, placement: Placement, leading: int = 0) -> jax.Array:
        """Return the `gathered` parameter; its gradient, `finished`, is the gradient of its slot.

        Without a boundary XLA would move activations under ZeRO-3: 60 times the traffic.
        """
        if weight.slot is None:
            return self.gathered(weight, placement, leading)

        def forward(weight: Weight) -> tuple[jax.Array, Weight]:
            return self.gathered(weight, placement, leading), replace(weight, value=None, slot=None)

        def backward(weight: Weight, cotangent: jax.Array) -> tuple[Weight]:
            gradient = self.reduced(cotangent, weight, placement, leading)
            return (Weight(None, self.finished(gradient, placement, leading)),)

        boundary = jax.custom_vjp(lambda weight: self.gathered(weight, placement, leading))
        boundary.defvjp(forward, backward)
        return boundary(weight)

    def in_derivative(self, weight: Weight, placement: Placement, leading: int) -> jax.Array:
        """Return the same, also for a user who differentiates by values: by models, around a gradient of jdp's."""
        gathered = self.gathered(weight, placement, leading)
        zeros = replace(weight, value=jnp.zeros(gathered.shape, gathered.dtype))
        return gathered + replace(self, gather=None)(zeros, placement, leading)


@dataclass(frozen=True)
class GatherTable:
    """The parameters of the loss that is being traced."""

    boundary: Boundary
    table: dict[int, tuple[jax.Array, Weight, Placement]]  # id of a gathered array -> (it, its shard, its placement)
    trace: Any  # the trace of the loss itself: not of a branch, a loop or a map inside it


_CURRENT: ContextVar[GatherTable | None] = ContextVar("jdp_gathers", default=None)


def gathering(gathers: GatherTable) -> AbstractContextManager[GatherTable]:
    return set_while(_CURRENT, gathers)


def gather_table() -> GatherTable | None:
    return _CURRENT.get()


def current_trace() -> Any:
    return get_opaque_trace_state(convention="nnx")


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
