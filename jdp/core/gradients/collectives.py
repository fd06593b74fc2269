"""The collectives of `manual`, along the batch axes, on arrays that the model's own axes may shard as well.

In the replica view (`manual`) XLA partitions along the model's axes. For a collective on the complete array XLA would
first gather it along those axes and then send all of it: `model` times as many bytes. No sharding constraint prevents
that. So the collectives run in a `shard_map` over the model's axes, inside the `shard_map` over the batch axes, and
each device sends only its shard.

If a model axis and `data` shard the same dimension, the model axis is the major one. Gathering along `data` then gives
a device its own shard along the model axis. `shard_map` over `data` alone cannot express that order. Such a leaf enters
and leaves the replica view with that dimension reshaped, [..., size, ...] -> [..., M, size / M, ...] at rest. M is the
number of shards along the model's axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.core.batch import interleave
from jdp.core.gradients.boundary import Collective
from jdp.core.gradients.loss_call import mean_over
from jdp.core.gradients.row_keys import RowDraws
from jdp.core.gradients.wire import complete_sum, is_encoded, key_of_shard, scattered_sum, seeds_by_leaf
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import own_axes, traced_device
from jdp.core.sharding.placement import Placement, axes_of, keep_axes, shards
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree


@dataclass(frozen=True)
class GradientSpec:
    """The inputs of a step's gradient, in either partitioning."""

    loss_fn: LossFn
    adapter: Any  # like `trained`, as in `jdp.core.state.Static`
    placements: PyTree  # a tree like the parameters, of `Placement`
    plan: Plan
    settings: StepSettings
    trained: tuple[bool, ...] | None = None
    draws: RowDraws | None = None  # which draws count rows; None if nothing is drawn, or all rows are in one call
    operations: frozenset[str] = frozenset()  # of the loss, as in `View`

    @property
    def strategy(self) -> Strategy:
        """The strategy's row of the table."""
        return self.plan.row

    @property
    def trained_placements(self) -> PyTree:
        """The placements of the gradients: `placements` with None for frozen parameters."""
        return trained_part(self.placements, self.trained)


