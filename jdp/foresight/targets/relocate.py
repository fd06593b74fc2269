"""A step on other devices: what was written for this machine, as abstract values on a target's mesh.

1. The mesh keeps its axes; `data` takes the devices that are left.
2. The state's leaves become shapes, dtypes and the shardings that the plan gives them there.
3. The batch's leaves likewise; rows that the new mesh cannot split are rounded up (`round_up_rows`).
4. Before jax traces fused attention it looks at the GPU and the cuDNN of this machine, which need not have either
   (`jax._src.cudnn.fused_attention_stablehlo`): it is answered for GPUs that are described. XLA's compiler does not
   need cuDNN: the program holds calls of `__cudnn$fmha...`, which are resolved where it runs.
"""

import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax.sharding import Mesh, NamedSharding

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.core.batch import batch_rows
from jdp.core.sharding.axes import DATA, BatchUnit
from jdp.core.sharding.mesh import make_mesh, mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, Device
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.targets.gpu_config import fields
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.targets.resolve import target as named


def candidate_name(strategy: str, accumulate: int) -> str:
    """Return "zero1", or "zero3 K=4"."""
    return f"{strategy}{f' K={accumulate}' * (accumulate > 1)}"


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: the step and its abstract operands on one mesh."""

    step: Step  # on the mesh; its partitioning is settled when it is lowered
    state: TrainState  # `jax.ShapeDtypeStruct` leaves with their shardings, as in the batch
    batch: Batch
    notes: tuple[str, ...] = ()  # what differs from what was given, a sentence each
    cudnn: int | None = None  # the version that described devices are taken to have; None: they are at hand

    @property
    def name(self) -> str:
        """Strategy and microbatches: `candidate_name`."""
        return candidate_name(self.step.plan.strategy, self.step.settings.accumulate)

    def lower(self) -> jax.stages.Lowered:
        """Return `step.lower(state, batch)` for devices that are only described."""
        mesh = self.step.plan.mesh  # the context's too: a loss written under `jax.set_mesh` finds its axes
        with lowering_for(mesh.devices.flat[0], self.cudnn), jax.set_mesh(mesh):
            return self.step.lower(self.state, self.batch)

    def compile(self, target: Target, cache: Cache | None = None) -> Compiled:
        """Compile the step for `target`, whose devices its mesh is made of, or find the result in `cache`."""
        return compile_for(target, self.lower(), self.step.compiler_options, cache)


def compile_for(
    target: Target, lowered: jax.stages.Lowered, options: Mapping[str, Any], cache: Cache | None
) -> Compiled:
    """Compile a step that was lowered with compiler options for a target, or find the result in `cache`."""
    words = [f"{name}={value!r}" for name, value in sorted(options.items())]
    return compile_step(lowered, cache=cache, described="\n".join([target.fingerprint, *words]))


MISMATCHES = ("incompatible devices", "cannot change the size of the mesh", "should match the mesh")
"""What jax says where a function's own mesh is not the context's."""
_OTHER_MESH = (
    "The loss names a mesh, which is another one on the target: a NamedSharding made for this machine's devices, say. "
    "Write jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(...)) and train under jax.set_mesh(mesh); or "
    "leave the target out to compile for this machine's devices."
)
_IMPOSSIBLE = {
    "Unknown backend": "The step calls back to the host (jax.debug.print, jax.debug.callback, pure_callback, "
    "io_callback), and a callback cannot be compiled for devices that are only described. Take it out of the loss, or "
    "leave the target out to compile for this machine's devices.",
    **dict.fromkeys(MISMATCHES, _OTHER_MESH),
}
"""What jax says when a step cannot be lowered for a target -> what to do about it."""


@contextmanager
def lowering_for(device: Device, cudnn: int | None) -> Generator[None]:
    """Lower for a device inside of the context: answer for its cuDNN, explain jax's errors, hide a warning."""
    try:
        with warnings.catch_warnings(), answered_for(device, cudnn):
            # Which arguments were not donated is read off the program, with their paths (`traffic.symptoms`).
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            yield
    except (RuntimeError, ValueError) as error:
        explained = next((words for sign, words in _IMPOSSIBLE.items() if sign in str(error)), None)
        if explained is None:
            raise
        raise UserError(explained) from None


