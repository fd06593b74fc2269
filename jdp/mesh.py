"""Device meshes with named axes: `data` and `replica` carry the batch, any other axis belongs to the model."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jdp.machine import choose_platform
from jdp.types import Device, PyTree

DATA = "data"
"""The axis that carries the batch, and that ZeRO shards over."""
REPLICA = "replica"
"""The axis over slow links: it carries the batch too, and the state is replicated over it (HSDP)."""


def make_mesh(*, devices: Sequence[Device] | None = None, **axes: int) -> Mesh:
    """Arrange `devices` (all of them by default) into a mesh with the given axes, in the order they are written.

    The last axis varies fastest, so it gets neighbouring devices: `make_mesh(replica=2, data=4)` puts devices 0-3 into
    one replica. One size may be -1: it takes what is left. With no axes at all, `data=-1`.

    Raises:
        ValueError: there is no `data` axis, a size is not positive, or the sizes do not multiply to the device count.
    """
    if devices is None:
        choose_platform()
    chosen = list(jax.devices() if devices is None else devices)
    if not chosen:
        raise ValueError("A mesh needs at least one device, but there are 0 devices: `devices` is empty.")
    sizes = _complete(axes or {DATA: -1}, len(chosen))
    shape = tuple(sizes.values())
    if chosen[0].platform == "tpu":  # a torus: let JAX lay the axes along its links
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, chosen)
    else:
        grid = np.array(chosen).reshape(shape)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a tree's leaves lie on, real or abstract; None where no leaf has a named sharding."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that the batch is split over, outermost first."""
    return tuple(name for name in (REPLICA, DATA) if name in mesh.shape)


def _complete(axes: dict[str, int], count: int) -> dict[str, int]:
    """Fill in the one -1 and hold the sizes against the device count."""
    equation = " × ".join(f"{name}={size}" for name, size in axes.items())
    if DATA not in axes:
        raise ValueError(f"A mesh needs a `data` axis; got {equation}. Add data=-1 to take the devices that are left.")
    if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        raise ValueError(f"Mesh axes are positive sizes, at most one of them -1 (what is left); got {equation}.")
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: count // known if size == -1 else size for name, size in axes.items()}
    if math.prod(sizes.values()) != count:
        product = f"{equation} = {known}" if -1 not in axes.values() else f"{equation} (the others make {known})"
        raise ValueError(
            f"The mesh must multiply to the number of devices: {product}, but there are {count} devices. "
            f"Change an axis, or run on {known} devices (on CPU: --devices {known})."
        )
    return sizes
