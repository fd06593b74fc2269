"""Healing: a copy that differs is overwritten, on its device, with the bits of the majority.

1. The differences, and the majority for each, come from `replicas`.
2. In one program a leaf, a device of the majority gives its shard and the others give zeros. The sum over the axes that
   replicate the leaf is that shard, on every device that should hold it. The sum is of integers, so every bit stays:
   payloads of NaN, -0.0.
3. The result is compared again.

Only copies are made equal. What a wrong copy did to earlier steps stays, as the gradients of all devices are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.tree_paths import path_of
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on
from jdp.core.sharding.placement import axes_of
from jdp.core.types import PyTree
from jdp.guard.replicas import Difference, check_replicas, fingerprints, raise_for, words_of

_GIVES, _TAKES = 1, 2
"""The role of a device in the repair of a leaf; 0: neither."""


def heal_replicas(state: PyTree, *, what: str = "the state") -> tuple[PyTree, tuple[Difference, ...]]:
    """Compare all replicas bit for bit, and overwrite each that differs from the majority. All processes must call it.

    This makes the copies equal again, no more: steps since the copy went wrong summed its gradients with the others'.
    For the bits of a run without the fault, restore a checkpoint from before the last call that found no difference, as
    `jdp train` does.

        >>> wrong = [np.full(2, float(device.id == 5)) for device in jax.devices()]  # device 5 has another copy
        >>> x = jax.make_array_from_single_device_arrays((2,), plan.replicated, jax.device_put(wrong, jax.devices()))
        >>> healed, differences = jdp.guard.heal_replicas({"x": x})
        >>> differences[0].path, [device.id for device in differences[0].devices], jdp.guard.check_replicas(healed)
        ('x', [5], 1)

    Args:
        state: a train state, or any pytree of arrays that `jdp.Plan` placed.
        what: the state's name in errors. Give it when a loop has several.

    Returns:
        The state, with the leaves that differed replaced, and the differences: path, devices at fault, devices that
        agree. Without any, the state itself and ().

    Raises:
        CorruptState: copies differ and none has a majority, such as one of two; or they differ after the repair too.
            On every process, with the same text.
    """
    taken = fingerprints(state)
    differences = () if taken is None else tuple(taken.differences())
    if not differences:
        return state, ()
    raise_for([each for each in differences if not each.agreeing], what)

    def repaired(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        own = [each for each in differences if each.path == path_of(path)]
        return _repaired(leaf, own) if own else leaf

    state = jax.tree.map_with_path(repaired, state)
    check_replicas(state, what=f"{what}, repaired,")
    return state, differences


def _repaired(leaf: jax.Array, differences: Sequence[Difference]) -> jax.Array:
    """Return a leaf in which each device at fault has the shard of one that agrees with the majority."""
    home = leaf.sharding
    assert isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh)
    mesh = home.mesh
    devices = list(mesh.devices.flat)
    roles = np.zeros(len(devices), np.int8)
    for each in differences:
        roles[devices.index(each.agreeing[0])] = _GIVES
        roles[[devices.index(device) for device in each.devices]] = _TAKES
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    placed = jax.make_array_from_callback(roles.shape, rows, lambda index: roles[index])
    with tracing_on(mesh):
        return jax.device_put(_copied_over(on_device(leaf), placed, mesh, home.spec), home)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _copied_over(leaf: jax.Array, roles: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Copy the shards of the devices that give to those that take; `roles` is int8 [devices]."""
    sharded = {axis for entry in spec for axis in axes_of(entry)}
    replicated = tuple(axis for axis in mesh.axis_names if axis not in sharded)

    def local(shard: jax.Array, role: jax.Array) -> jax.Array:
        words = words_of(shard)
        given = lax.psum(jnp.where(role[0] == _GIVES, words, 0), replicated)
        return _of_words(jnp.where(role[0] == _TAKES, given, words), shard.dtype)

    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    bits = jax.random.key_data(leaf) if is_key else leaf
    in_specs = (spec, PartitionSpec(mesh.axis_names))
    bits = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(bits, roles)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf)) if is_key else bits


def _of_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the array of a dtype that has these bits: the inverse of `words_of`."""
    if dtype == jnp.bool_:
        return words.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real, imag = _of_words(words, jnp.finfo(dtype).dtype)
        return lax.complex(real, imag)
    bits = jax.dtypes.itemsize_bits(dtype)
    return lax.bitcast_convert_type(words if bits >= 32 else words.astype(f"uint{bits}"), dtype)
