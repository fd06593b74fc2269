"""The two views of a step, as two `Collectives`: what gathers, reduces and sums, and what a call of the loss sees.

- `auto`: the loss sees global arrays. Collectives are sharding constraints, and XLA inserts those that they need.
  Statistics are global, and a loss may mix examples. What XLA sends is its choice: it reduces gradients in the dtype
  that the backward pass produced, and inside the accumulation loop if they are computed there.
- `manual`: the gradient runs under `jax.shard_map` over the batch axes, and each device differentiates the sum over its
  own rows. That is what lets it add microbatches locally and send once, and choose the dtype on the wire, or codes
  (`wire.py`). The model's own axes stay XLA's (`collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.words import Partitioning
from jdp.core.batch import interleave
from jdp.core.gradients import collectives
from jdp.core.gradients.accumulate import evaluate, step_gradients
from jdp.core.gradients.loss_call import LossForm, Sums
from jdp.core.gradients.model_state import changed_leaves, mean_over
from jdp.core.gradients.spec import Collectives, GradientSpec
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import batch_axes
from jdp.core.sharding.placement import Placement, keep_axes
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree

REQUESTED = "asked for"


def chosen_view(
    requested: Partitioning | None, form: LossForm, shards: int, train: bool, statistics: tuple[str, ...]
) -> tuple[Partitioning, str]:
    """Return the view of a step and the reason for it: what the loss returns decides.

    Args:
        requested: the partitioning that was asked for.
        form: what the loss returns.
        shards: number of parts of the batch on the mesh.
        train: False for an evaluation.
        statistics: model state that calls may change and that belongs to no `nnx.BatchNorm`, which synchronises.
    """
    if requested is not None:
        return requested, REQUESTED
    if shards == 1:
        return "auto", "the mesh has one shard of the batch, so nothing is sent"
    if not train:
        return "auto", "an evaluation has no gradients to reduce"
    if form.is_scalar:
        return "auto", "the loss returns a scalar, the mean over the rows that it sees, so it sees all rows"
    if form.gathers_rows:
        return "auto", "the loss calls jdp.gather_rows, so it sees all rows"
    if statistics:
        return "auto", f"{statistics[0]} may be a statistic of rows, so each call sees a whole microbatch"
    return "manual", "the loss returns jdp.Loss, a sum over rows, so each device calls it on its own rows"


def view_gradients(view: Partitioning, spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """Return a function (params, model_state, batch, key) -> (Σ∇total at rest specs, sums, model_state), all global."""
    return (_manual_gradients if view == "manual" else _auto_gradients)(spec, plan)


def view_evaluation(view: Partitioning, spec: GradientSpec, plan: Plan) -> Callable[..., Sums]:
    """Return a function (params, model_state, batch) -> sums, all global."""
    if view == "auto":
        return lambda params, model_state, batch: evaluate(
            spec, AutoCollectives(spec, plan), params, model_state, _constrained(plan, batch)
        )

    def local(params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        return evaluate(spec, ManualCollectives(spec, plan), params, model_state, batch)

    rest, replicated = _rest_specs(plan, spec.placements), PartitionSpec()
    replicas = _by_device(local, plan, (rest, replicated, plan.batch_spec), replicated)
    return lambda params, *others: replicas(collectives.to_replica_view(params, spec.placements, plan.mesh), *others)


def on_every_device(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return a function that every device calls with the same arrays, with the mesh's batch axes named."""
    return _by_device(function, plan, PartitionSpec(), PartitionSpec())


