"""Collectives along the batch axes, on the part of an array that a device holds along the model's own axes.

Inside the replica view the model's axes are XLA's. A collective issued there would have XLA gather the array along
those axes first, and then send all of it: `model` times the bytes, and no sharding constraint keeps it from that. So
the collectives here run in a `shard_map` over the model's axes, inside the one over the batch axes.

Where the model's axes cut the dimension that `data` cuts too, the model's cut goes first, so that gathering along
`data` gives a device its own part of the model's. The replica view would have it the other way round, since only `data`
is its own. Such a leaf enters it with that dimension taken apart, [..., M, size / M, ...] at rest, and leaves it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from jdp.core.sharding.mesh import DATA, own_axes
from jdp.core.sharding.placement import Placement, axes_of, shards, spec_entry


def apart(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """A leaf as it enters the replica view: global, at rest."""
    cuts, dim = _cuts(placement, mesh), placement.dim
    if cuts == 1 or dim is None:
        return x
    return x.reshape(*x.shape[:dim], cuts, x.shape[dim] // cuts, *x.shape[dim + 1 :])


def together(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """The same leaf as it left the replica view, with its own shape."""
    return x if _cuts(placement, mesh) == 1 else x.reshape(placement.shape)


def spec_apart(placement: Placement, mesh: Mesh) -> PartitionSpec:
    """The rest spec of what `apart` makes."""
    dim = placement.dim
    if _cuts(placement, mesh) == 1 or dim is None:
        return placement.rest
    own = tuple(axis for axis in axes_of(placement.rest[dim]) if axis != DATA)
    return PartitionSpec(*placement.rest[:dim], own, DATA, *placement.rest[dim + 1 :])


def all_gather(x: jax.Array, placement: Placement, leading: int, mesh: Mesh) -> jax.Array:
    """A shard at rest, its first `leading` dims sliced off -> at its compute spec."""
    if placement.dim is None:
        return x
    dim, shared = placement.dim - leading, _cuts(placement, mesh) > 1

    def gather(part: jax.Array) -> jax.Array:
        part = part.squeeze(dim) if shared else part
        return jax.lax.all_gather(part, DATA, axis=dim, tiled=True)

    return _on_parts(gather, x, spec_apart(placement, mesh), placement.compute, leading, mesh)


def psum_scatter(x: jax.Array, placement: Placement, leading: int, mesh: Mesh) -> jax.Array:
    """A gradient at its compute spec -> at rest, summed over `data`."""
    if placement.dim is None:
        return x
    dim, shared = placement.dim - leading, _cuts(placement, mesh) > 1

    def scatter(part: jax.Array) -> jax.Array:
        part = jax.lax.psum_scatter(part, DATA, scatter_dimension=dim, tiled=True)
        return part[(slice(None),) * dim + (None,)] if shared else part

    return _on_parts(scatter, x, placement.compute, spec_apart(placement, mesh), leading, mesh)


def psum(x: jax.Array, axes: tuple[str, ...], placement: Placement, mesh: Mesh) -> jax.Array:
    """A gradient at rest -> the same, summed over the batch axes given."""
    if not axes:
        return x
    spec = spec_apart(placement, mesh)
    return _on_parts(lambda part: jax.lax.psum(part, axes), x, spec, spec, 0, mesh)


def _cuts(placement: Placement, mesh: Mesh) -> int:
    """Into how many parts the model's own axes cut the dimension that `data` cuts too; 1 where they leave it alone."""
    if placement.dim is None:
        return 1
    return shards(PartitionSpec(spec_entry(placement.compute, placement.dim)), dict(mesh.shape))


def _on_parts(
    collective: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    before: PartitionSpec,
    after: PartitionSpec,
    leading: int,
    mesh: Mesh,
) -> jax.Array:
    """`collective(x)`, each device with its part along the model's own axes; the specs are those of whole leaves."""
    own = set(own_axes(mesh))
    if math.prod(mesh.shape[axis] for axis in own) == 1:
        return collective(x)
    specs = [PartitionSpec(*(_within(own, entry) for entry in spec[leading:])) for spec in (before, after)]
    return jax.shard_map(collective, in_specs=specs[0], out_specs=specs[1], axis_names=own, check_vma=False)(x)


def _within(axes: set[str], entry: object) -> tuple[str, ...]:
    return tuple(axis for axis in axes_of(entry) if axis in axes)
