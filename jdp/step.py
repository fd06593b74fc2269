"""The training step and the evaluation step, read top to bottom.

A step, traced once and compiled:
1. check the batch against mesh and accumulation, and settle the partitioning;
2. gradients: Σ∇total and Σweight over all devices and microbatches (`jdp.gradients`), divided once;
3. clip by the global norm;
4. the optimizer updates the master weights where they rest;
5. the finite guard: if the gradient is not finite, everything stays as it was and `skipped` counts one more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdp.gradients import auto, choice, manual
from jdp.gradients.accumulate import Task
from jdp.gradients.traced import Sums, batch_rows
from jdp.mesh import mesh_of
from jdp.optimizer_fit import update
from jdp.plan import Plan, nearest_sizes
from jdp.precision import Precision
from jdp.state import TrainState, trained_part, with_trained
from jdp.types import Batch, LossFn, Metrics, PyTree, is_number, is_whole

VIEWS = {"auto": auto, "manual": manual}


def make_train_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: str | Precision = "fp32",
    partitioning: str | None = None,
    clip_norm: float | None = None,
    sync_batch_norm: bool = True,
) -> Step:
    """Make `train_step(state, batch) -> (state, metrics)`; `state` is donated.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, or a scalar taken as the mean over the batch. `model` is the
            NNX module, when `init` gave one, else the parameters.
        plan: the mesh and the strategy.
        accumulate: microbatches per step, K. The batch's rows must divide by K × the plan's batch shards.
        precision: "fp32", "bf16" or a `Precision`.
        partitioning: "auto", "manual", or None: the one that keeps the communication contract (`Step.partitioning` and
            `Step.why` say which, after the first trace).
        clip_norm: scale the gradient down to this global L2 norm (Pascanu et al. 2013, arXiv:1211.5063).
        sync_batch_norm: under "manual", `nnx.BatchNorm` takes its statistics over the rows of all devices, as it does
            under "auto"; False: each device over its own rows, and the running averages are averaged. Either way the
            statistics are those of one microbatch.

    Returns:
        A `Step`. Metrics are float32 scalars, global: `loss` (Σtotal / Σweight), `grad_norm` (before clipping),
        `weight`, the loss function's own, and `skipped` (int32, so far).

    Raises:
        ValueError: a setting is out of range; and when first called, a batch that does not divide.
    """
    _check_accumulate(accumulate)
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm is a positive norm, or None; got {clip_norm!r}. Give a number, such as 1.0.")
    view = _view(partitioning)
    return Step(loss_fn, plan, Precision.of(precision), view, accumulate, clip_norm, sync_batch_norm=sync_batch_norm)


def make_eval_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: str | Precision = "fp32",
    partitioning: str | None = None,
) -> Step:
    """Make `eval_step(state, batch) -> metrics`: forward only, `rng` is None, NNX modules are in evaluation mode.

    Metrics hold `loss`, `weight` and the loss function's own; weight them by `weight` to average over batches. As in
    training, `accumulate` microbatches take a batch's memory in turns.
    """
    _check_accumulate(accumulate)
    return Step(loss_fn, plan, Precision.of(precision), _view(partitioning), accumulate, train=False)


@dataclass(frozen=True)
class Step:
    """A step: call it, or `lower` and `compile` it like a jitted function.

    Attributes:
        loss_fn, plan, precision, accumulate, clip_norm: what it was made of.
        asked: the partitioning that was asked for; None leaves the choice to jdp.
        train: a training step; else an evaluation step.
        sync_batch_norm: batch statistics are global under "manual" too.
    """

    loss_fn: LossFn
    plan: Plan
    precision: Precision
    asked: str | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    train: bool = True
    sync_batch_norm: bool = True
    _chosen: list[choice.Choice] = field(default_factory=list[choice.Choice], repr=False, compare=False)

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        return self.jitted(state, batch)

    @property
    def partitioning(self) -> str | None:
        """ "auto" or "manual"; None while it is not settled, which takes a first trace."""
        return self._chosen[-1].partitioning if self._chosen else self.asked

    @property
    def why(self) -> str:
        """The reason for `partitioning`."""
        if self._chosen:
            return self._chosen[-1].why
        return choice.ASKED if self.asked else "settled when the step is first traced"

    @cached_property
    def jitted(self) -> Any:
        """The jitted function itself; `Step.__call__` adds nothing to it."""

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return _train(self, state, batch)

        def eval_step(state: TrainState, batch: Batch) -> Metrics:
            return _evaluate(self, state, batch)

        return jax.jit(train_step, donate_argnums=0) if self.train else jax.jit(eval_step)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Trace and lower for real or abstract values; abstract ones may name devices this machine does not have.

        The step is lowered for the mesh that `state` lies on. Abstract batch leaves without a sharding get the plan's.
        """
        step = self.on(mesh_of(state) or self.plan.mesh)

        def laid(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=step.plan.batch_sharding)
            return leaf

        return step.jitted.lower(state, jax.tree.map(laid, batch))

    def compile(self, state: TrainState, batch: Batch, **compiler_options: Any) -> jax.stages.Compiled:
        """`lower(state, batch)`, compiled; keyword arguments are XLA compiler options."""
        return self.lower(state, batch).compile(compiler_options=compiler_options or None)

    def on(self, mesh: Mesh) -> Step:
        """The same step on another mesh."""
        return self if mesh == self.plan.mesh else replace(self, plan=self.plan.on(mesh), _chosen=[])

    def settle(self, state: TrainState, batch: Batch) -> str:
        """Choose the partitioning for these shapes, and say it once."""
        self._chosen.append(choice.choose(self, state, batch))
        return self._chosen[-1].partitioning

    def task(self, state: TrainState) -> Task:
        """What the gradient code needs to know."""
        static = state.static
        return Task(
            self.loss_fn,
            static.adapter,
            self.plan.param_placements(state.params, static),
            self.plan.row,
            self.precision,
            self.accumulate,
            static.trained,
            self.sync_batch_norm,
        )