def abstract_on(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: str | Target | None = None,
    *,
    microbatches: int | None = None,
) -> Candidate:
    """Put a step, a state and a batch on a target's devices, as abstract values."""
    target = named(target) if isinstance(target, str) else target
    plan = step.plan.on(_mesh(step, state, target))
    rows, notes = batch_rows(batch), tuple[str, ...]()
    if target is not None:
        relocated = step.changed(plan=plan, accumulate=microbatches or step.settings.accumulate)
        rows, notes = round_up_rows(rows, relocated.loss.batch_unit)
    keep = target is None
    if target is not None:
        state = jax.eval_shape(lambda state: state, state)  # without shardings
    abstract_state = jax.tree.map(
        lambda leaf, sharding: _abstract(leaf, leaf.shape, sharding, keep=keep), state, plan.shardings(state)
    )
    abstract_batch = jax.tree.map(lambda leaf: _abstract(leaf, (rows, *leaf.shape[1:]), plan.batch_sharding), batch)
    step = step.on(plan.mesh)
    cudnn = cudnn_of(target_of(target, abstract_state))
    return Candidate(step, abstract_state, abstract_batch, notes, cudnn=cudnn)


def cudnn_of(target: Target) -> int | None:
    """Return the version of cuDNN that described devices are taken to have; None for devices at hand."""
    if target.config is None and type(target.devices[0].client).__name__ != "CompileOnlyPyClient":
        return None
    return version_in(target.config or "")


def round_up_rows(rows: int, unit: BatchUnit) -> tuple[int, tuple[str, ...]]:
    """Return the next number of rows that divides by the unit, and a note if that is another one.

    What is planned for a target should not depend on the number of devices that the batch was written for.
    """
    raised = unit.round_up(rows)
    if raised == rows:
        return rows, ()
    rule = unit.rule(rows)
    if raised >= 2**31:
        raise UserError(f"{rule}: {raised} would be taken, and a batch has fewer than 2^31 rows: lower accumulate")
    return raised, (f"{rule}: {raised} are taken",)


def _mesh(step: Step, state: TrainState, on: Target | None) -> Mesh:
    """Return the plan's axes on the target, of which `data` takes all devices that the others leave."""
    if on is None:
        return mesh_of(state) or step.plan.mesh
    try:
        return make_mesh(devices=on.devices, **{**step.plan.mesh.shape, DATA: -1})
    except ValueError as error:
        raise UserError(f"{on}: {error}") from None


def _abstract(leaf: Any, shape: tuple[int, ...], sharding: NamedSharding, keep: bool = False) -> jax.ShapeDtypeStruct:
    own = getattr(leaf, "sharding", None)
    kept = own if keep and isinstance(own, NamedSharding) else sharding
    return jax.ShapeDtypeStruct(shape, dtype_on_device(leaf.dtype), sharding=kept)


def dtype_on_device(dtype: Any) -> Any:
    """Return the dtype that jax gives an array of this one: float32 of NumPy's float64; a key's own."""
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else jax.dtypes.canonicalize_dtype(dtype)


ASSUMED = 91_000
"""cuDNN 9.10, as `gpu_config.written` has it, for a description that names none."""
_LOCK = threading.RLock()


def version_in(config: str) -> int:
    """Return the version of cuDNN that a GPU's description names, as cuDNN itself counts: 91000 is 9.10.0."""
    scalars = fields(config)
    major, minor, patch = (int(scalars.get(f"dnn_version_info.{part}", "0")) for part in ("major", "minor", "patch"))
    return 10_000 * major + 100 * minor + patch or ASSUMED


@contextmanager
def answered_for(device: Device | None, version: int | None) -> Generator[None]:
    """Answer jax's questions for a described GPU while the context lasts, in which a program for it is traced."""
    if device is None or version is None or device.platform != "gpu":
        yield
        return
    capability = _parts(device.compute_capability)
    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= _parts(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _parts(other),
    }
    with _LOCK:
        asked = {name: getattr(attention, name) for name in answers if hasattr(attention, name)}
        for name in asked:
            setattr(attention, name, answers[name])
        try:
            yield
        finally:
            for name, function in asked.items():
                setattr(attention, name, function)


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
