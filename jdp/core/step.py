"""The training step and the evaluation step, read top to bottom.

A step, traced once for each shape of batch and compiled:
1. check the batch against mesh and accumulation, choose the partitioning, and prove, or try on a few rows, that the
   loss may be called on parts of the batch;
2. compute the gradient: Σ∇total and Σweight over all devices and microbatches (`jdp.core.gradients`), divided once;
3. clip by the global norm;
4. update the sharded master weights;
5. the finite guard: if the gradient or the new model state is not finite, keep everything as it was and increment
   `skipped`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdp.base.notices import notice
from jdp.base.words import Buckets, Encoding, Partitioning, PrecisionName
from jdp.core.batch import check_alive, owned_batch, signature
from jdp.core.compiling.options import Compiler, CompilerOptions, CompilerValue
from jdp.core.gradients import manual
from jdp.core.gradients.accumulate import SQUARES
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.loss_signature import check_loss_takes
from jdp.core.gradients.model_state import stays_finite
from jdp.core.partitioned_loss import PartitionedLoss, means
from jdp.core.plan import Plan, check_plan
from jdp.core.precision import Precision
from jdp.core.sharding.axes import REPLICA
from jdp.core.sharding.host_memory import is_described, mark_host_leaves, on_device, rest_sharding, to_device, to_host
from jdp.core.sharding.mesh import mesh_of, tracing_on
from jdp.core.sharding.user_mesh import auto_axes
from jdp.core.state import STACKED, TrainState, map_flat, trained_part, with_trained
from jdp.core.step_settings import check_settings, check_training_settings, settled_partitioning
from jdp.core.tracing.collectives import TracedCollectives, read_collectives
from jdp.core.types import Batch, LossFn, Metrics, Model, PyTree
from jdp.core.update import noise_scale
from jdp.core.update.local_steps import LocalSteps, stack, train_round, unstack
from jdp.core.update.offloaded import streamed
from jdp.core.update.padded import optimized
from jdp.core.wire.settings import Wire

Kind = TypeVar("Kind")


def make_train_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    clip_norm: float | None = None,
    sync_batch_norm: bool = True,
    group: int = 1,
    wire: Encoding | Wire | None = None,
    buckets: Buckets | None = None,
    local_steps: int | LocalSteps | None = None,
    noise_scale: bool = False,
    overlap: bool | None = None,
    check_loss: bool = True,
    donate: bool = True,
    compiler: CompilerOptions | Compiler = "default",
) -> Step[Literal["train"]]:
    """Make `train_step(state, batch) -> (state, metrics)`. The state is donated: the new state takes its memory.

        >>> train_step = jdp.make_train_step(loss_fn, plan, accumulate=2, precision="bf16", clip_norm=1.0)
        >>> for _ in range(3):
        ...     state, metrics = train_step(state, batch)
        >>> int(state.step), sorted(metrics)
        (3, ['grad_norm', 'loss', 'skipped', 'weight'])

    The batch is a pytree of arrays that share their leading dimension, the rows (examples) of the global batch. They
    are NumPy arrays, or with several processes the global arrays that `jdp.shard_batches` makes.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, or a scalar. A scalar is a mean over the batch's rows, or a
            quotient of two sums over rows, such as `(nll * mask).sum() / mask.sum()`, which is read as total and
            weight. `model` is the NNX module in training mode if `init` returned one, else the parameters, in the
            compute dtype. `batch` is the whole batch or a part of its rows; `rng` is a key.
        plan: the mesh and the strategy.
        accumulate: number of microbatches per step, K. Raise it when the activations of a batch do not fit into memory.
            The rows of a batch must divide by K × the plan's batch shards.
        precision: "fp32"; "bf16" (bfloat16 compute and gathers, float32 master weights and reduction); "fp8"; or a
            `Precision`. "bf16" is usual on GPUs and TPUs. "fp8" also makes the products of activations and weights in
            float8, for H100 GPUs and later.
        partitioning: "auto" (XLA places the collectives), "manual" (jdp does, under `jax.shard_map`), or None: the one
            that keeps the communication contract. Set it to compare the two, or when `jdp.verify` advises it. After the
            first trace `Step.partitioning` and `Step.why` report the choice.
        clip_norm: scale the gradient down to this global L2 norm if it is larger (Pascanu et al. 2013,
            arXiv:1211.5063). Usual for transformers and recurrent models, which have rare large gradients. None: no
            clipping. Then a gradient whose squared norm overflows float32 is skipped, because it would make second
            moments infinite for ever.
        sync_batch_norm: True: under "manual", `nnx.BatchNorm` takes its statistics over the rows of all devices, as
            under "auto". False: each device over its own rows, and the running averages are averaged; it saves
            collectives when a device's rows are enough. In both cases the statistics are those of one microbatch.
        group: number of neighbouring rows that belong together and are never split over devices or microbatches. Needed
            for losses of pairs (2), such as DPO or contrastive pairs.
        wire: how gradients are encoded while they are sent, for slow links between devices. None (as `precision` says),
            "bf16", "int8", "fp8", "topk", "powersgd", or a `Wire`, which can encode ZeRO's weights too. Sums are made
            in float32. The error of encoding is kept in the state and added to the next gradient, except under zero3.
            Requires partitioning="manual".
        buckets: the most bytes of gradients that one collective carries, in the order in which the backward pass
            finishes them. Useful for models of many small parameters, whose collectives take latency. "auto": jdp
            chooses. None: one collective a parameter, which XLA may combine; "auto" if gradients are encoded. zero3
            reduces layer by layer instead. Requires partitioning="manual".
        local_steps: H, for replicas with slow links between them (`replica` of 2 or more). Every replica takes H
            optimizer steps by itself, each with 1/H of its rows. Then the replicas' weights are averaged, or updated by
            an outer optimizer (DiLoCo) if a `LocalSteps` is given. A batch is then the rows of H steps, and metrics are
            means over them. Requires partitioning="manual", and no `wire` or `buckets`.
        noise_scale: add the gradient noise scale to the metrics (McCandlish et al. 2018, arXiv:1812.06162), averaged
            over some 20 steps. Use it to choose a batch size: up to it, more rows a step reduce the number of steps.
            Its unit is that of the metric `weight`: rows, or tokens if the loss's weight counts tokens. Requires
            partitioning="manual" and a strategy other than zero3, which never has a device's whole gradient.
        overlap: under "manual", have `scan_layers` communicate while it computes. A layer's weights are gathered during
            the layer before, and its gradient is reduced during the next. That takes memory for one more layer's
            weights and gradient, and some compile time: give False when this memory is needed. None: on devices that
            can do both at once, which CPUs cannot.
        check_loss: before a loss is called on parts of the batch ("manual", or K > 1), prove from its program that it
            is a sum over examples. A loss that cannot be proven is tried on a few rows, together and apart. A loss that
            mixes examples, or that cannot be tried, gets "auto" with K = 1, or an error. Give False when you know that
            it is a sum and the check refuses it.
        donate: False keeps the old state, in memory of its own. Give it to compare states before and after a step, or
            to take several steps from one state. `jax_debug_nans` does so too: it runs a step whose result is not
            finite once more, operation by operation.
        compiler: options of XLA's compiler. "default"; "overlap", for steps whose communication XLA's default does not
            hide (`jdp.core.compiling.options.PRESETS`); or option -> value, when you know which option you need. They
            are resolved for the mesh's devices: options unknown to their compiler are left out and reported by name.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `grad_norm` (the global L2 norm before
        clipping), `weight` (Σweight) and the loss function's own; and `skipped`, int32: skipped steps so far.

    Raises:
        ValueError: a setting is out of range. The step itself raises it for a batch whose rows do not divide, a donated
            state, and a loss that has to be a sum over examples and is none. With several processes it also raises it
            for a batch of this process alone, and if processes differ in shapes, plan, key or program.
    """
    check_plan(plan)
    check_loss_takes(loss_fn, 3)
    check_settings(accumulate, group, partitioning)
    check_training_settings(clip_norm, noise_scale, overlap, donate)
    wire, local = Wire.of(wire), LocalSteps.of(local_steps, plan)
    partitioning = settled_partitioning(partitioning, plan, wire, buckets, local, noise_scale)
    return Step(
        loss_fn,
        plan,
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        clip_norm=clip_norm,
        sync_batch_norm=sync_batch_norm,
        group=group,
        wire=wire,
        buckets=buckets,
        local_steps=local,
        noise_scale=noise_scale,
        overlap=overlap,
        check_loss=check_loss,
        donate=donate,
        compiler=Compiler.of(compiler),
    )


def make_eval_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    group: int = 1,
    check_loss: bool = True,
    compiler: CompilerOptions | Compiler = "default",
) -> Step[Literal["eval"]]:
    """Make `eval_step(state, batch) -> metrics`: forward only, without gradients; the state is not donated.

        >>> eval_step = jdp.make_eval_step(loss_fn, plan)
        >>> metrics = eval_step(state, batch)
        >>> sorted(metrics), float(metrics["weight"])
        (['loss', 'weight'], 16.0)

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, or a scalar, which is taken as the mean over the batch's rows.
            `rng` is None, and an NNX module is in evaluation mode.
        plan: the mesh and the strategy.
        accumulate, precision, partitioning, group, check_loss, compiler: as for `make_train_step`, and needed when it
            needs them. Microbatches are computed one after another.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `weight` (Σweight) and the loss function's
        own. To average over batches, weight each batch's metrics by its `weight`.

    Raises:
        ValueError: a setting is out of range. The step itself raises it for a batch whose rows do not divide, and for
            the faults of a loss and of several processes that `make_train_step` lists.
    """
    check_plan(plan)
    check_loss_takes(loss_fn, 3)
    check_settings(accumulate, group, partitioning)
    return Step(
        loss_fn,
        plan,
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        train=False,
        group=group,
        check_loss=check_loss,
        compiler=Compiler.of(compiler),
    )


@dataclass(frozen=True)
class Step(PartitionedLoss, Generic[Kind]):
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
        loss_fn: the loss function.
        plan: the mesh and the strategy.
        requested: the partitioning that was asked for; None leaves the choice to jdp.
        train: True for a training step, False for an evaluation step.
        precision, accumulate, sync_batch_norm, group, wire, buckets, overlap, check_loss: as in `make_train_step`.
        clip_norm, local_steps, noise_scale, donate, compiler: likewise.
    """

    _complete: set[Any] = field(init=False, default_factory=set[Any], repr=False, compare=False)
    _collectives: list[TracedCollectives] = field(init=False, default_factory=list[Any], repr=False, compare=False)

    @overload
    def __call__(
        self: Step[Literal["train"]], state: TrainState[Model], batch: Batch
    ) -> tuple[TrainState[Model], Metrics]: ...
    @overload
    def __call__(self: Step[Literal["eval"]], state: TrainState, batch: Batch) -> Metrics: ...
    def __call__(self, state: TrainState, batch: Batch) -> Any:
        check_alive(state)
        state = self.complete(state)
        batch = self._agreed_on(state, batch) if self.is_of_several else owned_batch(batch)
        if not self._settled.is_checked:
            self.check_first(state, batch)
        debugs: bool = jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
        run = self._keeping if debugs else self._settled.compiled.get("step") or self.jitted
        return run(state, batch)

    @property
    def gathers_rows(self) -> bool:
        """Whether the loss calls `jdp.gather_rows`; False if it was not traced yet."""
        return self._last is not None and self._last.gathers_rows

    @property
    def sends(self) -> TracedCollectives | None:
        """The collectives that the step's trace asks for, when it was last lowered; None if it was not."""
        return self._collectives[-1] if self._collectives else None

    @property
    def jitted(self) -> Any:
        """The jitted function itself; `Step.__call__` adds checks of its arguments, which take 1 or 2 microseconds."""
        compiled = self._settled.compiled
        if "step" not in compiled:
            compiled["step"] = self._jit(donated=(0,) if self.donate and self.train else ())
        return compiled["step"]

    @property
    def _keeping(self) -> Any:
        """`jitted` without donation: `jax_debug_nans` may run the step again on the same state."""
        if not (self.donate and self.train):
            return self.jitted
        compiled = self._settled.compiled
        if "keeping" not in compiled:
            compiled["keeping"] = self._jit(donated=())
        return compiled["keeping"]

    @cached_property
    def compiler_options(self) -> dict[str, CompilerValue]:
        """XLA's options that the step is compiled with on its mesh. Raises ValueError for a value that XLA refuses."""
        return self.compiler.for_mesh(self.plan.mesh)

    def _jit(self, donated: tuple[int, ...]) -> Any:
        mesh = self.plan.mesh

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            with tracing_on(mesh):
                return _train(self, *self.plan.entered((state, batch)))

        def eval_step(state: TrainState, batch: Batch) -> Metrics:
            with tracing_on(mesh):
                state, batch = self.plan.entered((state, batch))
                computing = replace(state, params=_params_on_device(self.plan, state))
                return self.plan.left(means(self.evaluate(computing, batch)), self.plan.replicated)

        options = self.compiler_options or None
        if not self.train:
            return jax.jit(eval_step, compiler_options=options)
        return jax.jit(train_step, donate_argnums=donated, compiler_options=options)

    def _agreed_on(self, state: TrainState, batch: Batch) -> Batch:
        """Return the batch after checking that all processes agree, once for each shape: each has its own program."""
        self.agree(
            "the train step" if self.train else "the evaluation step",
            signature(batch),
            state,
            batch,
            lambda: self.jitted.lower(state, batch),  # what the check finds may change `jitted`
            self.compiler_options,
        )
        return batch

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
        step.check_first(state, batch)
        traced = step.jitted.trace(state, batch)
        step._collectives[:] = [read_collectives(traced)]
        lowered = traced.lower()
        if step.plan.offload is not None and is_described(step.plan.mesh):
            mark_host_leaves(lowered)
        return lowered

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
        if not self.train or not (self.wire.gradients or self.local_steps or self.noise_scale or state.sync):
            return state
        local = self.local_steps
        like_params = self.wire.gradients or (local and local.momentum)  # else what is kept is the same for any
        parts = (state.params if like_params else (), state.opt_state if local else (), state.sync)
        leaves, tree = jax.tree.flatten(parts)
        known = tree, tuple(leaf.shape for leaf in leaves), state.static.trained
        if known in self._complete:
            return state
        shapes, replicas = self._kept_shapes(state), self.plan.mesh.shape.get(REPLICA, 1)
        fits = not local or all(x.shape[:1] == (replicas,) for x in jax.tree.leaves(state.opt_state))
        if fits and jax.tree.map(jnp.shape, state.sync) == jax.tree.map(jnp.shape, shapes):
            self._complete.add(known)
            return state
        if state.sync:
            notice(
                f"the state kept {' and '.join(state.sync)} for another way to synchronise, which this step does not "
                f"take over: wire={self.wire.gradients!r}, local_steps={local} on "
                f"{self.plan.batch_shards} shards of the batch"
            )
        was_stacked = STACKED in state.sync

        def converted(opt_state: PyTree) -> dict[str, PyTree]:
            opt_state = self.plan.entered(opt_state)
            one = unstack(opt_state) if was_stacked else opt_state
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return {"opt_state": stack(one, replicas) if local else one, "sync": zeros}

        with auto_axes(self.plan.mesh):
            changed = jax.eval_shape(converted, state.opt_state)
        shardings = self.plan.shardings(replace(state, **changed))
        placed = {name: getattr(shardings, name) for name in changed}
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.params)):
            describe = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
            return replace(state, **jax.tree.map(describe, changed, placed))
        with auto_axes(self.plan.mesh):
            return replace(state, **jax.jit(converted, out_shardings=placed)(state.opt_state))

    def _kept_shapes(self, state: TrainState) -> dict[str, PyTree]:
        """Return shapes and dtypes of what is kept between steps (`TrainState.sync`) for parameters of these shapes."""
        trained, local = trained_part(state.params, state.static.trained), self.local_steps
        kept = local.kept_shapes(trained) if local else manual.kept_shapes(self.gradient_spec(state), self.plan)
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
        """Return this step for another mesh.

        Args:
            mesh: as for `Plan`, for example of devices that are only described.

        Raises:
            ValueError: the plan does not fit the mesh.
        """
        if (plan := self.plan.on(mesh)) == self.plan:
            return self
        return self.under(plan)


