"""A step on other devices: what was written for this machine, as abstract values on a target's mesh.

1. The mesh keeps its axes, or takes others (`hybrid_axes`); `data` takes the devices that are left.
2. The state's leaves become shapes, dtypes and the shardings that the plan gives them there.
3. The batch's leaves likewise; rows that the new mesh cannot split are rounded up (`round_up_rows`).
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jdp.base.disk_cache import Cache
from jdp.core.batch import batch_rows
from jdp.core.sharding.axes import DATA, REPLICA, BatchUnit
from jdp.core.sharding.mesh import make_mesh, mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, Device
from jdp.core.update.optimized import flattened
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.program.requested import has_float8
from jdp.foresight.targets.cudnn import answered_for, version_in
from jdp.foresight.targets.resolve import Target
from jdp.foresight.targets.resolve import target as named


def candidate_name(strategy: str, accumulate: int, remat: str | None, mesh: Mapping[str, int] | None = None) -> str:
    """Return "zero1", or "zero3 replica=8 data=8 K=4 remat=full": what is not the default is named."""
    axes = "".join(f" {axis}={size}" for axis, size in (mesh or {}).items())
    return f"{strategy}{axes}{f' K={accumulate}' * (accumulate > 1)}{f' remat={remat}' if remat else ''}"


def state_bytes(state: TrainState) -> int:
    """Return the bytes of a whole state, real or abstract, each array counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def hybrid_axes(target: Target, state: TrainState) -> dict[str, int] | None:
    """Return a mesh for HSDP on a target of several hosts of GPUs: replicas of as few hosts as hold the state.

    Weights are then gathered and gradients scattered within a replica; what crosses replicas is one shard of the
    gradients. A replica is whole hosts, as many as leave half of a device's memory beside the state and float32
    gradients.
    """
    if target.hosts == 1 or target.memory_bytes is None or target.devices[0].platform != "gpu":
        return None
    held = state_bytes(state) + 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    divisors = (hosts for hosts in range(1, target.hosts // 2 + 1) if target.hosts % hosts == 0)
    enough = (hosts for hosts in divisors if held <= hosts * target.per_host * target.memory_bytes / 2)
    hosts = next(enough, None)
    return None if hosts is None else {REPLICA: target.hosts // hosts, DATA: hosts * target.per_host}


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: the step and its abstract operands on one mesh."""

    step: Step  # on the mesh; its partitioning is settled when it is lowered
    state: TrainState  # `jax.ShapeDtypeStruct` leaves with their shardings, as in the batch
    batch: Batch
    notes: tuple[str, ...] = ()  # what differs from what was given, a sentence each
    remat: str | None = None  # the policy that distinguishes it from other candidates; None: the model's own
    axes: Mapping[str, int] | None = None  # the mesh that distinguishes it; None: as it was given
    cudnn: int | None = None  # the version that described devices are taken to have; None: they are at hand

    @property
    def name(self) -> str:
        """Strategy, mesh, microbatches and rematerialisation policy: `candidate_name`."""
        return candidate_name(self.step.plan.strategy, self.step.accumulate, self.remat, self.axes)

    @property
    def compiler(self) -> str:
        """What XLA's compiler is set to: "default", "overlap" or "own"; "none" on devices that no preset is for."""
        mesh = self.step.plan.mesh
        return (self.step.compiler.on(mesh).preset or "own") if mesh.devices.flat[0].platform == "gpu" else "none"

    def with_rows(self, rows: int) -> "Candidate":
        """Return the same step on a global batch of `rows` rows."""

        def resize(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)

        return replace(self, batch=jax.tree.map(resize, self.batch))

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
    """Compile a step that was lowered with compiler options for a target, or find the result in `cache`.

    For a described GPU, float8 products are compiled for cuBLASLt. A GPU at hand times its kernels against Triton's;
    without one, XLA takes Triton's with the smallest tiles, which multiply in float16.
    """
    more = {"xla_gpu_enable_triton_gemm": False} if target.config and has_float8(lowered) else {}
    words = [f"{name}={value!r}" for name, value in sorted({**options, **more}.items())]
    return compile_step(lowered, cache=cache, described="\n".join([target.fingerprint, *words]), options=more)


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
    described = nullcontext() if cudnn is None else answered_for(device, cudnn)
    try:
        with warnings.catch_warnings(), described:
            # Which arguments were not donated is read off the program, with their paths (`traffic.symptoms`).
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            yield
    except (RuntimeError, ValueError) as error:
        explained = next((words for sign, words in _IMPOSSIBLE.items() if sign in str(error)), None)
        if explained is None:
            raise
        raise ValueError(explained) from None


def abstract_on(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: str | Target | None = None,
    *,
    microbatches: int | None = None,
    axes: Mapping[str, int] | None = None,
) -> Candidate:
    """Put a step, a state and a batch on a target's devices, as abstract values."""
    target = named(target) if isinstance(target, str) else target
    plan = step.plan.on(_mesh(step, state, target, axes))
    rows, notes = batch_rows(batch), tuple[str, ...]()
    if target is not None:
        relocated = step.changed(plan=plan, accumulate=microbatches or step.accumulate)
        rows, notes = round_up_rows(rows, relocated.batch_unit)
    keep = target is None
    if target is not None:
        state = flattened(plan, step.bare(state))
    abstract_state = jax.tree.map(
        lambda leaf, sharding: _abstract(leaf, leaf.shape, sharding, keep=keep), state, plan.shardings(state)
    )
    abstract_batch = jax.tree.map(lambda leaf: _abstract(leaf, (rows, *leaf.shape[1:]), plan.batch_sharding), batch)
    step = step.on(plan.mesh)
    cudnn = None if target is None else cudnn_of(target)
    return Candidate(step, abstract_state, abstract_batch, notes, axes=axes, cudnn=cudnn)


def cudnn_of(target: Target) -> int | None:
    """Return the version of cuDNN that described devices are taken to have; None for devices at hand."""
    return None if target.config is None else version_in(target.config)


def round_up_rows(rows: int, unit: BatchUnit) -> tuple[int, tuple[str, ...]]:
    """Return the next number of rows that divides by the unit, and a note if that is another one.

    What is planned for a target should not depend on the number of devices that the batch was written for.
    """
    raised = unit.round_up(rows)
    if raised == rows:
        return rows, ()
    rule = unit.rule(rows)
    if raised >= 2**31:
        raise ValueError(f"{rule}: {raised} would be taken, and a batch has fewer than 2^31 rows: lower accumulate")
    return raised, (f"{rule}: {raised} are taken",)


def _mesh(step: Step, state: TrainState, on: Target | None, axes: Mapping[str, int] | None) -> Mesh:
    """Return the target's mesh: `axes`, else the plan's, of which `data` takes all devices that the others leave."""
    if on is None:
        return mesh_of(state) or step.plan.mesh
    try:
        return make_mesh(devices=on.devices, **(axes or {**step.plan.mesh.shape, DATA: -1}))
    except ValueError as error:
        raise ValueError(f"{on}: {error}") from None


def _abstract(leaf: Any, shape: tuple[int, ...], sharding: NamedSharding, keep: bool = False) -> jax.ShapeDtypeStruct:
    own = getattr(leaf, "sharding", None)
    kept = own if keep and isinstance(own, NamedSharding) else sharding
    return jax.ShapeDtypeStruct(shape, dtype_on_device(leaf.dtype), sharding=kept)


def dtype_on_device(dtype: Any) -> Any:
    """Return the dtype that jax gives an array of this one: float32 of NumPy's float64; a key's own."""
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else jax.dtypes.canonicalize_dtype(dtype)