def _auto_gradients(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        view = AutoCollectives(spec, plan)
        grads, sums, after = step_gradients(spec, view, params, model_state, _constrained(plan, batch), key)
        whole = jax.lax.with_sharding_constraint(sums.whole, NamedSharding(plan.mesh, PartitionSpec()))
        return grads, replace(sums, rows=_constrained(plan, sums.rows), whole=whole), after

    return run


def _manual_gradients(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    changed: list[bool] = []

    def local(params: PyTree, model_state: PyTree, *others: Any) -> Any:
        grads, sums, after = step_gradients(spec, ManualCollectives(spec, plan), params, model_state, *others)
        changed[:] = changed_leaves(model_state, after)
        return grads, sums, trained_part(after, changed)

    rest, replicated = _rest_specs(plan, spec.placements), PartitionSpec()
    reduced = _rest_specs(plan, spec.trained_placements)
    prefix: Any = Sums
    sums_specs = prefix(replicated, replicated, replicated, rows=plan.batch_spec, whole=replicated)

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        params = collectives.to_replica_view(params, spec.placements, plan.mesh)
        replicas = _by_device(
            local, plan, (rest, replicated, plan.batch_spec, replicated), (reduced, sums_specs, replicated)
        )
        grads, sums, after = replicas(params, model_state, batch, key)
        grads = collectives.from_replica_view(grads, spec.trained_placements, plan.mesh)
        return grads, sums, with_trained(model_state, after, changed)

    return run


@dataclass(frozen=True)
class AutoCollectives(Collectives):
    """The collectives of `auto`: constraints of global arrays to the plan's specs."""

    spec: GradientSpec
    plan: Plan

    def _constrained(self, x: jax.Array, partition: PartitionSpec, leading: int) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.plan.mesh, PartitionSpec(*partition[leading:])))

    def gather(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return self._constrained(x, placement.compute, leading)

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return self._constrained(x, placement.rest, leading)

    finish = reduce

    def constrain(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        each_microbatch = self.spec.strategy.reduce_each_microbatch
        return self._constrained(x, placement.rest if each_microbatch else placement.compute, leading)

    def sum(self, x: jax.Array) -> jax.Array:
        return x

    def average(self, before: PyTree, after: PyTree) -> PyTree:
        return after

    def microbatches(self, batch: Batch, count: int) -> Batch:
        sharding = NamedSharding(self.plan.mesh, PartitionSpec(None, *self.plan.batch_spec))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(interleave(x, count), sharding), batch)

    def key_of(self, key: jax.Array, rows: int, index: Any, count: int) -> jax.Array:
        draws = self.spec.draws
        return key if draws is None else draws.key(key, offset=index, stride=count, total=rows * count)


@dataclass(frozen=True)
class ManualCollectives(Collectives):
    """The collectives of `manual`: those of `jax.lax`, on a device's own arrays."""

    spec: GradientSpec
    plan: Plan

    @property
    def axes(self) -> tuple[str, ...]:
        return batch_axes(self.plan.mesh)

    @property
    def by_layer(self) -> bool:
        return self.plan.batch_shards > 1

    def gather(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return collectives.all_gather(x, placement, leading, self.plan.mesh)

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return collectives.psum_scatter(x, placement, leading, self.plan.mesh, self.spec.settings.wire, seed)

    def finish(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        axes = tuple(axis for axis in self.axes if placement.dim is None or axis != DATA)
        return collectives.psum(x, axes, placement, leading, self.plan.mesh, self.spec.settings.wire, seed)

    def constrain(self, x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return x

    def sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.axes)

    def average(self, before: PyTree, after: PyTree) -> PyTree:
        def mean(old: jax.Array, new: jax.Array) -> jax.Array:
            is_same = old is new or not jnp.issubdtype(new.dtype, jnp.floating)
            return new if is_same else mean_over(new, self.axes, self.plan.batch_shards)

        return jax.tree.map(mean, before, after)

    def microbatches(self, batch: Batch, count: int) -> Batch:
        return jax.tree.map(lambda x: interleave(x, count), batch)

    def key_of(self, key: jax.Array, rows: int, index: Any, count: int) -> jax.Array:
        if (draws := self.spec.draws) is None:
            return key
        own_rows, device = rows * count, jax.lax.axis_index(self.axes).astype(jnp.uint32)
        first = device * jnp.uint32(own_rows) + jnp.uint32(index)
        return draws.key(key, offset=first, stride=count, total=own_rows * self.plan.batch_shards)


def _by_device(local: Callable[..., Any], plan: Plan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    # check_vma off: the gather boundary is a custom_vjp whose two sides vary over different axes.
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(batch_axes(plan.mesh)),
        check_vma=False,
    )


def _rest_specs(plan: Plan, placements: PyTree) -> PyTree:
    """Return the rest specs in `manual` with the batch axes alone; the model's axes stay automatic."""
    keep = partial(keep_axes, set(batch_axes(plan.mesh)))

    def rest_spec(placement: Placement) -> PartitionSpec:
        return PartitionSpec(*map(keep, collectives.replica_view_spec(placement, plan.mesh)))

    return jax.tree.map(rest_spec, placements)


def _constrained(plan: Plan, batch: Batch) -> Batch:
    """Shard a batch over the batch axes, however it was sharded before."""
    sharding = NamedSharding(plan.mesh, plan.batch_spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), batch)
