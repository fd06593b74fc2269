"""The user's own mesh, for arrays between calls, and jdp's, for which code is traced: the same devices.

jdp's mesh has axes of type Auto, and calls the axes that carry the batch `data` and `replica`. A mesh of
`jax.make_mesh` has axes of type Explicit, whose shardings are part of an array's type, and a user may have other names.
Arrays that jdp gets are moved to its own mesh (`entered`), arrays that it returns to the user's (`left`). Both change
types and names, and no shard leaves its device.
"""

import contextlib
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.placement import axes_of
from jdp.core.types import PyTree


def axis_names(home: Mesh, data: str, replica: str) -> dict[str, str]:
    """Return the user's name -> jdp's name, of each axis of a mesh."""
    given = f"given axes {tuple(home.shape)}"
    if data not in home.shape:
        if data == DATA:
            fix = 'Use jdp.make_mesh; or name the axis that carries the batch: Plan(mesh, data="batch").'
            raise ValueError(f"A plan needs a mesh with a `data` axis; {given}. {fix}")
        raise ValueError(f"`data` is the name of the mesh's axis that carries the batch; given {data!r}, {given}.")
    if replica == data:
        raise ValueError(f"`data` and `replica` are two axes of the mesh; given {data!r} for both. Leave out one.")
    if replica not in home.shape and replica != REPLICA:
        raise ValueError(
            f"`replica` is the name of the mesh's axis over slow links; given {replica!r}, {given}. Leave it out."
        )
    ours = {data: DATA, replica: REPLICA}
    for name in home.shape:
        if name not in ours and name in (DATA, REPLICA):
            raise ValueError(
                f"`{name}` is what jdp calls the axis {data if name == DATA else replica!r}, and another axis cannot "
                f"have that name; {given}. Rename that one."
            )
    return {str(name): ours.get(str(name), str(name)) for name in home.axis_names}


def mesh_of_home(home: Mesh, names: Mapping[str, str] = MappingProxyType({})) -> Mesh:
    """Return the mesh of the same devices whose axes have type Auto and jdp's names; `home` itself if it is that."""
    types, ours = home.axis_types, tuple(names.get(str(name), str(name)) for name in home.axis_names)
    if AxisType.Manual in types:
        axes = factors(home.shape).replace(" × ", ", ")
        raise ValueError(
            f"A plan's mesh has axes of type Auto or Explicit; given {types}. Write jdp.make_mesh({axes}), and leave "
            "partitioning='manual' to make_train_step."
        )
    if set(types) == {AxisType.Auto} and ours == home.axis_names:
        return home
    return Mesh(home.devices, ours, axis_types=(AxisType.Auto,) * len(types))


def renamed(spec: PartitionSpec, names: Mapping[str, str]) -> PartitionSpec:
    """Return a spec with other names for the axes that `names` has."""
    if not any(names.get(axis, axis) != axis for entry in spec for axis in axes_of(entry)):
        return spec
    other = (tuple(names.get(axis, axis) for axis in axes_of(entry)) for entry in spec)
    return PartitionSpec(*(entry[0] if len(entry) == 1 else (entry or None) for entry in other))


def padded(sharding: NamedSharding, rank: int) -> NamedSharding:
    """Return a sharding with an entry for each of `rank` dimensions, as an array's type has it, for Explicit axes."""
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return sharding
    return sharding.update(spec=PartitionSpec(*sharding.spec, *(None,) * (rank - len(sharding.spec))))


@contextlib.contextmanager
def auto_axes(mesh: Mesh) -> Generator[None]:
    """Make `mesh`, which has Auto axes, the context's mesh if the caller has set another one of that size."""
    context, ours = jax.sharding.get_abstract_mesh(), mesh.abstract_mesh
    others = context.axis_names and not context.manual_axes and context != ours and context.size == ours.size
    with jax.sharding.use_abstract_mesh(ours) if others else contextlib.nullcontext():
        try:
            yield
        except Exception as error:
            noted = _CLOSED_OVER in getattr(error, "__notes__", [])
            if "AbstractMesh(" in str(error) and "Explicit" in str(error) and not noted:
                error.add_note(_CLOSED_OVER)
            raise


_CLOSED_OVER = (
    "jdp: what it calls is traced for a mesh with Auto axes, and an array with Explicit axes was closed over: hand it "
    "over in the batch or as a model, or close over numpy.asarray(array)"
)


def entered(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return a tree with its arrays on jdp's mesh: those of a traced program, concrete ones and descriptions.

    Arrays on no mesh, or on one of other devices, are returned as they are.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tracer):
            own = jax.typeof(leaf).sharding.mesh
            settled = own.empty or own == mesh.abstract_mesh
            return leaf if settled else reshard(leaf, NamedSharding(mesh, PartitionSpec()))
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh == mesh:
            return leaf
        own = sharding.mesh
        if not np.array_equal(own.devices, mesh.devices):
            return leaf
        names = dict(zip(own.axis_names, mesh.axis_names, strict=True))
        sharding = NamedSharding(mesh, renamed(sharding.spec, names), memory_kind=sharding.memory_kind)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(one, tree)


def left(leaf: jax.Array, sharding: NamedSharding, mesh: Mesh) -> jax.Array:
    """Return an array of a traced program, which is on jdp's mesh or on none, with a sharding on the user's mesh."""
    home: Any = sharding.mesh
    names = dict(zip(home.axis_names, mesh.axis_names, strict=True))
    if sharding.memory_kind is None:  # an array in another memory is sharded already
        leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, renamed(sharding.spec, names)))
    explicit = {name for name, kind in zip(home.axis_names, home.axis_types, strict=True) if kind == AxisType.Explicit}
    entries = (tuple(axis for axis in axes_of(entry) if axis in explicit) for entry in sharding.spec)
    return reshard(leaf, NamedSharding(home, PartitionSpec(*(entry or None for entry in entries))))
