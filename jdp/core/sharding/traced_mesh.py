"""The mesh that code is traced for: a model may read it to choose among forms of the same computation.

A step knows its mesh, which may be of devices that are only described. A model does not, and JAX's default device can
be another one.
"""

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jdp.core.types import Device


@dataclass(frozen=True)
class _Traced:
    mesh: Mesh
    batch_axes: tuple[str, ...]


_CURRENT: ContextVar[_Traced | None] = ContextVar("jdp_traced", default=None)


@contextmanager
def tracing_for(mesh: Mesh, batch_axes: Iterable[str]) -> Generator[None]:
    """Set the mesh that code is traced for while the context lasts."""
    token = _CURRENT.set(_Traced(mesh, tuple(batch_axes)))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def traced_device() -> Device:
    """Return a device of the kind that the code being traced will run on: outside of a step, JAX's default."""
    if (traced := _CURRENT.get()) is not None:
        return traced.mesh.devices.flat[0]
    device: Device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def traced_mesh() -> Mesh | None:
    """Return the mesh that the code being traced will run on; None outside of a step."""
    return None if (traced := _CURRENT.get()) is None else traced.mesh


def traced_shards() -> int:
    """Return the number of devices over which the rows are sharded that the traced code sees.

    1 if they are one device's own (`shard_map`), and outside of a step.
    """
    if (traced := _CURRENT.get()) is None:
        return 1
    return math.prod(traced.mesh.shape[axis] for axis in traced.batch_axes if axis not in _manual_axes())


def traced_model_axes() -> dict[str, int]:
    """Return the mesh axes, and their sizes, that XLA may shard the traced model over."""
    if (traced := _CURRENT.get()) is None:
        return {}
    others = {*traced.batch_axes, *_manual_axes()}
    return {axis: size for axis, size in traced.mesh.shape.items() if size > 1 and axis not in others}


def manual_batch_axes() -> tuple[str, ...]:
    """Return the batch axes along which the traced code sees its own rows only; () if it sees all rows."""
    traced, manual = _CURRENT.get(), _manual_axes()
    return () if traced is None else tuple(axis for axis in traced.batch_axes if axis in manual)


def is_traced_by_shard() -> bool:
    """Return True inside of `shard_map`, where the code being traced sees a device's own arrays."""
    return bool(_manual_axes())


def _manual_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes
