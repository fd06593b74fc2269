"""The mesh that code is traced for: a model may read it to choose among forms of the same computation.

A step knows its mesh, whose devices may be described ones. A model does not, and JAX's default device may differ.
"""

import math
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

from jdp.base.context import set_while
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.types import Device

_CURRENT: ContextVar[Mesh | None] = ContextVar("jdp_traced", default=None)


def tracing_on(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Have code traced for `mesh` while the context lasts."""
    return set_while(_CURRENT, mesh)


def traced_device() -> Device:
    """Return a device of the kind that the code being traced will run on: outside of a step, JAX's default."""
    if (mesh := _CURRENT.get()) is not None:
        return mesh.devices.flat[0]
    device: Device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def traced_mesh() -> Mesh | None:
    """Return the mesh that the code being traced will run on; None outside of a step."""
    return _CURRENT.get()


def traced_shards() -> int:
    """Return the number of devices that share the rows of the traced code: 1 in `shard_map` and outside of a step."""
    if (mesh := _CURRENT.get()) is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh) if axis not in _manual_axes())


def traced_model_axes() -> dict[str, int]:
    """Return the mesh axes, with their sizes, over which XLA may shard the traced model."""
    if (mesh := _CURRENT.get()) is None:
        return {}
    others = {*batch_axes(mesh), *_manual_axes()}
    return {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in others}


def manual_batch_axes() -> tuple[str, ...]:
    """Return the batch axes along which the traced code sees one device's rows; () if it sees all rows."""
    mesh, manual = _CURRENT.get(), _manual_axes()
    return () if mesh is None else tuple(axis for axis in batch_axes(mesh) if axis in manual)


def is_traced_by_shard() -> bool:
    """Return True inside of `shard_map`, where the traced code sees one device's arrays."""
    return bool(_manual_axes())


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of `mesh` over which the batch is split, outermost first: `replica` if it exists, and `data`."""
    return tuple(filter(mesh.shape.__contains__, (REPLICA, DATA)))


def _manual_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes
