"""Sends each device's parts of arrays to a device of the next host, over the devices' links."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on

_AT_ONCE = 2**28
"""Bytes that a device receives at once; one part may be larger."""


def received(
    arrays: Mapping[str, Any], paths: Sequence[str], route: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, jax.Array]]:
    """Yield each of these arrays with its parts one host further: a device has what its source in `route` holds."""
    some, held = list[str](), 0
    for path in paths:
        x = arrays[path]
        size = x.addressable_shards[0].data.nbytes
        if some and held + size > _AT_ONCE:
            yield from zip(some, _sent([arrays[each] for each in some], route), strict=True)
            some, held = [], 0
        some.append(path)
        held += size
    if some:
        yield from zip(some, _sent([arrays[each] for each in some], route), strict=True)


def _sent(arrays: Sequence[Any], route: tuple[tuple[int, int], ...]) -> Sequence[jax.Array]:
    mesh = arrays[0].sharding.mesh
    specs = tuple(x.sharding.spec for x in arrays)
    with tracing_on(mesh):
        return _permuted(on_device(tuple(arrays)), mesh, specs, route)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _permuted(
    arrays: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[PartitionSpec, ...], route: tuple[tuple[int, int], ...]
) -> tuple[jax.Array, ...]:
    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(shard, mesh.axis_names, route) for shard in shards)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(*arrays)
