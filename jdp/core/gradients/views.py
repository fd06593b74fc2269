"""The two views of a step: the arrays that a call of the loss sees, and the `Collectives` that gather, reduce and sum.

- `auto`: the loss sees global arrays, and may mix examples. jdp gives sharding constraints, and XLA inserts the
  collectives: it reduces gradients in the dtype of the backward pass, inside the accumulation loop.
- `manual`: the gradient runs under `jax.shard_map` over the batch axes, and each device differentiates the sum over its
  own rows. So a device can add microbatches locally, send once, and choose the dtype sent, or codes (`wire.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.words import Partitioning
from jdp.core.gradients.accumulate import evaluate, step_gradients
from jdp.core.gradients.collectives import (
    Collectives,
    GradientSpec,
    ManualCollectives,
    from_replica_view,
    replica_view_spec,
    to_replica_view,
)
from jdp.core.gradients.loss_call import LossForm, LossWithAux, Sums, changed_leaves
from jdp.core.plan import Plan
from jdp.core.sharding.placement import keep_axes
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree

REQUESTED = "asked for"


def chosen_view(requested: Partitioning | None, form: LossForm, shards: int, train: bool) -> tuple[Partitioning, str]:
    """Return the view of a step and the reason for it: the form of the loss' result decides."""
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
    if form.statistics:
        return "auto", f"{form.statistics[0]} may be a statistic of rows, so each call sees a whole microbatch"
    return "manual", "the loss returns jdp.Loss, a sum over rows, so each device calls it on its own rows"


def view_gradients(
    view: Partitioning, spec: GradientSpec, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[PyTree, Sums, PyTree]:
    """Return (Σ∇total at rest specs, the sums, the model state) of a global batch."""
    if view == "manual":
        return _manual_gradients(spec, params, model_state, batch, key)
    batch = jax.lax.with_sharding_constraint(batch, spec.plan.batch_sharding)  # however it was sharded before
    grads, sums, after = step_gradients(Collectives(spec), params, model_state, batch, key)
    shardings = [NamedSharding(spec.plan.mesh, partition) for partition in _aux_specs(spec)]
    return grads, replace(sums, aux=jax.lax.with_sharding_constraint(sums.aux, shardings)), after


def evaluated(view: Partitioning, spec: GradientSpec, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """Return the sums over a global batch, forward only."""
    plan, replicated = spec.plan, PartitionSpec()
    if view == "auto":
        batch = jax.lax.with_sharding_constraint(batch, plan.batch_sharding)
        return evaluate(Collectives(spec), params, model_state, batch)
    in_specs = _rest_specs(plan, spec.placements), replicated, plan.batch_spec
    by_device = _by_device(partial(evaluate, ManualCollectives(spec)), plan, in_specs, replicated)
    return by_device(to_replica_view(params, spec.placements, plan.mesh), model_state, batch)


def on_every_device(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return a function that every device calls with the same arrays, with the mesh's batch axes named."""
    return _by_device(function, plan, PartitionSpec(), PartitionSpec())


def _manual_gradients(
    spec: GradientSpec, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[PyTree, Sums, PyTree]:
    changed: list[bool] = []

    def local(params: PyTree, model_state: PyTree, *others: Any) -> Any:
        grads, sums, new_state = step_gradients(ManualCollectives(spec), params, model_state, *others)
        changed[:] = changed_leaves(model_state, new_state)
        return grads, sums, trained_part(new_state, changed)

    plan, replicated, prefix = spec.plan, PartitionSpec(), cast(Any, Sums)
    in_specs = _rest_specs(plan, spec.placements), replicated, plan.batch_spec, replicated
    sums_specs = prefix(replicated, replicated, replicated, aux=_aux_specs(spec))
    out_specs = _rest_specs(plan, spec.trained_placements), sums_specs, replicated
    shards = to_replica_view(params, spec.placements, plan.mesh)
    grads, sums, new_state = _by_device(local, plan, in_specs, out_specs)(shards, model_state, batch, key)
    grads = from_replica_view(grads, spec.trained_placements, plan.mesh)
    return grads, sums, with_trained(model_state, new_state, changed)


def _by_device(local: Callable[..., Any], plan: Plan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    # check_vma off: the gather boundary is a custom_vjp whose two sides vary over different axes.
    specs, names = {"in_specs": in_specs, "out_specs": out_specs}, set(plan.batch_axes)
    return jax.shard_map(local, mesh=plan.mesh, axis_names=names, check_vma=False, **specs)


def _rest_specs(plan: Plan, placements: PyTree) -> PyTree:
    """Return the rest specs in `manual` with only the batch axes; the model's axes stay automatic."""
    keep = partial(keep_axes, set(plan.batch_axes))
    return jax.tree.map(lambda place: PartitionSpec(*map(keep, replica_view_spec(place, plan.mesh))), placements)


def _aux_specs(spec: GradientSpec) -> list[PartitionSpec]:
    """Return the specs of the loss' aux: rows over the batch axes, other arrays replicated."""
    by_row = spec.loss_fn.by_row if isinstance(spec.loss_fn, LossWithAux) else None
    return [spec.plan.batch_spec if has_rows else PartitionSpec() for has_rows in by_row or ()]
