"""Device meshes with named axes: how many devices there must be, and the place of each device in the mesh.

The arithmetic, which `axis_sizes` checks:

    devices = replica × data × the model's own axes                     512 = replica 8 × data 8 × model 8
    rows of a global batch = replica × data × accumulate × rows a device computes at once

- `data`: the batch is split over it, and ZeRO shards parameters, gradients and optimizer state over it.
- `replica`: the batch is split over it too, but the state is not: every replica holds all of it, sharded over its own
  `data` (HSDP). Only shards of gradients cross it, once a step, so it is the axis for the slow links between hosts.
- Any other axis is the model's own, and the batch is not split over it: `model` for tensor parallelism, `expert`,
  `pipe`. The plan's rules, or the model's own metadata, determine which parameters are sharded over it; XLA moves the
  activations. Pipeline stages are a dimension of the parameters that a rule shards over `pipe`; the model itself passes
  activations from stage to stage. TP × PP × DP × replicas is model × pipe × data × replica: 512 = 8 × 2 × 8 × 4.

Devices are taken host by host and the last axis varies fastest: neighbouring devices differ along the last axes, which
therefore stay on a host's fast links if they fit. `replica` varies slowest, wherever it is written.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jdp.base.context import set_while
from jdp.base.errors import UserError
from jdp.base.machine import choose_platform, provide_threads
from jdp.base.notices import notice
from jdp.base.public import public
from jdp.base.toml import cut
from jdp.core.cluster.handshake import check_device_counts
from jdp.core.sharding.axes import DATA, REPLICA, axis_sizes, check_axes
from jdp.core.types import Device, PyTree


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
        axes: axis=size in devices, in the order that the mesh has them. No axes at all means `data=-1`. `data` is
            required. Add `replica` for sharding within groups of devices that have fast links (HSDP). Any other name is
            an axis of the model's own, such as `model` for tensor parallelism. One size may be -1: it takes the devices
            that are left.

    Returns:
        A `jax.sharding.Mesh` whose axes have type Auto.

    Raises:
        ValueError: `devices` are no devices. There are none or no `data` axis, a size is not positive, or the sizes do
            not multiply to the number of devices. As `Mismatch`: `devices` is None and a process has more devices than
            another.
    """
    if devices is None:
        choose_platform()
        check_device_counts()
    elif not isinstance(cast("object", devices), Collection) or not all(
        hasattr(device, "platform") for device in devices
    ):
        raise UserError(
            f"`devices` are devices of JAX, in a list; given {cut(repr(devices))}. Write devices=jax.devices()[:4], or "
            "leave it out for all."
        )
    else:
        provide_threads()
    chosen = _host_by_host(jax.devices() if devices is None else devices)
    if not chosen:
        raise UserError("A mesh needs at least one device; there are 0 devices. Leave `devices` out for all.")
    axes = axes or {DATA: -1}
    check_axes(axes)
    fewer = abs(math.prod(axes.values())) < len(chosen)
    how = " (devices=jax.devices()[:{0}])" if fewer else _MORE_DEVICES.get(chosen[0].platform, "")
    sizes = axis_sizes(axes, len(chosen), "" if devices is not None else how)
    slowest_first = sorted(sizes, key=lambda name: name != REPLICA)
    shape = tuple(sizes[name] for name in slowest_first)
    if chosen[0].platform == "tpu":  # a torus: let JAX lay the axes along its links
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, chosen)
    else:
        grid = np.array(chosen).reshape(shape)
    grid = grid.transpose([slowest_first.index(name) for name in sizes])
    mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))
    if devices is None and (reordered := better_order(mesh)) is not None:
        notice(reordered)
    return mesh


def check_mesh(mesh: Mesh) -> None:
    """Check that a mesh has a `data` axis, and axes of type Auto alone. Raises ValueError."""
    if DATA in mesh.shape and {*mesh.axis_types} == {AxisType.Auto}:
        return
    sizes, names = tuple(mesh.shape.values()), tuple(map(str, mesh.axis_names))
    types = ", ".join(f"{name}: {kind}" for name, kind in zip(names, mesh.axis_types, strict=True))
    names = names if DATA in names else (DATA, *names[1:])
    raise UserError(
        f"A plan needs a mesh with a `data` axis, and with axes of type Auto; given {types}. Write jdp.make_mesh, or "
        f"jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(names)}), where the batch's axes are "
        "called `data` and, over slow links, `replica`."
    )


