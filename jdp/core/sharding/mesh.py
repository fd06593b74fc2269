"""Device meshes with named axes: which devices, and the place of each in the mesh.

- `data`: the batch is split over it, and ZeRO shards parameters, gradients and optimizer state over it.
- `replica`: the batch is split over it too, and every replica holds the whole state, sharded over its `data` (HSDP).
  Only shards of gradients cross it, once a step, so it is the axis for the slow links between hosts.
- Any other axis is the model's own: `model` for tensor parallelism, `expert`, `pipe`. The plan's rules, or the model's
  own metadata, determine which parameters are sharded over it.

Devices are taken host by host, and the last axis varies fastest. So write the model's axes last: if they fit into a
host, they use its fast links. `replica` always varies slowest.
"""

import contextlib
import math
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jdp.base.errors import UserError, public
from jdp.base.machine import choose_platform, provide_threads
from jdp.base.toml import cut
from jdp.core.cluster.agreement import check_device_counts
from jdp.core.sharding.axes import DATA, REPLICA, axis_sizes, check_axes
from jdp.core.types import Device, PyTree

Value = TypeVar("Value")

_ON_CPU = ', by jax.config.update("jax_num_cpu_devices", {0}) before the first use of jax'


@public()
def make_mesh(*, devices: Sequence[Device] | None = None, **axes: int) -> Mesh:
    """Arrange devices into a mesh with named axes.

        >>> mesh = jdp.make_mesh(replica=2, data=-1)  # eight devices: two replicas of four
        >>> dict(mesh.shape)
        {'replica': 2, 'data': 4}

    Devices of a host stay together, otherwise in the order given. The last axis varies fastest and `replica` slowest:
    `make_mesh(replica=2, data=4)` and `make_mesh(data=4, replica=2)` both put devices 0-3 into one replica. On TPUs,
    JAX arranges the axes along the torus.

    Args:
        devices: the devices to arrange; None: all devices of all processes. Give them to use a part of a machine, or
            described devices that this machine does not have.
        axes: axis=size in devices, in the mesh's order; none: `data=-1`. `data` is required. Add `replica` for sharding
            within groups of devices that have fast links (HSDP). Any other name is an axis of the model's own, such as
            `model` for tensor parallelism. One size may be -1: it takes the remaining devices.

    Returns:
        A `jax.sharding.Mesh` whose axes have type Auto.

    Raises:
        ValueError: `devices` is empty or not a list of devices. There is no `data` axis, a size is not positive, or the
            sizes do not multiply to the number of devices. As `Mismatch`: `devices` is None and a process has more
            devices than another.
    """
    if devices is None:
        choose_platform()
        check_device_counts()
    elif not (isinstance(cast("object", devices), Collection) and all(hasattr(one, "platform") for one in devices)):
        raise UserError(f"`devices` is a list of JAX devices; given {cut(repr(devices))}. Leave it out for all.")
    else:
        provide_threads()
    hosts: dict[Any, int] = {}  # in order: the devices of a host are neighbours
    by_host = lambda device: hosts.setdefault((host_of(device), device.process_index), len(hosts))  # noqa: E731
    chosen = sorted(jax.devices() if devices is None else devices, key=by_host)
    if not chosen:
        raise UserError("A mesh needs at least one device; given none. Leave `devices` out for all.")
    axes = axes or {DATA: -1}
    check_axes(axes)
    how = _ON_CPU if devices is None and chosen[0].platform == "cpu" else ""
    sizes = axis_sizes(axes, len(chosen), how)
    slowest_first = sorted(sizes, key=lambda name: name != REPLICA)
    shape = tuple(sizes[name] for name in slowest_first)
    if chosen[0].platform == "tpu":  # a torus: let JAX lay the axes along its links
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, chosen)
    else:
        grid = np.array(chosen).reshape(shape)
    grid = grid.transpose([slowest_first.index(name) for name in sizes])
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def check_mesh(mesh: Mesh) -> None:
    """Check that a mesh has a `data` axis, and only axes of type Auto."""
    if DATA in mesh.shape and {*mesh.axis_types} == {AxisType.Auto}:
        return
    sizes, names = tuple(mesh.shape.values()), tuple(map(str, mesh.axis_names))
    types = ", ".join(f"{name}: {kind}" for name, kind in zip(names, mesh.axis_types, strict=True))
    names = names if DATA in names else (DATA, *names[1:])
    raise UserError(
        f"A plan needs a mesh with a `data` axis, and with axes of type Auto; given {types}. Write jdp.make_mesh, or "
        f"jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(names)}); call the batch's axis `data`, "
        "and its axis over slow links `replica`."
    )


