"""A step on other devices: its state and batch become abstract values on a target's mesh.

Before jax traces fused attention it checks this machine's GPU and cuDNN, which may not exist
(`jax._src.cudnn.fused_attention_stablehlo`): jdp answers for the described GPU. XLA's compiler does not need cuDNN,
because the program's calls `__cudnn$fmha...` are resolved at run time.
"""

import threading
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax.sharding import NamedSharding

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_call import traced_dtype
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import make_mesh, mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, Device
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.targets.resolve import Target, target_of


def candidate_name(strategy: str, accumulate: int) -> str:
    return f"{strategy}{f' K={accumulate}' * (accumulate > 1)}"


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: the step and its abstract operands on one mesh."""

    step: Step  # on the mesh; lowering decides its partitioning
    state: TrainState  # `jax.ShapeDtypeStruct` leaves with their shardings, as in the batch
    batch: Batch
    notes: tuple[str, ...] = ()  # changes to the arguments, a sentence each

    @property
    def name(self) -> str:
        return candidate_name(self.step.plan.strategy, self.step.settings.accumulate)

    def lower(self) -> jax.stages.Lowered:
        """Return `step.lower(state, batch)`, also for devices that are only described."""
        mesh = self.step.plan.mesh  # the context's too: a loss written under `jax.set_mesh` finds its axes
        with lowering_for(mesh.devices.flat[0]), jax.set_mesh(mesh):
            return self.step.lower(self.state, self.batch)

    def compile(self, target: Target, cache: Cache | None = None) -> Compiled:
        """Compile the step for `target`, whose devices its mesh is made of, or find the result in `cache`."""
        return compile_step(self.lower(), target=target, options=self.step.compiler_options, cache=cache)


MISMATCHES = ("incompatible devices", "cannot change the size of the mesh", "should match the mesh")
"""jax's messages if a function's mesh is not the context's."""
_IMPOSSIBLE = {
    "Unknown backend": "The step calls back to the host (jax.debug.print, jax.debug.callback, pure_callback, "
    "io_callback), and a callback cannot be compiled for devices that are only described. Remove it from the loss, or "
    "leave out the target to compile for this machine's devices.",
    **dict.fromkeys(
        MISMATCHES,
        "The loss uses a mesh of this machine's devices, in a NamedSharding for example; the target has another mesh. "
        "Write jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(...)) and train under "
        "jax.set_mesh(mesh); or leave out the target to compile for this machine's devices.",
    ),
}
"""jax's message if a step cannot be lowered for a target -> the fix."""


@contextmanager
def lowering_for(device: Device) -> Generator[None]:
    """Return a context to lower for a device: it answers for its cuDNN, explains jax's errors and hides a warning."""
    try:
        with warnings.catch_warnings(), answered_for(device):
            # `traffic.faults` reads the arguments that were not donated from the program, with their paths.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            yield
    except (RuntimeError, ValueError) as error:
        explained = next((words for sign, words in _IMPOSSIBLE.items() if sign in str(error)), None)
        if explained is None:
            raise
        raise UserError(explained) from None


def abstract_on(
    step: Step, state: TrainState, batch: Batch, target: str | Target | None = None, *, microbatches: int | None = None
) -> Candidate:
    """Put a step and its operands on a target; rows are rounded up to as many `microbatches`, by default its own."""
    target = None if target is None else target_of(target)
    rows, notes, mesh = batch_rows(batch), tuple[str, ...](), mesh_of(state) or step.plan.mesh
    if target is not None:
        try:
            mesh = make_mesh(devices=target.devices, **{**step.plan.mesh.shape, DATA: -1})
        except ValueError as error:
            raise UserError(f"{target}: {error}") from None
        state = jax.eval_shape(lambda state: state, state)  # without shardings
    plan = step.plan.on(mesh)
    if target is not None:
        unit = step.changed(plan=plan, accumulate=microbatches or step.settings.accumulate).loss.batch_unit
        given, rows = rows, -(-rows // unit.rows) * unit.rows
        rounded = f"{unit.rule(given)}: rounded up to {rows}"
        if rows >= 2**31:
            raise UserError(f"{rounded}, but a batch has fewer than 2^31 rows: lower accumulate")
        notes = (rounded,) if rows != given else ()

    def leaf_on(leaf: Any, planned: NamedSharding) -> jax.ShapeDtypeStruct:
        present = getattr(leaf, "sharding", None) if target is None else None
        sharding = present if isinstance(present, NamedSharding) else planned
        return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf), sharding=sharding)

    def rows_on(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), traced_dtype(leaf), sharding=plan.batch_sharding)

    abstract_state = jax.tree.map(leaf_on, state, plan.shardings(state))
    return Candidate(step.on(plan.mesh), abstract_state, jax.tree.map(rows_on, batch), notes)


_CUDNN = 91_000
"""The assumed cuDNN of described GPUs, in its own numbers: 9.10.0, as in `gpu.txtpb`."""
_LOCK = threading.RLock()


@contextmanager
def answered_for(device: Device | None) -> Generator[None]:
    """Answer jax's checks for a GPU that is only described inside the context."""
    if device is None or device.platform != "gpu" or type(device.client).__name__ != "CompileOnlyPyClient":
        yield
        return
    capability = _parts(device.compute_capability)
    answers = {
        "check_cudnn_version": lambda: _CUDNN,
        "check_compute_capability": lambda least: capability >= _parts(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _parts(other),
    }
    with _LOCK, ExitStack() as patches:
        for name, answer in answers.items():
            if hasattr(attention, name):
                patches.callback(setattr, attention, name, getattr(attention, name))
                setattr(attention, name, answer)
        yield


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
