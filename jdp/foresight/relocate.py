"""The same step on other devices: what was written for this machine, as the abstract values of a target's mesh.

1. The mesh keeps its axes; `data` takes the devices that are left.
2. The state's leaves become shapes, dtypes and the shardings that the plan gives them there.
3. The batch's leaves likewise; rows that the new mesh cannot split are raised to the next number that it can.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jdp.foresight.targets import Target, target
from jdp.gradients.traced import batch_rows
from jdp.mesh import DATA, make_mesh
from jdp.state import TrainState
from jdp.step import Step
from jdp.types import Batch


@dataclass(frozen=True)
class Relocated:
    """A step and its abstract operands on one mesh.

    Attributes:
        step: on the mesh; its partitioning is settled when it is lowered.
        state, batch: `jax.ShapeDtypeStruct` leaves with their shardings.
        notes: what differs from what was given, in words.
    """

    step: Step
    state: TrainState
    batch: Batch
    notes: tuple[str, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """`step.lower(state, batch)`, for devices that are only described.

        Raises:
            ValueError: the step calls back to the host, and there is no such host.
        """
        try:
            with warnings.catch_warnings():
                # Which leaves were not donated is read off the program, with their names (`foresight.symptoms`).
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                return self.step.lower(self.state, self.batch)
        except RuntimeError as error:
            if "Unknown backend" not in str(error):
                raise
            raise ValueError(
                "The step calls back to the host (jax.debug.print, jax.debug.callback, pure_callback, io_callback), "
                "and a callback cannot be compiled for devices that are only described. Take it out of the loss, or "
                "leave the target out to compile for this machine's devices."
            ) from error


def abstract_on(step: Step, state: TrainState, batch: Batch, target: str | Target | None = None) -> Relocated:
    """The same step on a target's devices.

    Args:
        step: a training or evaluation step.
        state, batch: real or abstract; the batch is the global one.
        target: "h100:8x8" and the like, or a `Target`; None: the mesh that `state` lies on, where its leaves stay as
            they lie, and the batch as it is.

    Raises:
        ValueError: a bad target; devices that do not divide by the mesh's other axes; arrays of a batch whose leading
            dimensions differ.
    """
    plan = step.plan.on(_mesh(step, state, target))
    rows, notes = batch_rows(batch), tuple[str, ...]()
    unit = plan.batch_shards * step.accumulate
    if target is not None and rows % unit:
        raised = math.ceil(rows / unit) * unit
        equation = f"{plan.batch_shards} shards of the batch" + f" × accumulate={step.accumulate}" * (
            unit > plan.batch_shards
        )
        notes, rows = (f"rows: {rows} -> {raised}, as a batch must divide by {equation}",), raised
    here = target is None
    moved = jax.tree.map(lambda leaf, s: _abstract(leaf, leaf.shape, s, keep=here), state, plan.shardings(state))
    laid = jax.tree.map(lambda leaf: _abstract(leaf, (rows, *leaf.shape[1:]), plan.batch_sharding), batch)
    return Relocated(step.on(plan.mesh), moved, laid, notes)


def _mesh(step: Step, state: TrainState, where: str | Target | None) -> Mesh:
    """The target's mesh: the plan's axes, `data` as long as the devices reach."""
    if where is None:
        return _own_mesh(state) or step.plan.mesh
    on = target(where) if isinstance(where, str) else where
    sizes, count = dict(step.plan.mesh.shape), len(on.devices)
    others = {axis: size for axis, size in sizes.items() if axis != DATA}
    taken = math.prod(others.values())
    if count % taken:
        axes = " × ".join(f"{axis}={size}" for axis, size in others.items())
        raise ValueError(
            f"A target's devices must divide by the mesh's axes other than data: {axes} = {taken}, and {on} "
            f"has {count} devices. Choose another number of devices, or other axes."
        )
    return make_mesh(devices=on.devices, **{**sizes, DATA: count // taken})


def _own_mesh(state: TrainState) -> Mesh | None:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _abstract(leaf: Any, shape: tuple[int, ...], sharding: NamedSharding, keep: bool = False) -> jax.ShapeDtypeStruct:
    own = getattr(leaf, "sharding", None)
    dtype = (
        leaf.dtype
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
        else jax.dtypes.canonicalize_dtype(leaf.dtype)
    )
    return jax.ShapeDtypeStruct(shape, dtype, sharding=own if keep and isinstance(own, NamedSharding) else sharding)
