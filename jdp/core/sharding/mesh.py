"""Device meshes with named axes: how many devices there must be, and which device lies where.

The arithmetic, the one place for it (`axis_sizes`):

    devices = replica × data × the model's own axes                     512 = replica 8 × data 8 × model 8
    rows of a global batch = replica × data × accumulate × rows a device computes at once

- `data`: the batch is split over it, and ZeRO shards parameters, gradients and optimizer state over it.
- `replica`: the batch is split over it too, the state is not: every replica holds all of it, sharded over its own
  `data` (HSDP). Only shards of gradients cross it, once a step; so it is the axis for the slow links between hosts.
- Any other axis is the model's own, and carries no batch: `model` for tensor parallelism, `expert`, `pipe`. Which
  parameters it shards, the plan's rules say or the model's metadata; XLA moves the activations. A pipeline is such an
  axis too: its stages are a dimension of the parameters that a rule shards over `pipe`, and the model itself hands
  activations from stage to stage. TP × PP × DP × replicas is model × pipe × data × replica: 512 = 8 × 2 × 8 × 4.

Devices are taken host by host and the last axis varies fastest, so the last axes get neighbours and stay on a host's
fast links where they fit. `replica` varies slowest, wherever it is written.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jdp.core.machine import choose_platform
from jdp.core.notices import notice
from jdp.core.toml import LONGEST, cut
from jdp.core.types import Device, PyTree, is_whole

DATA = "data"
"""The axis that carries the batch, and that ZeRO shards over."""
REPLICA = "replica"
"""The axis over slow links: it carries the batch too, and the state is replicated over it (HSDP)."""


def make_mesh(*, devices: Sequence[Device] | None = None, **axes: int) -> Mesh:
    """Arrange `devices` (all of them by default) into a mesh with the given axes, in the order they are written.

    Devices of a host stay together, otherwise in the order given; the last axis varies fastest and `replica` slowest:
    `make_mesh(replica=2, data=4)` and `make_mesh(data=4, replica=2)` both put devices 0-3 into one replica. On TPUs,
    JAX lays the axes along the torus. One size may be -1: it takes what is left. With no axes at all, `data=-1`.

    Raises:
        ValueError: there is no `data` axis, a size is not positive, or the sizes do not multiply to the device count.
    """
    if devices is None:
        choose_platform()
    chosen = _host_by_host(jax.devices() if devices is None else devices)
    if not chosen:
        raise ValueError("A mesh needs at least one device, but there are 0 devices: `devices` is empty.")
    sizes = axis_sizes(axes or {DATA: -1}, len(chosen))
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


def axis_sizes(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the sizes of a mesh of `count` devices, its -1 filled in: axis -> size, in the order given.

    Every rule about the sizes of a mesh is checked here, and in `check_axes`, and nowhere else.

    Args:
        axes: axis -> size; one size may be -1, which takes the devices that are left.
        count: number of devices, of all processes together.

    Raises:
        ValueError: the axes are not those of a mesh (`check_axes`), or their sizes do not multiply to `count`.
    """
    check_axes(axes)
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: count // known if size == -1 else size for name, size in axes.items()}
    if math.prod(sizes.values()) == count:
        return sizes
    run = f"run on {known} devices (on CPU: --devices {known})"
    if -1 in axes.values():
        product, fits, run = f"{factors(axes)} (the others make {known})", "", f"{run} or a multiple of them"
    else:
        others = known // axes[DATA]
        product = equation(axes)
        fits = f"Take data={count // others}, or c" if count % others == 0 else ""
    raise ValueError(
        f"The mesh must multiply to the number of devices: {product}, but there are {count} devices. "
        f"{fits or 'C'}hange an axis, or {run}."
    )


def check_axes(axes: Mapping[str, int]) -> None:
    """Check the rules about a mesh that hold for any number of devices: names, sizes, `data`, at most one -1.

    Args:
        axes: axis -> size, as for `make_mesh`.

    Raises:
        ValueError: an axis is not named like a variable, or is named `devices`; a size is neither a positive integer
            nor -1; more than one is -1; or there is no `data` axis.
    """
    for name, size in axes.items():
        if not name.isidentifier() or name == "devices" or len(name) > LONGEST:
            raise ValueError(
                f"Mesh axes are named like variables, and not `devices`; got {cut(repr(name))}. Rename it."
            )
        if not is_whole(size):
            raise ValueError(f"Mesh axes are integers, as in make_mesh(data=8); got {name}={size!r}.")
    if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        raise ValueError(
            f"Mesh axes are positive sizes, at most one of them -1 (what is left); got {factors(axes)}. "
            "Write 1 or more, or -1 for one axis."
        )
    if DATA not in axes:
        raise ValueError(
            f"A mesh needs a `data` axis; got {factors(axes)}. Add data=-1 to take the devices that are left."
        )


