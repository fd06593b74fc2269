"""Collectives along the batch axes on arrays that the model's own axes shard as well.

In the replica view (`manual`) XLA partitions along the model's axes. A collective there on the complete array would
have XLA gather it along those axes first and then send all of it: `model` times the bytes. No sharding constraint
prevents that. So the collectives here run in a `shard_map` over the model's axes, inside the one over the batch axes:
each device sends its shard only.

If a model axis shards the dimension that `data` shards too, the model axis is the major one. Gathering along `data`
then gives a device its own shard along the model axis. `shard_map` over `data` alone cannot express that order. Such a
leaf enters and leaves the replica view with that dimension reshaped, [..., size, ...] -> [..., M, size / M, ...] at
rest. M is the number of shards along the model's axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdp.base.words import Encoding
from jdp.core.gradients.wire import complete_sum, encodes, key_of_shard, scattered_sum
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import own_axes
from jdp.core.sharding.placement import Placement, axes_of, keep_axes, shards
from jdp.core.sharding.traced_mesh import traced_device
from jdp.core.types import PyTree


def to_replica_view(params: PyTree, placements: PyTree, mesh: Mesh) -> PyTree:
    """Reshape global leaves at rest for `shard_map`: [..., size, ...] -> [..., M, size / M, ...].

    Only the dimension that both `data` and a model axis shard is reshaped; other leaves are returned unchanged.
    """

    def reshape(x: jax.Array, placement: Placement) -> jax.Array:
        count, dim = model_shards(placement, mesh), placement.dim
        if count == 1 or dim is None:
            return x
        return x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])

    return jax.tree.map(reshape, params, placements)


def from_replica_view(grads: PyTree, placements: PyTree, mesh: Mesh) -> PyTree:
    """Reshape global leaves that left `shard_map` to their parameters' shapes, the inverse of `to_replica_view`."""

    def reshape(x: jax.Array, placement: Placement) -> jax.Array:
        return x if model_shards(placement, mesh) == 1 else x.reshape(placement.shape)

    return jax.tree.map(reshape, grads, placements)


def replica_view_spec(placement: Placement, mesh: Mesh) -> PartitionSpec:
    """Return the rest spec of the array that `to_replica_view` makes: model axes on M, `data` on size / M."""
    dim = placement.dim
    if dim is None or model_shards(placement, mesh) == 1:
        return placement.rest
    own = tuple(axis for axis in axes_of(placement.rest[dim]) if axis != DATA)
    return PartitionSpec(*placement.rest[:dim], own, DATA, *placement.rest[dim + 1 :])


def all_gather(x: jax.Array, placement: Placement, leading: int, mesh: Mesh) -> jax.Array:
    """Gather a shard along `data`: rest spec, its first `leading` dimensions sliced off -> compute spec."""
    if placement.dim is None:
        return x
    dim, reshaped = placement.dim - leading, model_shards(placement, mesh) > 1

    def gather(shard: jax.Array) -> jax.Array:
        return _gathered(shard.squeeze(dim) if reshaped else shard, dim)

    before, after = replica_view_spec(placement, mesh)[leading:], placement.compute[leading:]
    return on_model_shards(gather, x, PartitionSpec(*before), PartitionSpec(*after), mesh)


def psum_scatter(
    x: jax.Array,
    placement: Placement,
    leading: int,
    mesh: Mesh,
    *,
    wire: Encoding | None = None,
    seed: jax.Array | None = None,
) -> jax.Array:
    """Sum a gradient over `data` and scatter it: compute spec, first `leading` dimensions sliced off -> rest spec.

    If it is sent as codes (`wire`), each device draws their rounding from `seed`.
    """
    if placement.dim is None:
        return x
    dim, reshaped = placement.dim - leading, model_shards(placement, mesh) > 1

    def scatter(operands: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        gradient, seed = operands
        if wire is not None and encodes(wire, gradient.size, mesh.shape[DATA]):
            shard = scattered_sum(wire, gradient, dim, mesh.shape[DATA], key_of_shard(seed, mesh))
            gradient = shard.astype(gradient.dtype)
        else:
            gradient = _scattered(gradient, dim, mesh.shape[DATA])
        return gradient[(slice(None),) * dim + (None,)] if reshaped else gradient, seed

    specs = placement.compute, replica_view_spec(placement, mesh)
    before, after = ((PartitionSpec(*spec[leading:]), PartitionSpec()) for spec in specs)
    return on_model_shards(scatter, (x, seed), before, after, mesh)[0]


def _gathered(shard: jax.Array, dim: int) -> jax.Array:
    """Return the shards along `data`, concatenated along `dim`.

    XLA:CPU makes the dimension that is gathered or scattered the major one in memory, so that every use of the result
    transposes element by element. There a new first dimension is gathered, and rows are copied to their places.
    """
    if dim == 0 or traced_device().platform != "cpu":
        return jax.lax.all_gather(shard, DATA, axis=dim, tiled=True)
    shards = jnp.moveaxis(jax.lax.all_gather(shard, DATA, axis=0, tiled=False), 0, dim)
    return shards.reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])


def _scattered(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Return this device's one of `count` shards along `dim` of the sum over `data`; on CPUs as `_gathered` gathers."""
    if dim == 0 or traced_device().platform != "cpu":
        return jax.lax.psum_scatter(x, DATA, scatter_dimension=dim, tiled=True)
    shards = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    return jax.lax.psum_scatter(jnp.moveaxis(shards, dim, 0), DATA, scatter_dimension=0, tiled=False)


def psum(
    x: jax.Array,
    axes: tuple[str, ...],
    placement: Placement,
    leading: int,
    mesh: Mesh,
    *,
    wire: Encoding | None = None,
    seed: jax.Array | None = None,
) -> jax.Array:
    """Sum a gradient at its rest spec, `leading` dimensions sliced off, over batch axes; its sharding stays."""
    if not axes:
        return x
    devices = math.prod(mesh.shape[axis] for axis in axes)

    def total(operands: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        shard, seed = operands
        if wire is None or not encodes(wire, shard.size, devices):
            return jax.lax.psum(shard, axes), seed
        return complete_sum(wire, shard, axes, devices, key_of_shard(seed, mesh)).astype(shard.dtype), seed

    specs = PartitionSpec(*replica_view_spec(placement, mesh)[leading:]), PartitionSpec()
    return on_model_shards(total, (x, seed), specs, specs, mesh)[0]


def model_shards(placement: Placement, mesh: Mesh) -> int:
    """Return the number of shards along the model's axes of the dimension that `data` shards."""
    if placement.dim is None:
        return 1
    return shards(placement.compute[placement.dim : placement.dim + 1], mesh.shape)


def on_model_shards(function: Callable[[Any], Any], tree: PyTree, before: PyTree, after: PyTree, mesh: Mesh) -> Any:
    """Apply `function` to each device's shards along the model's axes of a tree of arrays; it returns such a tree."""
    names = set(own_axes(mesh))
    if math.prod(mesh.shape[axis] for axis in names) == 1:
        return function(tree)

    def on_model_axes(array: Any, spec: PartitionSpec) -> PartitionSpec | None:
        return None if array is None else PartitionSpec(*(keep_axes(names, entry) for entry in spec))

    before, after = (jax.tree.map(on_model_axes, tree, specs, is_leaf=lambda x: x is None) for specs in (before, after))
    return jax.shard_map(function, in_specs=(before,), out_specs=after, axis_names=names, check_vma=False)(tree)