def mesh_of(tree: PyTree) -> Mesh | None:
    """Return the mesh of the first leaf that has a `NamedSharding`, real or described; None if no leaf has one."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


@contextlib.contextmanager
def set_while(variable: ContextVar[Any], value: Value) -> Generator[Value]:
    """Set a context variable while the context lasts, and yield its value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_NONE = Mesh(np.empty((), object), ())
"""A mesh without axes."""
_FOLLOWED: ContextVar[Mesh | None] = ContextVar("jdp_followed", default=None)


@contextlib.contextmanager
def following(mesh: Mesh) -> Generator[None]:
    """Trace code on `mesh` while the context lasts, instead of on another mesh with the same axes."""
    with set_while(_FOLLOWED, mesh), jax.set_mesh(mesh):
        yield


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the mesh of the caller's `jax.set_mesh`."""
    return jax.set_mesh(_NONE)


def followed(mesh: Mesh) -> Mesh:
    """Return the mesh that replaces `mesh` (`following`), or `mesh` itself."""
    other = _FOLLOWED.get()
    return mesh if other is None or other.axis_names != mesh.axis_names else other


def own_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of `mesh` that belong to the model (neither `replica` nor `data`), in mesh order."""
    return tuple([name for name in mesh.axis_names if name not in (REPLICA, DATA)])


def host_of(device: Device) -> Any:
    """Return the group of a device's fast links: JAX's partition (NVLink domain, TPU slice), else its process."""
    if device.platform == "cpu":  # without links: all count as one host
        return 0
    attribute = "partition_index" if hasattr(device, "partition_index") else "slice_index"  # its name in older jax
    partition = getattr(device, attribute, None)
    return device.process_index if partition is None else partition


_CURRENT: ContextVar[Mesh] = ContextVar("jdp_traced", default=_NONE)


def tracing_on(mesh: Mesh) -> AbstractContextManager[Mesh]:
    """Have code traced for `mesh` while the context lasts."""
    return set_while(_CURRENT, mesh)


def traced_device() -> Device:
    """Return a device of the kind that the code being traced will run on: outside of a step, JAX's default."""
    if not (mesh := _CURRENT.get()).empty:
        return mesh.devices.flat[0]
    device: Device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def traced_mesh() -> Mesh | None:
    """Return the mesh that the code being traced will run on; None outside of a step."""
    return None if (mesh := _CURRENT.get()).empty else mesh


def traced_shards() -> int:
    """Return the number of devices that share the rows of the traced code: 1 in `shard_map` and outside of a step."""
    mesh = _CURRENT.get()
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh) if axis not in _manual_axes())


def traced_model_axes() -> dict[str, int]:
    """Return the mesh axes, with their sizes, over which XLA may shard the traced model."""
    mesh = _CURRENT.get()
    others = {*batch_axes(mesh), *_manual_axes()}
    return {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in others}


def manual_batch_axes() -> tuple[str, ...]:
    """Return the batch axes along which the traced code sees one device's rows; () if it sees all rows."""
    return tuple(axis for axis in batch_axes(_CURRENT.get()) if axis in _manual_axes())


def is_traced_by_shard() -> bool:
    """Return True inside of `shard_map`, where the traced code sees one device's arrays."""
    return bool(_manual_axes())


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of `mesh` over which the batch is split, outermost first: `replica` if it exists, and `data`."""
    return tuple(filter(mesh.shape.__contains__, (REPLICA, DATA)))


def _manual_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes
