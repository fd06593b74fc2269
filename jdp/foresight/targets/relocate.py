"""A step on other devices: its state and batch become abstract values on a target's mesh.

Before jax traces fused attention it checks this machine's GPU and cuDNN, which may not exist
(`jax._src.cudnn.fused_attention_stablehlo`): jdp answers for the described GPU. XLA's compiler does not need cuDNN,
because the program's calls `__cudnn$fmha...` are resolved at run time.
"""

import contextlib
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
from jdp.foresight.targets.descriptions import fields
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
    cudnn: int | None = None  # the assumed version on described devices; None: real devices

    @property
    def name(self) -> str:
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
    """Compile a lowered step for a target, or find the result in `cache`."""
    words = [f"{name}={value!r}" for name, value in sorted(options.items())]
    return compile_step(lowered, cache=cache, described="\n".join([target.fingerprint, *words]))


MISMATCHES = ("incompatible devices", "cannot change the size of the mesh", "should match the mesh")
"""jax's messages if a function's mesh is not the context's."""
_OTHER_MESH = (
    "The loss uses a mesh of this machine's devices, in a NamedSharding for example; the target has another mesh. "
    "Write jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(...)) and train under jax.set_mesh(mesh); or "
    "leave out the target to compile for this machine's devices."
)
_IMPOSSIBLE = {
    "Unknown backend": "The step calls back to the host (jax.debug.print, jax.debug.callback, pure_callback, "
    "io_callback), and a callback cannot be compiled for devices that are only described. Remove it from the loss, or "
    "leave out the target to compile for this machine's devices.",
    **dict.fromkeys(MISMATCHES, _OTHER_MESH),
}
"""jax's message if a step cannot be lowered for a target -> the fix."""


@contextmanager
def lowering_for(device: Device, cudnn: int | None) -> Generator[None]:
    """Return a context to lower for a device: it answers for its cuDNN, explains jax's errors and hides a warning."""
    try:
        with warnings.catch_warnings(), answered_for(device, cudnn):
            # `traffic.symptoms` reads the arguments that were not donated from the program, with their paths.
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
    target = None if target is None else target_of(target)
    plan = step.plan.on(_mesh(step, state, target))
    rows, notes = batch_rows(batch), tuple[str, ...]()
    if target is not None:
        relocated = step.changed(plan=plan, accumulate=microbatches or step.settings.accumulate)
        rows, notes = round_up_rows(rows, relocated.loss.batch_unit)
        state = jax.eval_shape(lambda state: state, state)  # without shardings

    def leaf_on(leaf: Any, planned: NamedSharding) -> jax.ShapeDtypeStruct:
        present = getattr(leaf, "sharding", None) if target is None else None
        return _abstract(leaf, leaf.shape, present if isinstance(present, NamedSharding) else planned)

    abstract_state = jax.tree.map(leaf_on, state, plan.shardings(state))
    abstract_batch = jax.tree.map(lambda leaf: _abstract(leaf, (rows, *leaf.shape[1:]), plan.batch_sharding), batch)
    cudnn = cudnn_of(target_of(target, abstract_state))
    return Candidate(step.on(plan.mesh), abstract_state, abstract_batch, notes, cudnn=cudnn)


def cudnn_of(target: Target) -> int | None:
    """Return the assumed version of cuDNN on described devices; None for real devices."""
    if target.config is None and type(target.devices[0].client).__name__ != "CompileOnlyPyClient":
        return None
    return version_in(target.config or "")


def round_up_rows(rows: int, unit: BatchUnit) -> tuple[int, tuple[str, ...]]:
    raised = -(-rows // unit.rows) * unit.rows
    if raised == rows:
        return rows, ()
    rule = unit.rule(rows)
    if raised >= 2**31:
        raise UserError(f"{rule}: rounded up to {raised}, but a batch has fewer than 2^31 rows: lower accumulate")
    return raised, (f"{rule}: rounded up to {raised}",)


def _mesh(step: Step, state: TrainState, on: Target | None) -> Mesh:
    if on is None:
        return mesh_of(state) or step.plan.mesh
    try:
        return make_mesh(devices=on.devices, **{**step.plan.mesh.shape, DATA: -1})
    except ValueError as error:
        raise UserError(f"{on}: {error}") from None


def _abstract(leaf: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype_on_device(leaf.dtype), sharding=sharding)


def dtype_on_device(dtype: Any) -> Any:
    """Return the dtype of an array on a device: float32 for NumPy's float64; a key keeps its dtype."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


ASSUMED = 91_000
"""cuDNN 9.10, as in `written`, for a description without a version."""
_LOCK = threading.RLock()


def version_in(config: str) -> int:
    """Return the version of cuDNN in a GPU's description, in cuDNN's own numbers: 91000 is 9.10.0."""
    scalars = fields(config)
    major, minor, patch = (int(scalars.get(f"dnn_version_info.{part}", "0")) for part in ("major", "minor", "patch"))
    return 10_000 * major + 100 * minor + patch or ASSUMED


@contextmanager
def answered_for(device: Device | None, version: int | None) -> Generator[None]:
    """Answer jax's checks for a described GPU inside the context."""
    if device is None or version is None or device.platform != "gpu":
        yield
        return
    capability = _parts(device.compute_capability)
    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= _parts(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _parts(other),
    }
    with _LOCK, contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            if hasattr(attention, name):
                patches.callback(setattr, attention, name, getattr(attention, name))
                setattr(attention, name, answer)
        yield


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