@dataclass(frozen=True)
class Collectives:
    """Gathers, reduces and shards arrays under `auto`, by constraining global arrays to the plan's specs."""

    spec: GradientSpec

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which a call of the loss gets only its device's rows; empty if it gets all rows."""
        return ()

    @property
    def by_layer(self) -> bool:
        """Whether layer loops gather one layer ahead and reduce one behind."""
        return bool(self.axes) and self.spec.plan.batch_shards > 1

    def _constrained(self, x: jax.Array, partition: PartitionSpec, leading: int) -> jax.Array:
        sharding = NamedSharding(self.spec.plan.mesh, PartitionSpec(*partition[leading:]))
        return jax.lax.with_sharding_constraint(x, sharding)

    def gather(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Gather a shard: from its rest spec to its compute spec."""
        return self._constrained(x, placement.compute, leading)

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Sum a gradient over `data`: from its compute spec to its rest spec."""
        return self._constrained(x, placement.rest, leading)

    def finish(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Sum a gradient at its rest spec over the batch axes that `reduce` left out."""
        return self._constrained(x, placement.rest, leading)

    def constrain(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Return an accumulator of gradients, sharded as the strategy accumulates."""
        each_microbatch = self.spec.strategy.reduce_each_microbatch
        return self._constrained(x, placement.rest if each_microbatch else placement.compute, leading)

    def sum(self, x: jax.Array, /) -> jax.Array:
        """Return a scalar summed over the batch axes."""
        return x

    def average(self, before: PyTree, after: PyTree, /) -> PyTree:
        """Return the model state after a step: floating-point leaves that changed are averaged over the batch axes."""
        return after

    def microbatches(self, batch: Batch, count: int, /) -> Batch:
        """Return the batch with leaves [count, rows / count, ...], interleaved."""
        sharding = NamedSharding(self.spec.plan.mesh, PartitionSpec(None, *self.spec.plan.batch_spec))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(interleave(x, count), sharding), batch)

    def key_of(self, key: jax.Array, rows: int, index: Any, count: int, /) -> jax.Array:
        """Return the key that the loss gets for `rows` rows, microbatch `index` of `count`: a row key if it draws."""
        if (draws := self.spec.draws) is None:
            return key
        own_rows, devices = rows * count, self.spec.plan.batch_shards if self.axes else 1
        device = jax.lax.axis_index(self.axes) if self.axes else 0
        first = jnp.uint32(device) * jnp.uint32(own_rows) + jnp.uint32(index)
        return draws.key(key, offset=first, stride=count, total=own_rows * devices)


def map_leaves(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    """Apply a collective to every leaf of a tree, none of which a layer loop has sliced."""
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)


def sum_leaves(reduction: Collective, grads: PyTree, placements: PyTree, seed: jax.Array | None) -> PyTree:
    """Apply a reduction to every leaf of gradients; with a seed each leaf draws its own rounding."""
    if seed is None:
        return map_leaves(reduction, grads, placements)
    drawn = seeds_by_leaf(grads, seed)
    return jax.tree.map(lambda leaf, placement, own: reduction(leaf, placement, 0, own), grads, placements, drawn)


def to_replica_view(params: PyTree, placements: PyTree, mesh: Mesh) -> PyTree:
    """Reshape each dimension that `data` and a model axis shard: [..., size, ...] -> [..., M, size / M, ...]."""

    def reshape(x: jax.Array, placement: Placement) -> jax.Array:
        count, dim = model_shards(placement, mesh), placement.dim
        if count == 1 or dim is None:
            return x
        return x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])

    return jax.tree.map(reshape, params, placements)


def from_replica_view(grads: PyTree, placements: PyTree, mesh: Mesh) -> PyTree:
    """Reshape global leaves that left `shard_map` to their parameters' shapes, the inverse of `to_replica_view`."""
    return jax.tree.map(lambda x, p: x if model_shards(p, mesh) == 1 else x.reshape(p.shape), grads, placements)


def replica_view_spec(placement: Placement, mesh: Mesh) -> PartitionSpec:
    """Return the rest spec of the array that `to_replica_view` makes: model axes on M, `data` on size / M."""
    dim = placement.dim
    if dim is None or model_shards(placement, mesh) == 1:
        return placement.rest
    own = tuple(axis for axis in axes_of(placement.rest[dim]) if axis != DATA)
    return PartitionSpec(*placement.rest[:dim], own, DATA, *placement.rest[dim + 1 :])