def _train(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    if step.local_steps is None:
        new, sums, norm = _update(step, state, batch)
    else:
        step.choose_partitioning(state, batch)

        def once(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, Sums, jax.Array]:
            return _update(step.under(plan, local_steps=None), state, batch)

        new, sums, norm = train_round(step.local_steps, step.plan, step.group, once, state, batch)
    new = _constrained(step.plan, new)
    measured = {"noise_scale": noise_scale.ratio(new.sync["noise"])} if step.noise_scale else {}
    metrics = {**means(sums), "grad_norm": norm, "skipped": new.skipped, **measured}
    if step.plan.home == step.plan.mesh:
        return new, metrics
    return step.plan.left(new, step.plan.shardings(state)), step.plan.left(metrics, step.plan.replicated)


def _update(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Sums, jax.Array]:
    """Return the state after one update of the optimizer, the sums of its batch, and the gradient's norm."""
    key = jax.random.fold_in(state.rng, state.consumed)
    kept = {name: tree for name, tree in state.sync.items() if name != "noise"}
    if step.noise_scale:
        kept[SQUARES] = jnp.zeros(2, jnp.float32)
    computing = replace(state, params=_params_on_device(step.plan, state))
    grads, sums, model_state, sync = step.gradients(computing, batch, key, kept)
    if step.noise_scale and step.gathers_rows:
        raise ValueError(
            "noise_scale compares gradients of rows that do not depend on each other; given a loss that calls "
            "jdp.gather_rows: leave noise_scale out."
        )
    apply, given = partial(_apply, step), (grads, sums, model_state, sync)
    new, norm = apply(state, *given) if step.plan.offload is None else streamed(apply, state, given, step.plan)
    return new, sums, norm


def _apply(
    step: Step, state: TrainState, grads: PyTree, sums: Sums, model_state: PyTree, sync: dict[str, PyTree]
) -> tuple[TrainState, jax.Array]:
    """Return the state after the optimizer's update by these gradients, and the gradient's norm."""
    trained = state.static.trained
    params = trained_part(state.params, trained)
    # Padding counts as zero: divided by a weight of zero it would be NaN where the gradient itself is infinite.
    norm, square = _norm(map_flat(lambda g, flat: flat.masked(g), grads, "params", state.static), state.step)
    if step.noise_scale:
        noise = noise_scale.updated(state.sync["noise"], sync[SQUARES], norm**2, sums.weight)
        sync = {name: tree for name, tree in sync.items() if name != SQUARES} | {"noise": noise}
    finite = jnp.isfinite(norm if step.clip_norm is not None else square) & jnp.isfinite(sums.total)
    finite &= stays_finite(state.model_state, model_state)
    if step.clip_norm is not None:
        scale = jnp.minimum(1.0, step.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    params, opt_state = optimized(state.static, grads, state.opt_state, params, sums.total / sums.weight)
    params = with_trained(state.params, params, trained)
    updated = replace(
        state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state, sync=sync
    )
    kept = replace(state, skipped=state.skipped + 1)
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), updated, kept), norm


