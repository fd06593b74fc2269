"""The training step and the evaluation step, traced once for each shape of batch and compiled.

A step checks the batch, decides how the loss is called, and computes Σ∇total / Σweight (`jdp.core.gradients`). It clips
the gradient and updates the sharded weights. If a value is not finite, it keeps the old state (`update/guarded.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, overload

import jax
from jax._src.core import trace_state_clean  # nothing public says that another function is being traced
from jax.sharding import Mesh

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.public import public
from jdp.base.words import Partitioning
from jdp.core.batch import check_alive, check_operands, check_state, owned_batch, signature
from jdp.core.compiling.options import Compiler, CompilerValue
from jdp.core.gradients.partitioned_loss import PartitionedLoss, means, read_only
from jdp.core.plan import Plan
from jdp.core.reading.collectives import TracedCollectives, read_collectives
from jdp.core.sharding.host_memory import is_described, mark_host_leaves
from jdp.core.sharding.mesh import mesh_of
from jdp.core.sharding.traced_mesh import tracing_on
from jdp.core.state import TrainState
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, Metrics, Model
from jdp.core.update.guarded import at_rest, fetched, guarded_update

Kind = TypeVar("Kind")
_CHANGEABLE = ("accumulate", "check_loss", "compiler")


def _check_call(step: Step[Any], state: TrainState, batch: Batch) -> None:
    """Check the operands of a call that failed, because JAX's own errors would name jdp's internals."""
    check_state(state, "step(state, batch)", batch)
    check_operands(step.plan.mesh, batch, state=state)


def _check_lowering(step: Step[Any], state: TrainState, batch: Batch) -> None:
    check_state(state, "step.lower(state, batch)", batch)
    check_operands(mesh_of(state) or step.plan.mesh, batch, state=state)


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
            batch = owned_batch(batch)
        if not loss.is_checked:
            loss.check_first(state, batch)
        debugs: bool = jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
        # `jax_debug_nans` may run the step again on the same state
        keeps = debugs and self.settings.donate and self.settings.train
        run = self._compiled("keeping", donates=False) if keeps else loss.compiled.get("step") or self.jitted
        if self.compiler_options and not trace_state_clean():
            notice("a step inside another jit has the compiler options of that jit: its own are left out")
            run = self._jit(donated=(), options={})
        results = run(state, batch)
        loss.limit_run_ahead(results[1] if self.settings.train else results)
        return results

    @property
    def jitted(self) -> Any:
        """The jitted function itself; `Step.__call__` adds checks of its arguments, which take 1 or 2 microseconds."""
        return self._compiled("step", donates=self.settings.donate)

    def _compiled(self, name: str, *, donates: bool) -> Any:
        compiled = self.loss.compiled
        if name not in compiled:
            compiled[name] = self._jit((0,) if donates and self.settings.train else (), self.compiler_options)
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

    @public(_check_lowering)
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
            ValueError: the batch's rows do not divide, or a parameter has another dtype than `Precision.params`.
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

    def changed(self, *, loss_fn: LossFn | None = None, plan: Plan | None = None, **settings: Any) -> Step[Kind]:
        """Return a copy with changes, which chooses its partitioning for itself.

        Args:
            loss_fn: another loss function; None: the same.
            plan: another mesh and strategy; None: the same.
            settings: `accumulate`, `check_loss` and `compiler`, as for `make_train_step`.

        Raises:
            ValueError: another setting is given, or one of these is out of range.
        """
        if others := sorted(settings.keys() - {*_CHANGEABLE}):
            raise UserError(
                f"A step is changed in loss_fn, plan, {', '.join(_CHANGEABLE)}; given {', '.join(others)}. Make "
                "another step with it: jdp.make_train_step."
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