_MORE_DEVICES = {
    "cpu": ', by jax.config.update("jax_num_cpu_devices", {0}) before the first use of jax',
    "gpu": ": this program sees those of jax.devices()",
}
"""Platform -> how a program has {0} devices, which are more than it has."""


def mesh_of(tree: PyTree) -> Mesh | None:
    """Return the mesh of the first leaf that has a `NamedSharding`, real or described; None if no leaf has one."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


_FOLLOWED: ContextVar[Mesh | None] = ContextVar("jdp_followed", default=None)


@contextlib.contextmanager
def following(mesh: Mesh) -> Generator[None]:
    """Have code traced on `mesh` while the context lasts, in place of another with the same axes."""
    with set_while(_FOLLOWED, mesh), jax.set_mesh(mesh):
        yield


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the mesh of the caller's `jax.set_mesh`."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def followed(mesh: Mesh) -> Mesh:
    """Return the mesh that takes the place of `mesh` (`following`); `mesh` itself if none does."""
    other = _FOLLOWED.get()
    return mesh if other is None or other.axis_names != mesh.axis_names else other


def own_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of `mesh` that belong to the model (neither `replica` nor `data`), in mesh order."""
    return tuple([name for name in mesh.axis_names if name not in (REPLICA, DATA)])


# Hosts: axes that cross slow links and need not.

HostOf = Callable[[Device], Any]


def host_of(device: Device) -> Any:
    """Return the group of a device's fast links: JAX's partition (NVLink domain, TPU slice), else its process.

    CPU devices all count as one host: they have no links of their own.
    """
    if device.platform == "cpu":
        return 0
    attribute = "partition_index" if hasattr(device, "partition_index") else "slice_index"  # its name in older jax
    partition = getattr(device, attribute, None)
    return device.process_index if partition is None else partition


def devices_along(mesh: Mesh, axes: Sequence[str]) -> list[list[Device]]:
    """Return the groups of devices that differ along these axes only."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    moved = np.moveaxis(mesh.devices, places, range(-len(places), 0))
    return moved.reshape(-1, math.prod(mesh.shape[axis] for axis in axes)).tolist()


def hosts_along(mesh: Mesh, axis: str, host: HostOf = host_of) -> int:
    """Return the largest number of hosts in a group of devices that differ along `axis` only."""
    return max(len({host(device) for device in group}) for group in devices_along(mesh, (axis,)))


def better_order(mesh: Mesh, host: HostOf = host_of) -> str | None:
    """Return a message if an axis of the model's own spans several hosts and would fit on one; else None."""
    per_host, own = _devices_per_host(mesh, host), [axis for axis in own_axes(mesh) if mesh.shape[axis] > 1]
    spanning = [axis for axis in own if hosts_along(mesh, axis, host) > 1]
    inside = math.prod(mesh.shape[axis] for axis in own if axis not in spanning)
    for axis in spanning:
        if per_host % (inside * mesh.shape[axis]) == 0:
            last = {**{name: size for name, size in mesh.shape.items() if name != axis}, axis: mesh.shape[axis]}
            written = ", ".join(f"{name}={size}" for name, size in last.items())
            return (
                f"{axis}={mesh.shape[axis]} spans {hosts_along(mesh, axis, host)} hosts of {per_host} devices and "
                f"would fit on the fast links of one: write it last, make_mesh({written})"
            )
    return None


def replicas_for_hosts(mesh: Mesh, host: HostOf = host_of) -> int | None:
    """Return how many replicas to split `data` into so that it stays on a host's fast links."""
    if hosts_along(mesh, DATA, host) == 1:
        return None
    per_host = _devices_per_host(mesh, host) // math.prod(mesh.shape[axis] for axis in own_axes(mesh))
    return mesh.shape[DATA] // per_host if per_host > 1 and mesh.shape[DATA] % per_host == 0 else None


def _devices_per_host(mesh: Mesh, host: HostOf) -> int:
    """Return the number of devices of the host that has the fewest."""
    return min(Counter(host(device) for device in mesh.devices.flat).values())


def _host_by_host(devices: Sequence[Device]) -> list[Device]:
    """Group the devices by host; hosts, and the devices of each, keep the order given."""
    groups: dict[Any, list[Device]] = {}
    for device in devices:
        groups.setdefault((host_of(device), device.process_index), []).append(device)
    return [device for group in groups.values() for device in group]
