"""The training step and the evaluation step, traced once for each shape of batch and compiled.

A step checks the batch, decides how the loss is called, computes Σ∇total / Σweight (`jdp.core.gradients`), and updates
the sharded weights (`update/optimizer.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import jax
from jax._src.core import trace_state_clean  # nothing public says that another function is being traced
from jax.sharding import Mesh

from jdp.base.errors import UserError, public
from jdp.base.notices import notice
from jdp.base.words import Encoding, Partitioning, PrecisionName
from jdp.core.batch import check_alive, check_operands, check_state, owned, signature
from jdp.core.compiling.options import Compiler, CompilerOptions, CompilerValue
from jdp.core.gradients.loss_call import check_loss_takes
from jdp.core.gradients.partitioned_loss import PartitionedLoss, means, read_only
from jdp.core.plan import Plan, check_plan
from jdp.core.precision import Precision
from jdp.core.reading import TracedCollectives, read_collectives
from jdp.core.sharding.host_memory import is_described, mark_host_leaves
from jdp.core.sharding.mesh import mesh_of, tracing_on
from jdp.core.state import TrainState
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, Metrics, Model
from jdp.core.update.optimizer import at_rest, fetched, guarded_update

Kind = TypeVar("Kind")


def _check_call(step: Step[Any], state: TrainState, batch: Batch, *, lowers: bool = False) -> None:
    """Check the operands of a call that failed, because JAX's own errors would name jdp's internals."""
    check_state(state, f"step{'.lower' if lowers else ''}(state, batch)", batch)
    check_operands((mesh_of(state) if lowers else None) or step.plan.mesh, batch, state=state)


class Step(Generic[Kind]):
    """A step: call it as `step(state, batch)`, or `lower` and `compile` it like a jitted function.

        >>> train_step = jdp.make_train_step(loss_fn, plan, donate=False)
        >>> new, metrics = train_step(state, batch)
        >>> train_step.partitioning
        'manual'
        >>> compiled = train_step.compile(state, batch)  # ahead of time
        >>> compiled.memory_analysis().alias_size_in_bytes
        0

    `make_train_step` and `make_eval_step` make one.

    Attributes:
        loss: the loss on the plan, which chooses the partitioning and computes gradients.
        loss_fn: the loss function.
        plan: the mesh and the strategy.
        settings: the keywords of `make_train_step`; `settings.train` is False for an evaluation step.
        partitioning: "auto" or "manual"; None before the loss was traced.
        why: the reason for it, one sentence.
        sends: the collectives that the step's trace asks for, when it was last lowered; None if it was not.
    """

    __slots__ = ("__weakref__", "_options", "loss", "sends")  # so that no other is set by mistake

    loss_fn: LossFn = read_only("loss.loss_fn")
    plan: Plan = read_only("loss.plan")
    settings: StepSettings = read_only("loss.settings")
    partitioning: Partitioning | None = read_only("loss.partitioning")
    why: str = read_only("loss.why")

    def __init__(self, loss: PartitionedLoss) -> None:
        self.loss = loss
        self.sends: TracedCollectives | None = None
        self._options: dict[str, CompilerValue] | None = None

    def __repr__(self) -> str:
        return f"Step({self.loss_fn!r}, {self.plan!r}, {self.settings!r})"

    @overload
    def __call__(
        self: Step[Literal["train"]], state: TrainState[Model], batch: Batch
    ) -> tuple[TrainState[Model], Metrics]: ...
    @overload
    def __call__(self: Step[Literal["eval"]], state: TrainState, batch: Batch) -> Metrics: ...
    @public(_check_call)
    def __call__(self, state: TrainState, batch: Batch) -> Any:
        check_alive(state)
        loss = self.loss
        if loss.is_of_several:
            lower = lambda: self.jitted.lower(state, batch)  # noqa: E731 - the check may change `jitted`
            loss.agree(signature(batch), state, batch, lower, compiler_options=self.compiler_options)
        else:
            batch = jax.tree.map(owned, batch)
        if not loss.is_checked:
            loss.check_first(state, batch)
        debugs: bool = jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
        # `jax_debug_nans` may run the step again on the same state
        run = self._compiled(donates=self.settings.donate and not debugs)
        if self.compiler_options and not trace_state_clean():
            notice("a step inside another jit has the compiler options of that jit: its own are left out")
            run = self._jit(donated=(), options={})
        results = run(state, batch)
        loss.limit_run_ahead(results[1] if self.settings.train else results)
        return results

    @property
    def jitted(self) -> Any:
        """The jitted function itself; `Step.__call__` adds checks of its arguments, which take 1 or 2 microseconds."""
        return self._compiled(donates=self.settings.donate)

    def _compiled(self, *, donates: bool) -> Any:
        compiled, name = self.loss.compiled, "donating" if donates and self.settings.train else "keeping"
        if name not in compiled:
            compiled[name] = self._jit((0,) if name == "donating" else (), self.compiler_options)
        return compiled[name]

    @property
    def compiler_options(self) -> dict[str, CompilerValue]:
        """XLA's options that the step is compiled with on its mesh. Raises ValueError for a value that XLA refuses."""
        if self._options is None:
            self._options = self.settings.compiler.for_mesh(self.plan.mesh)
        return self._options

    def _jit(self, donated: tuple[int, ...], options: dict[str, CompilerValue]) -> Any:
        loss = self.loss

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics] | Metrics:
            with tracing_on(loss.plan.mesh):
                return _train(loss, state, batch) if loss.settings.train else means(loss.evaluate(state, batch))

        step.__name__ = "train_step" if loss.settings.train else "eval_step"  # the program's name in profiles
        return jax.jit(step, donate_argnums=donated, compiler_options=options or None)

    @public(partial(_check_call, lowers=True))
    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Trace and lower the step, for real or abstract values, on the mesh of `state`.

        Args:
            state: a train state, or the result of `jdp.abstract_state`; its devices may be described devices that this
                machine does not have.
            batch: arrays, or `jax.ShapeDtypeStruct` of global shapes; those without a sharding get the plan's.

        Returns:
            A `jax.stages.Lowered`, as of a jitted function.

        Raises:
            ValueError: the batch's rows do not divide, or a parameter has another dtype than `Precision.params`.
        """
        step = self.on(mesh_of(state) or self.plan.mesh)

        def sharded(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=step.plan.batch_sharding)
            return leaf

        batch = jax.tree.map(sharded, batch)
        step.loss.check_first(state, batch)
        traced = step.jitted.trace(state, batch)
        step.sends = read_collectives(traced)
        lowered = traced.lower()
        if step.plan.offload is not None and is_described(step.plan.mesh):
            mark_host_leaves(lowered)
        return lowered

    @public()
    def compile(self, state: TrainState, batch: Batch, **compiler_options: Any) -> jax.stages.Compiled:
        """Lower the step for these values and compile it.

        Args:
            state: a train state, real or abstract, as for `lower`.
            batch: a batch, real or abstract, as for `lower`.
            compiler_options: options of XLA's compiler, by their names, beside the step's own.

        Returns:
            A `jax.stages.Compiled`, as of a lowered function.

        Raises:
            ValueError: as of `lower`.
        """
        return self.lower(state, batch).compile(compiler_options=compiler_options or None)

    def on(self, mesh: Mesh) -> Step[Kind]:
        """Return this step for another mesh, with the result of the trial of its loss.

        Args:
            mesh: as for `Plan`, for example of devices that are only described.

        Raises:
            ValueError: the plan does not fit the mesh.
        """
        plan = self.plan.on(mesh)
        return self if plan == self.plan else Step(self.loss.under(plan))

    @public()
    def changed(self, *, loss_fn: LossFn | None = None, plan: Plan | None = None, **settings: Any) -> Step[Kind]:
        """Return a copy with changes, which chooses its partitioning for itself.

        Args:
            loss_fn: another loss function; None: the same.
            plan: another mesh and strategy; None: the same.
            settings: `accumulate`, `check_loss` and `compiler`, as for `make_train_step`.

        Raises:
            ValueError: another setting is given, or one of these is out of range.
        """
        if others := sorted(settings.keys() - {"accumulate", "check_loss", "compiler"}):
            raise UserError(
                f"A step is changed in loss_fn, plan, accumulate, check_loss, compiler; given {', '.join(others)}. "
                "Make another step with it: jdp.make_train_step."
            )
        own = self.loss
        changed = replace(own.settings, **settings)
        changed = replace(changed, compiler=Compiler.of(changed.compiler, own.settings.compiler.buckets))
        return Step(PartitionedLoss(loss_fn or own.loss_fn, plan or own.plan, changed, own.noun))


def _train(loss: PartitionedLoss, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    settings, plan = loss.settings, loss.plan
    key = jax.random.fold_in(state.rng, state.consumed)
    grads, sums, model_state = loss.gradients(state, batch, key)
    state, grads = fetched(plan, state, grads)
    new, norm = guarded_update(settings.clip_norm, state, grads, sums.total, sums.weight, model_state)
    new = at_rest(plan, new)
    return new, {**means(sums), "grad_norm": norm, "skipped": new.skipped}


@public()
def make_train_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    clip_norm: float | None = None,
    wire: Encoding | None = None,
    buckets: int | None = None,
    check_loss: bool = True,
    donate: bool = True,
    compiler: CompilerOptions | Compiler = "auto",
) -> Step[Literal["train"]]:
    """Make `train_step(state, batch) -> (state, metrics)`. The state is donated: the new state takes its memory.

        >>> train_step = jdp.make_train_step(loss_fn, plan, accumulate=2, precision="bf16", clip_norm=1.0)
        >>> for _ in range(3):
        ...     state, metrics = train_step(state, batch)
        >>> int(state.step), sorted(metrics)
        (3, ['grad_norm', 'loss', 'skipped', 'weight'])

    The batch is a pytree of arrays with the same leading dimension: the rows (examples) of the global batch. With one
    process they may be NumPy arrays; with several they are global arrays, which `jdp.shard_batches` makes.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, sums over rows; or a scalar, the loss of all rows, which
            requires `accumulate=1`. `model` is the NNX module in training mode if `init` returned one, else the
            parameters, in the compute dtype. `batch` is the whole batch or a part of its rows; `rng` is a key.
        plan: the mesh and the strategy.
        accumulate: number of microbatches per step, K. Raise it when the activations of a batch do not fit into memory.
            The rows of a batch must divide by K × the plan's batch shards.
        precision: "fp32"; "bf16" (bfloat16 compute and gathers, float32 master weights and reduction); or a
            `Precision`. "bf16" is usual on GPUs and TPUs.
        partitioning: "auto": the loss sees global arrays, and XLA inserts the collectives. "manual": it sees one
            device's rows under `jax.shard_map`, and jdp inserts them. None: "manual" for a `Loss`, "auto" for a scalar.
            `Step.partitioning` and `Step.why` report it after the first trace.
        clip_norm: scale the gradient down to this global L2 norm if it is larger (Pascanu et al. 2013,
            arXiv:1211.5063). None: no clipping; a step whose squared gradient norm overflows float32 is then skipped,
            because it would make second moments infinite.
        wire: how gradients are encoded while they are sent, for slow links. None: as `precision` says. "bf16": 2 bytes
            an element. "int8": 1 byte, and a scale for each block of 256. They are summed in float32. Rounding is
            random, drawn from the step's key, so it is unbiased. Requires partitioning="manual".
        buckets: XLA's compiler for GPUs combines collectives of the same kind up to this number of bytes, instead of
            the limits that `compiler` sets. Give it, such as 25 * 2**20, for models of many small parameters, whose
            collectives are limited by latency. It does nothing on CPUs.
        check_loss: before a loss is called on parts of the batch ("manual", or K > 1), check on a few rows that it is a
            sum over rows. If it is not, or if this cannot be checked, the step uses "auto" with K = 1, or raises an
            error. Give False if you know that it is a sum and the check refuses it.
        donate: False keeps the old state in memory, for several steps from one state. `jax_debug_nans` does so too: it
            repeats a step whose result is not finite, operation by operation.
        compiler: options of XLA's compiler. "default": XLA's defaults. "overlap": hides more communication
            (`jdp.core.compiling.options.PRESETS`). "auto": "overlap" on several GPUs without a model axis, else
            "default". Or a dictionary from options to values. Options that the compiler of the mesh's devices does not
            know are left out and reported by name.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `grad_norm` (the global L2 norm before
        clipping), `weight` (Σweight) and the metrics of the loss function. The number of steps skipped so far is
        `skipped`, int32.

    Raises:
        ValueError: a setting is out of range. The step itself raises it if a batch's rows do not divide, if the state
            was donated, and if the loss must be a sum over rows but is not. With several processes it also raises it
            if the batch's arrays are not global, and if processes differ in shapes, plan, key or program.
    """
    check_plan(plan, "jdp.make_train_step(loss_fn, plan)", loss_fn)
    check_loss_takes(loss_fn, 3)
    settings = StepSettings(
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        clip_norm=clip_norm,
        wire=wire,
        check_loss=check_loss,
        donate=donate,
        compiler=Compiler.of(compiler, buckets),
    )
    return Step(PartitionedLoss(loss_fn, plan, settings, "train step"))


@public()
def make_eval_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    check_loss: bool = True,
    compiler: CompilerOptions | Compiler = "auto",
) -> Step[Literal["eval"]]:
    """Make `eval_step(state, batch) -> metrics`: forward only, without gradients; the state is not donated.

        >>> eval_step = jdp.make_eval_step(loss_fn, plan)
        >>> metrics = eval_step(state, batch)
        >>> sorted(metrics), float(metrics["weight"])
        (['loss', 'weight'], 16.0)

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, or a scalar, the mean over the batch's rows. `rng` is None, and
            an NNX module is in evaluation mode.
        plan: the mesh and the strategy.
        accumulate, precision, partitioning, check_loss, compiler: as for `make_train_step`. Give both steps the same
            values. Microbatches are computed one after another.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `weight` (Σweight) and the loss function's.
        Average batches by their `weight`, and a metric with its own by NAME_weight; leave out those of weight 0 (NaN).

    Raises:
        ValueError: a setting is out of range. The step itself raises it for the causes that `make_train_step` lists.
    """
    check_plan(plan, "jdp.make_eval_step(loss_fn, plan)", loss_fn)
    check_loss_takes(loss_fn, 3)
    settings = StepSettings(
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        train=False,
        check_loss=check_loss,
        compiler=Compiler.of(compiler),
    )
    return Step(PartitionedLoss(loss_fn, plan, settings, "eval step"))
