"""The state that synchronising gradients keeps between steps (`TrainState.sync`), read onto another mesh or setting.

It is not part of the model: a checkpoint without it, or of another setting, still fits, and missing arrays start at
zero. The error of encoding belongs to devices. On another number of devices its sum stays the same, in equal parts: the
next gradients make up for the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.notices import warn
from jdp.checkpoint.format.trees import parsed_text, text_of
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import rest_spec
from jdp.core.sharding.user_mesh import auto_axes, entered, mesh_of_home
from jdp.core.state import ERROR, STACKED
from jdp.core.update.local_steps import stack, unstack

PREFIX = "sync/"
ROUNDS = f"sync/{STACKED}"
_ERROR = f"sync/{ERROR}/"
Read = Callable[[Mapping[str, Any]], dict[str, Any]]


def read_sync(saved: Mapping[str, str], wanted: Mapping[str, Any], read: Read, folder: str) -> dict[str, Any]:
    """Return the leaves of `TrainState.sync` by path: as saved, shared out, or zeros; the last two are reported."""
    described = {path: text_of(leaf.dtype, leaf.shape) for path, leaf in wanted.items()}
    same = {path: leaf for path, leaf in wanted.items() if saved.get(path) == described[path]}
    others = {path: _as_saved(saved[path], leaf) for path, leaf in wanted.items() if path not in same and path in saved}
    shared = {path: source for path, source in others.items() if source is not None and path.startswith(_ERROR)}
    fresh = [path for path in wanted if path not in same and path not in shared]
    if unread := sorted(saved.keys() - wanted.keys()):
        warn(f"{folder}: {len(unread)} arrays that another wire kept are left unread; the first is {unread[0]}")
    if fresh:
        warn(f"{folder}: {len(fresh)} arrays that wire keeps are not in it and start at zero; the first is {fresh[0]}")
    if shared:
        path, source = next(iter(shared.items()))
        warn(
            f"{folder}: what encoding lost on {source.shape[0]} devices is shared out over {wanted[path].shape[0]}, "
            f"its sum unchanged ({len(shared)} arrays)"
        )
    arrays = read({**same, **shared})
    arrays |= {path: _shared_out(arrays[path], wanted[path]) for path in shared}
    zeros = {path: lambda leaf=wanted[path]: jnp.zeros(leaf.shape, leaf.dtype) for path in fresh}
    return arrays | {path: _computed(zero, wanted[path]) for path, zero in zeros.items()}


def read_optimizer_state(
    saved: Mapping[str, str], wanted: Mapping[str, Any], read: Read, folder: str
) -> dict[str, Any]:
    """Return optimizer state that only one of checkpoint and target has for each replica, or for other replicas.

    Replicas of the checkpoint become one state, of floating-point leaves the mean; every replica of the target gets it.
    """
    was, stacks = ROUNDS in saved, ROUNDS in wanted
    sources: dict[str, Any] = {}
    for path, leaf in wanted.items():
        known = saved.get(path, "")
        if not path.startswith("opt_state/") or known == text_of(leaf.dtype, leaf.shape):
            continue
        shape, spec = (leaf.shape[1:], leaf.sharding.spec[1:]) if stacks else (leaf.shape, leaf.sharding.spec)
        if was:
            shape, spec = (_leading(known), *shape), (None, *spec)
        if known == text_of(leaf.dtype, shape):
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
            sources[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    if not sources:
        return {}
    if was:
        warn(f"{folder}: the replicas' optimizer states become one, their mean ({len(sources)} arrays)")

    def convert(array: jax.Array, leaf: Any) -> jax.Array:
        one = unstack(array) if was else array
        return stack(one, leaf.shape[0]) if stacks else one

    arrays = read(sources)
    return {
        path: _computed(lambda x, leaf=wanted[path]: convert(x, leaf), wanted[path], arrays[path]) for path in sources
    }


def _leading(saved: str) -> int:
    """Return the first size in a text such as "float32[8, 4]"; 0 for a scalar."""
    return (*parsed_text(saved)[1], 0)[0]


def _as_saved(saved: str, leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Return the saved array, sharded over the parameter's dimensions; None if it differs in more than its devices."""
    shape = (_leading(saved), *leaf.shape[1:])
    if saved != text_of(leaf.dtype, shape):
        return None
    mesh, own = leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:])
    spec = rest_spec(shape[1:], own, dict(mesh.shape), 0)[0] if DATA in mesh.shape else own
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(None, *spec)))


def _shared_out(array: jax.Array, leaf: Any) -> jax.Array:
    return _computed(lambda x: jnp.broadcast_to(x.sum(axis=0, keepdims=True) / leaf.shape[0], leaf.shape), leaf, array)


def _computed(function: Callable[..., jax.Array], leaf: Any, *arrays: jax.Array) -> jax.Array:
    """Return `function(*arrays)` sharded as `leaf` is, whose mesh may have axes of any type."""
    mesh = mesh_of_home(leaf.sharding.mesh)
    with auto_axes(mesh):
        return jax.jit(lambda *given: function(*entered(given, mesh)), out_shardings=leaf.sharding)(*arrays)