def _train(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    _check_rows(step, batch)
    trained = state.static.trained
    params = trained_part(state.params, trained)
    step.precision.check_params(params)
    gradients = VIEWS[step.settle(state, batch)].gradients(step.task(state), step.plan)
    key = jax.random.fold_in(state.rng, state.consumed)
    sums: Sums
    grads, sums, model_state = gradients(state.params, state.model_state, batch, key)

    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.total)
    if step.clip_norm is not None:
        scale = jnp.minimum(1.0, step.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    updates, opt_state = update(state.static.tx, grads, state.opt_state, params, sums.total / sums.weight)
    params = with_trained(state.params, optax.apply_updates(params, updates), trained)
    updated = replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state)
    kept = replace(state, skipped=state.skipped + 1)
    new = jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), updated, kept)
    new = jax.lax.with_sharding_constraint(new, step.plan.shardings(state))
    return new, {**_means(sums), "grad_norm": norm, "skipped": new.skipped}


def _evaluate(step: Step, state: TrainState, batch: Batch) -> Metrics:
    _check_rows(step, batch)
    step.precision.check_params(trained_part(state.params, state.static.trained))
    evaluation = VIEWS[step.settle(state, batch)].evaluation(step.task(state), step.plan)
    return _means(evaluation(state.params, state.model_state, batch))


def _means(sums: Sums) -> Metrics:
    own = {name: total / weight for name, (total, weight) in sums.metrics.items()}
    return {**own, "loss": sums.total / sums.weight, "weight": sums.weight}


def _check_rows(step: Step, batch: PyTree) -> None:
    rows, shards = batch_rows(batch), step.plan.batch_shards
    unit = shards * step.accumulate
    if rows % unit:
        axes = " × ".join(f"{axis}={step.plan.mesh.shape[axis]}" for axis in step.plan.batch_axes)
        equation = f"{axes} × accumulate={step.accumulate} = {unit}" if step.accumulate > 1 else axes
        near = nearest_sizes(rows, unit)
        raise ValueError(f"A batch's rows must divide by {equation}; got {rows}. The nearest sizes are {near}.")


def _check_accumulate(accumulate: int) -> None:
    if not is_whole(accumulate) or accumulate < 1:
        raise ValueError(f"accumulate is the number of microbatches, at least 1; got {accumulate!r}. Give an integer.")


def _view(partitioning: str | None) -> str | None:
    if partitioning is not None and partitioning not in VIEWS:
        raise ValueError(f'partitioning is "auto", "manual" or None (jdp chooses); got {partitioning!r}.')
    return partitioning
