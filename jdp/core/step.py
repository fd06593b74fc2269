"""The training step and the evaluation step, read top to bottom.

A step, traced once for each shape of batch and compiled:
1. check the batch against mesh and accumulation, choose the partitioning, and prove, or try on a few rows, that the
   loss may be called on parts of the batch;
2. compute the gradient: Σ∇total and Σweight over all devices and microbatches (`jdp.core.gradients`), divided once;
3. clip by the global norm (`update/guarded.py`, as the rest);
4. update the sharded master weights;
5. the finite guard: if the gradient or the new state is not finite, keep everything as it was and increment `skipped`.
   Of a state in host memory (`Plan.offload`) only the gradient and the model state are checked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax._src.core import trace_state_clean  # nothing public says that another function is being traced
from jax.sharding import Mesh

from jdp.base.notices import notice
from jdp.base.public import public
from jdp.base.words import Buckets, Partitioning
from jdp.core.batch import check_alive, check_operands, check_state, owned_batch, signature
from jdp.core.compiling.options import Compiler, CompilerValue
from jdp.core.gradients import manual
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.partitioned_loss import PartitionedLoss, means, read_only
from jdp.core.init.sync_entries import with_sync_entries
from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.sharding.axes import BatchUnit
from jdp.core.sharding.host_memory import is_described, mark_host_leaves
from jdp.core.sharding.mesh import mesh_of, tracing_on
from jdp.core.state import SQUARES, STACKED, Layout, Leaves, TrainState, together, trained_part, unread_leaves
from jdp.core.step_settings import StepSettings, check_settings, check_training_settings
from jdp.core.tracing.collectives import TracedCollectives, read_collectives
from jdp.core.types import Batch, LossFn, Metrics, Model, PyTree
from jdp.core.update import noise_scale
from jdp.core.update.guarded import guarded_update
from jdp.core.update.local_steps import LocalSteps, train_round, unstack
from jdp.core.update.offloaded import constrained, params_on_device, streamed
from jdp.core.wire.settings import Wire

Kind = TypeVar("Kind")
_CHANGEABLE = ("accumulate", "overlap", "check_loss", "compiler")


def _check_call(step: Step[Any], state: TrainState, batch: Batch) -> None:
    """Check the operands of a call that failed: JAX's own errors would name jdp's internals."""
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
        'auto'
        >>> compiled = train_step.compile(state, batch)  # ahead of time
        >>> compiled.memory_analysis().alias_size_in_bytes
        0

    `make_train_step` and `make_eval_step` make one.

    Attributes:
        loss: the loss on the plan, which chooses the partitioning and computes gradients.
        loss_fn: the loss function.
        plan: the mesh and the strategy.
        settings: all settings in one object; the step itself has them too.
        requested: the partitioning that was asked for; None leaves the choice to jdp.
        train: True for a training step, False for an evaluation step.
        precision, accumulate, sync_batch_norm, group, wire, buckets, overlap, check_loss: as in `make_train_step`.
        clip_norm, local_steps, noise_scale, donate, compiler: likewise.
        sends: the collectives that the step's trace asks for, when it was last lowered; None if it was not.
    """

    __slots__ = (
        "__weakref__",
        "_complete",
        "_layout",
        "_options",
        "_takes_tree",
        "loss",
        "sends",
    )  # no other is set by mistake

    loss_fn: LossFn = read_only("loss.loss_fn", "The loss function.")
    plan: Plan = read_only("loss.plan", "The mesh and the strategy.")
    settings: StepSettings = read_only("loss.settings", "All settings.")
    partitioning: Partitioning | None = read_only("loss.partitioning", "auto or manual; None before jdp has chosen.")
    why: str = read_only("loss.why", "The reason for `partitioning`.")
    microbatches: int = read_only("loss.microbatches", "Parts of a device's rows that are computed one after another.")
    batch_unit: BatchUnit = read_only("loss.batch_unit", "What a global batch's rows must divide by.")

    precision: Precision = read_only("settings.precision")
    requested: Partitioning | None = read_only("settings.requested")
    accumulate: int = read_only("settings.accumulate")
    train: bool = read_only("settings.train")
    sync_batch_norm: bool = read_only("settings.sync_batch_norm")
    group: int = read_only("settings.group")
    wire: Wire = read_only("settings.wire")
    buckets: Buckets | None = read_only("settings.buckets")
    overlap: bool | None = read_only("settings.overlap")
    check_loss: bool = read_only("settings.check_loss")
    clip_norm: float | None = read_only("settings.clip_norm")
    local_steps: LocalSteps | None = read_only("settings.local_steps")
    noise_scale: bool = read_only("settings.noise_scale")
    donate: bool = read_only("settings.donate")
    compiler: Compiler = read_only("settings.compiler")

    def __init__(self, loss: PartitionedLoss) -> None:
        self.loss = loss
        self.sends: TracedCollectives | None = None
        self._complete: set[Any] = set()  # what `complete` knows to need nothing
        self._layout: Layout | None = None  # of the last call's state
        self._takes_tree: bool | None = None  # whether `lower` came before the first call, which then has its program
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
        if not self._made(state):
            state = self.complete(state)
        if self._takes_tree is None:
            self._takes_tree = False
        given = state if self._takes_tree else Leaves.of(state, self._layout)
        if isinstance(given, Leaves):
            self._layout = given.layout
        batch = self._agreed_on(state, given, batch) if loss.is_of_several else owned_batch(batch)
        if not loss.is_checked:
            loss.check_first(state, batch)
        debugs: bool = jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
        run = self._keeping if debugs else loss.compiled.get("step") or self.jitted
        if self.compiler_options and not trace_state_clean():
            notice("inside of another jit a step has that one's compiler options: its own are left out")
            run = self._jit(donated=(), options={})
        results = run(given, batch)
        loss.limit_run_ahead(results[1] if self.train else results)
        if self._takes_tree or not self.train:
            return results
        leaves, metrics = results
        return leaves.unread(self), metrics

    def _made(self, state: TrainState) -> bool:
        """Return whether the state came out of this step, and is therefore complete, and nobody has read it."""
        leaves = unread_leaves(state)
        return leaves is not None and leaves.maker is self

    @property
    def gathers_rows(self) -> bool:
        """Whether the loss calls `jdp.gather_rows`; False if it was not traced yet."""
        return self.loss.last is not None and self.loss.last.gathers_rows

    @property
    def jitted(self) -> Any:
        """The jitted function itself; `Step.__call__` adds checks of its arguments, which take 1 or 2 microseconds."""
        compiled = self.loss.compiled
        if "step" not in compiled:
            donated = (0,) if self.donate and self.train else ()
            compiled["step"] = self._jit(donated, self.compiler_options)
        return compiled["step"]

    @property
    def _keeping(self) -> Any:
        """`jitted` without donation: `jax_debug_nans` may run the step again on the same state."""
        if not (self.donate and self.train):
            return self.jitted
        compiled = self.loss.compiled
        if "keeping" not in compiled:
            compiled["keeping"] = self._jit((), self.compiler_options)
        return compiled["keeping"]

    @property
    def compiler_options(self) -> dict[str, CompilerValue]:
        """XLA's options that the step is compiled with on its mesh. Raises ValueError for a value that XLA refuses."""
        if self._options is None:
            self._options = self.compiler.for_mesh(self.plan.mesh)
        return self._options

    def _jit(self, donated: tuple[int, ...], options: dict[str, CompilerValue]) -> Any:
        loss, plan = self.loss, self.plan

        def train_step(state: TrainState | Leaves, batch: Batch) -> tuple[TrainState | Leaves, Metrics]:
            with tracing_on(plan.mesh):
                new, metrics = _train(loss, *plan.entered((together(state), batch)))
                return (Leaves.of(new, state.layout) if isinstance(state, Leaves) else new), metrics

        def eval_step(state: TrainState | Leaves, batch: Batch) -> Metrics:
            with tracing_on(plan.mesh):
                whole, batch = plan.entered((together(state), batch))
                computing = replace(whole, params=params_on_device(plan, whole))
                return plan.left(means(loss.evaluate(computing, batch)), plan.replicated)

        if not self.train:
            return jax.jit(eval_step, compiler_options=options or None)
        return jax.jit(train_step, donate_argnums=donated, compiler_options=options or None)

    def _agreed_on(self, state: TrainState, given: TrainState | Leaves, batch: Batch) -> Batch:
        """Return the batch after checking that all processes agree, once for each shape: each has its own program."""
        self.loss.agree(
            "the train step" if self.train else "the evaluation step",
            signature(batch),
            state,
            batch,
            lambda: self.jitted.lower(given, batch),  # what the check finds may change `jitted`
            self.compiler_options,
        )
        return batch

    @public(_check_lowering)
    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Trace and lower the step, for real or abstract values, on the mesh of `state`.

        Args:
            state: a train state, or the result of `jdp.abstract_state`; its devices may be described devices that this
                machine does not have.
            batch: arrays, or `jax.ShapeDtypeStruct` of global shapes; those without a sharding get the plan's.

        Returns:
            What `lower` of a jitted function returns.

        Raises:
            ValueError: the batch's rows do not divide, or a parameter has another dtype than `Precision.params`.
        """
        step = self.on(mesh_of(state) or self.plan.mesh)

        def sharded(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=step.plan.batch_sharding)
            return leaf

        state, batch = step.complete(state), jax.tree.map(sharded, batch)
        if step._takes_tree is None:
            step._takes_tree = True
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
            What `compile` of a lowered function returns.

        Raises:
            ValueError: the batch's rows do not divide, or a parameter has another dtype than `Precision.params`.
        """
        return self.lower(state, batch).compile(compiler_options=compiler_options or None)

    def complete(self, state: TrainState) -> TrainState:
        """Return the state with the entries that the synchronisation keeps between steps (`TrainState.sync`), zeros at
        first.

        A step completes the state that it gets; this is for restoring a checkpoint onto the complete state. A state
        that was completed for other settings is completed anew; that is reported.

        Args:
            state: a train state, real or abstract.

        Raises:
            ValueError: a rule of the plan matches nothing or does not divide.
        """
        own = self.settings
        if not own.train or not (own.wire.gradients or own.local_steps or own.noise_scale or state.sync):
            return state
        local = own.local_steps
        like_params = own.wire.gradients or (local and local.momentum)  # else what is kept is the same for any
        parts = (state.params if like_params else (), state.opt_state if local else (), state.sync)
        leaves, tree = jax.tree.flatten(parts)
        known = tree, tuple(leaf.shape for leaf in leaves), state.static.trained
        if known in self._complete:
            return state
        completed = with_sync_entries(state, self._kept_shapes(state), self.plan, own)
        if completed is state:
            self._complete.add(known)
        return completed

    def _kept_shapes(self, state: TrainState) -> dict[str, PyTree]:
        """Return shapes and dtypes of what is kept between steps (`TrainState.sync`) for parameters of these shapes."""
        trained, local = trained_part(state.params, state.static.trained), self.local_steps
        kept = local.kept_shapes(trained) if local else manual.kept_shapes(self.loss.gradient_spec(state), self.plan)
        return {**kept, "noise": jax.ShapeDtypeStruct((3,), jnp.float32)} if self.noise_scale else kept

    def bare(self, state: TrainState) -> TrainState:
        """Return an abstract state without what belongs to a mesh: shardings, padding, and what `complete` adds.

        Args:
            state: a train state, real or abstract.
        """
        shapes = jax.eval_shape(lambda state: state, replace(state, sync={}))
        if STACKED in state.sync:
            shapes = replace(shapes, opt_state=jax.eval_shape(unstack, shapes.opt_state))
        return shapes.unpadded()

    def on(self, mesh: Mesh) -> Step[Kind]:
        """Return this step for another mesh, with what was found when its loss was tried.

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
            settings: `accumulate`, `overlap`, `check_loss` and `compiler`, as for `make_train_step`.

        Raises:
            ValueError: another setting is given, or one of these is out of range.
        """
        if others := sorted(settings.keys() - {*_CHANGEABLE}):
            raise ValueError(
                f"A step is changed in loss_fn, plan, {', '.join(_CHANGEABLE)}; given {', '.join(others)}. Make "
                "another step with it: jdp.make_train_step."
            )
        own = self.loss
        changed = replace(own.settings, **settings)
        check_settings(changed.accumulate, changed.group, changed.requested)
        check_training_settings(None, False, changed.overlap, True)
        changed = replace(changed, compiler=Compiler.of(changed.compiler))
        return Step(PartitionedLoss(loss_fn or own.loss_fn, plan or own.plan, changed, own.noun))