class ManualCollectives(Collectives):
    """The collectives of `manual`: those of `jax.lax`, on a device's own arrays."""

    @property
    def axes(self) -> tuple[str, ...]:
        return self.spec.plan.batch_axes

    def gather(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        if placement.dim is None:
            return x
        mesh, dim = self.spec.plan.mesh, placement.dim - leading
        reshaped = model_shards(placement, mesh) > 1

        def gather(shard: jax.Array) -> jax.Array:
            return _gathered(shard.squeeze(dim) if reshaped else shard, dim)

        before, after = replica_view_spec(placement, mesh)[leading:], placement.compute[leading:]
        return on_model_shards(gather, x, PartitionSpec(*before), PartitionSpec(*after), mesh)

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        """With `wire` the gradient is sent as codes, and each device draws their rounding from `seed`."""
        if placement.dim is None:
            return x
        mesh, dim, wire = self.spec.plan.mesh, placement.dim - leading, self.spec.settings.wire
        reshaped = model_shards(placement, mesh) > 1

        def scatter(operands: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
            gradient, seed = operands
            if wire is not None and is_encoded(gradient.size, mesh.shape[DATA]):
                shard = scattered_sum(wire, gradient, dim, mesh.shape[DATA], key_of_shard(seed, mesh))
                gradient = shard.astype(gradient.dtype)
            else:
                gradient = _scattered(gradient, dim, mesh.shape[DATA])
            return gradient[(slice(None),) * dim + (None,)] if reshaped else gradient, seed

        specs = placement.compute, replica_view_spec(placement, mesh)
        before, after = ((PartitionSpec(*spec[leading:]), PartitionSpec()) for spec in specs)
        return on_model_shards(scatter, (x, seed), before, after, mesh)[0]

    def finish(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        axes = tuple(axis for axis in self.axes if placement.dim is None or axis != DATA)
        mesh, wire = self.spec.plan.mesh, self.spec.settings.wire
        devices = math.prod(mesh.shape[axis] for axis in axes)

        def total(operands: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
            shard, seed = operands
            if wire is None or not is_encoded(shard.size, devices):
                return jax.lax.psum(shard, axes), seed
            return complete_sum(wire, shard, axes, devices, key_of_shard(seed, mesh)).astype(shard.dtype), seed

        specs = PartitionSpec(*replica_view_spec(placement, mesh)[leading:]), PartitionSpec()
        return on_model_shards(total, (x, seed), specs, specs, mesh)[0] if axes else x

    def constrain(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return x

    def sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.axes)

    def average(self, before: PyTree, after: PyTree) -> PyTree:
        def mean(old: jax.Array, new: jax.Array) -> jax.Array:
            is_same = old is new or not jnp.issubdtype(new.dtype, jnp.floating)
            return new if is_same else mean_over(new, self.axes, self.spec.plan.batch_shards)

        return jax.tree.map(mean, before, after)

    def microbatches(self, batch: Batch, count: int) -> Batch:
        return jax.tree.map(lambda x: interleave(x, count), batch)


def _gathered(shard: jax.Array, dim: int) -> jax.Array:
    """Return the shards along `data`, concatenated along `dim`.

    XLA:CPU makes the gathered or scattered dimension the major one in memory, so every use of the result transposes
    element by element. There a new first dimension is gathered, and rows are copied to their places.
    """
    if dim == 0 or traced_device().platform != "cpu":
        return jax.lax.all_gather(shard, DATA, axis=dim, tiled=True)
    shards = jnp.moveaxis(jax.lax.all_gather(shard, DATA, axis=0, tiled=False), 0, dim)
    return shards.reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])


def _scattered(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Return this device's shard, of `count` along `dim`, of the sum over `data`; on CPUs like `_gathered`."""
    if dim == 0 or traced_device().platform != "cpu":
        return jax.lax.psum_scatter(x, DATA, scatter_dimension=dim, tiled=True)
    shards = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    return jax.lax.psum_scatter(jnp.moveaxis(shards, dim, 0), DATA, scatter_dimension=0, tiled=False)


def model_shards(placement: Placement, mesh: Mesh) -> int:
    """Return the number of shards along the model's axes of the dimension that `data` shards."""
    if placement.dim is None:
        return 1
    return shards(placement.compute[placement.dim : placement.dim + 1], mesh.shape)


def on_model_shards(function: Callable[[Any], Any], tree: PyTree, before: PyTree, after: PyTree, mesh: Mesh) -> Any:
    """Apply a function to a tree of arrays, on each device to its shards along the model's axes."""
    names = set(own_axes(mesh))
    if math.prod(mesh.shape[axis] for axis in names) == 1:
        return function(tree)

    def on_model_axes(array: Any, spec: PartitionSpec) -> PartitionSpec | None:
        return None if array is None else PartitionSpec(*(keep_axes(names, entry) for entry in spec))

    before, after = (jax.tree.map(on_model_axes, tree, specs, is_leaf=lambda x: x is None) for specs in (before, after))
    return jax.shard_map(function, in_specs=(before,), out_specs=after, axis_names=names, check_vma=False)(tree)
