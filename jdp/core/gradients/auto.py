"""Global view: arrays are whole, gathering and reducing are sharding constraints, and XLA inserts every collective.

Batch statistics are global and a loss may mix examples. What XLA makes of it is its choice: it reduces gradients in the
dtype the backward pass produced, and inside the accumulation loop where it finds them there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.core import batch_keys as keys
from jdp.core.batch import interleave
from jdp.core.gradients import accumulate
from jdp.core.gradients.accumulate import Collectives, GradientSpec, evaluate, step_gradients
from jdp.core.gradients.loss_call import Sums
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.plan import Plan
from jdp.core.types import Batch, PyTree


def gradients(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """(params, model_state, batch, key) -> (Σ∇total at rest specs, sums, model_state)."""
    collectives = make_collectives(spec, plan)

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        return step_gradients(spec, collectives, params, model_state, _whole(plan, batch), key)

    return run


def evaluation(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """(params, model_state, batch) -> sums."""
    collectives = make_collectives(spec, plan)
    return lambda params, model_state, batch: evaluate(spec, collectives, params, model_state, _whole(plan, batch))


def together_and_apart(
    spec: GradientSpec, plan: Plan, params: PyTree, model_state: PyTree, batch: Batch, parts: Batch, key: Any
) -> tuple[Sums, Sums]:
    """`accumulate.together_and_apart` of a few rows that every device has."""
    return accumulate.together_and_apart(spec, make_collectives(spec, plan), params, model_state, batch, parts, key)


def make_collectives(spec: GradientSpec, plan: Plan) -> Collectives:
    mesh = plan.mesh

    def constrain(x: jax.Array, spec: PartitionSpec, leading: int) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec[leading:])))

    def hold(x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return constrain(x, placement.rest if spec.row.reduce_each_microbatch else placement.compute, leading)

    def microbatches(batch: Batch, count: int) -> Batch:
        sharding = NamedSharding(mesh, PartitionSpec(None, *plan.batch_spec))
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(interleave(x, count, spec.group), sharding), batch
        )

    return Collectives(
        gather=lambda x, placement, leading: constrain(x, placement.compute, leading),
        reduce=lambda x, placement, leading: constrain(x, placement.rest, leading),
        hold=hold,
        finish=lambda x, placement, leading: constrain(x, placement.rest, leading),
        total=lambda x: x,
        average=lambda before, after: after,
        microbatches=microbatches,
        key=partial(_key, spec),
    )


def _key(spec: GradientSpec, key: jax.Array, rows: int, index: Any, count: int) -> jax.Array | keys.BatchKey:
    if count == 1:
        return key
    group, first = spec.group, index * spec.group
    return keys.batch_key(key, rows=rows, total=rows * count, offset=first, stride=count, group=group)


def _whole(plan: Plan, batch: Batch) -> Batch:
    """The batch, laid over the batch axes whatever way it came in."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, plan.batch_sharding), batch)