def _train(loss: PartitionedLoss, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    settings, plan = loss.settings, loss.plan
    if settings.local_steps is None:
        new, sums, norm = _update(loss, state, batch)
    else:
        loss.choose(state, batch)

        def once(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, Sums, jax.Array]:
            return _update(loss.under(plan, local_steps=None), state, batch)

        new, sums, norm = train_round(settings.local_steps, plan, settings.group, once, state, batch)
    new = constrained(plan, new)
    measured = {"noise_scale": noise_scale.ratio(new.sync["noise"])} if settings.noise_scale else {}
    metrics = {**means(sums), "grad_norm": norm, "skipped": new.skipped, **measured}
    if plan.home == plan.mesh:
        return new, metrics
    return plan.left(new, plan.shardings(state)), plan.left(metrics, plan.replicated)


def _update(loss: PartitionedLoss, state: TrainState, batch: Batch) -> tuple[TrainState, Sums, jax.Array]:
    """Return the state after one update of the optimizer, the sums of its batch, and the gradient's norm."""
    settings, plan = loss.settings, loss.plan
    key = jax.random.fold_in(state.rng, state.consumed)
    kept = {name: tree for name, tree in state.sync.items() if name != "noise"}
    if settings.noise_scale:
        kept[SQUARES] = jnp.zeros(2, jnp.float32)
    computing = replace(state, params=params_on_device(plan, state))
    grads, sums, model_state, sync = loss.gradients(computing, batch, key, kept)
    if settings.noise_scale and loss.last is not None and loss.last.gathers_rows:
        raise ValueError(
            "noise_scale compares gradients of rows that do not depend on each other; given a loss that calls "
            "jdp.gather_rows: leave noise_scale out."
        )
    update, given = (
        partial(guarded_update, settings.clip_norm, plan),
        (grads, sums.total, sums.weight, model_state, sync),
    )
    new, norm = update(state, *given) if plan.offload is None else streamed(update, state, given, plan)
    return new, sums, norm