def factors(sizes: Mapping[str, int]) -> str:
    """Return the factors of a mesh or a batch as text: "data=4 × model=2"."""
    return " × ".join(f"{name}={size}" for name, size in sizes.items())


def equation(sizes: Mapping[str, int]) -> str:
    """Return the factors and, if there are several, what they multiply to: "data=4 × model=2 = 8", or "data=4"."""
    product = math.prod(sizes.values())
    return f"{factors(sizes)} = {product}" if len(sizes) > 1 else factors(sizes)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a tree's leaves lie on, real or abstract; None where no leaf has a named sharding."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def auto_axes(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """A context for tracing what runs on `mesh`: in place of a mesh with Explicit axes that the caller has set."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if explicit else contextlib.nullcontext()


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that the batch is split over, outermost first."""
    return tuple(name for name in (REPLICA, DATA) if name in mesh.shape)


def own_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that belong to the model, in mesh order."""
    return tuple(name for name in mesh.axis_names if name not in (REPLICA, DATA))


# Hosts: what lies on slow links, and need not.

HostOf = Callable[[Device], Any]


def host_of(device: Device) -> Any:
    """What a device shares its fast links with: jax's partition (one NVLink domain, one TPU slice), else its process.

    CPU devices share a machine, or may as well: they have no links of their own.
    """
    if device.platform == "cpu":
        return 0
    named = "partition_index" if hasattr(device, "partition_index") else "slice_index"  # its name in older jax
    partition = getattr(device, named, None)
    return device.process_index if partition is None else partition


def hosts_along(mesh: Mesh, axis: str, host: HostOf = host_of) -> int:
    """On how many hosts the devices lie that differ along `axis` only; the most of any such line of devices."""
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return max(len({host(device) for device in line}) for line in lines)


def better_order(mesh: Mesh, host: HostOf = host_of) -> str | None:
    """An axis of the model's own that lies over several hosts and would fit on one, and how to write it; else None."""
    per_host, own = _per_host(mesh, host), [axis for axis in own_axes(mesh) if mesh.shape[axis] > 1]
    far = [axis for axis in own if hosts_along(mesh, axis, host) > 1]
    inside = math.prod(mesh.shape[axis] for axis in own if axis not in far)
    for axis in far:
        if per_host % (inside * mesh.shape[axis]) == 0:
            last = {**{name: size for name, size in mesh.shape.items() if name != axis}, axis: mesh.shape[axis]}
            written = ", ".join(f"{name}={size}" for name, size in last.items())
            return (
                f"{axis}={mesh.shape[axis]} lies over {hosts_along(mesh, axis, host)} hosts of {per_host} devices and "
                f"would fit on the fast links of one: write it last, make_mesh({written})"
            )
    return None


def replicas_for_hosts(mesh: Mesh, host: HostOf = host_of) -> int | None:
    """Into how many replicas `data` must be cut to stay on a host's fast links; None where it does, or cannot."""
    if hosts_along(mesh, DATA, host) == 1:
        return None
    room = _per_host(mesh, host) // math.prod(mesh.shape[axis] for axis in own_axes(mesh))
    return mesh.shape[DATA] // room if room > 1 and mesh.shape[DATA] % room == 0 else None


def _per_host(mesh: Mesh, host: HostOf) -> int:
    """Devices on a host: the fewest, where hosts differ."""
    return min(Counter(host(device) for device in mesh.devices.flat).values())


def _host_by_host(devices: Sequence[Device]) -> list[Device]:
    """The devices of a host together, hosts and devices in the order given."""
    together: dict[Any, list[Device]] = {}
    for device in devices:
        together.setdefault((host_of(device), device.process_index), []).append(device)
    return [device for group in together.values() for device in group]