def _params_on_device(plan: Plan, state: TrainState) -> PyTree:
    """Return the parameters in device memory, copied there where the plan keeps them on the host."""
    if plan.offload is None or not is_described(plan.mesh):
        return on_device(state.params)
    placements = plan.param_placements(state.params, state.static)
    return jax.tree.map(lambda x, p: to_device(to_host(x)) if p.on_host else x, state.params, placements)


def _constrained(plan: Plan, state: TrainState) -> TrainState:
    """Return a new state sharded as it rests. What rests on the host is already: `streamed` put it there."""
    return jax.tree.map(
        lambda x, p: x if p.on_host else jax.lax.with_sharding_constraint(x, rest_sharding(plan.mesh, p)),
        state,
        plan.state_placements(state),
    )


def _norm(grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the global L2 norm of float32 gradients, and its square; the square may overflow, the norm does not.

    Beside Σg² it sums (g · 2⁻¹⁰⁰)² in the same pass over the gradients, which is finite if Σg² overflows. The factor
    depends on a value: otherwise XLA would multiply the squares by its square, which is zero.
    """
    tiny = jnp.where(step >= 0, jnp.float32(2.0**-100), jnp.float32(1))
    square = optax.tree.norm(grads, squared=True)
    scaled = optax.tree.norm(jax.tree.map(lambda g: g * tiny, grads), squared=True)
    return jnp.where(jnp.isinf(square), jnp.sqrt(scaled) / tiny, jnp.sqrt(square)), square
