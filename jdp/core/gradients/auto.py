"""Global view: arrays are global, collectives are sharding constraints, and XLA inserts those that they need.

Batch statistics are global and a loss may mix examples. What XLA inserts is its choice: it reduces gradients in the
dtype that the backward pass produced, and inside the accumulation loop if they are computed there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.core.batch import interleave
from jdp.core.gradients.accumulate import evaluate, step_gradients
from jdp.core.gradients.spec import Collectives, GradientSpec
from jdp.core.plan import Plan
from jdp.core.random import row_keys as keys
from jdp.core.sharding.placement import Placement
from jdp.core.types import Batch, PyTree


def gradients(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """Return a function (params, model_state, batch, key) -> (Σ∇total at rest specs, sums, model_state).

    All arrays are global.
    """
    collectives = make_collectives(spec, plan)

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        grads, sums, after = step_gradients(spec, collectives, params, model_state, _constrained(plan, batch), key)
        whole = jax.lax.with_sharding_constraint(sums.whole, NamedSharding(plan.mesh, PartitionSpec()))
        return grads, replace(sums, rows=_constrained(plan, sums.rows), whole=whole), after

    return run


def evaluation(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """Return a function (params, model_state, batch) -> sums, global."""
    collectives = make_collectives(spec, plan)
    return lambda params, model_state, batch: evaluate(
        spec, collectives, params, model_state, _constrained(plan, batch)
    )


def within(spec: GradientSpec, plan: Plan, function: Callable[..., None]) -> Callable[..., tuple[()]]:
    """Return a function (params, model_state, batch, key) that calls `function` as a step is traced."""

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: Any) -> tuple[()]:
        function(make_collectives(spec, plan), params, model_state, _constrained(plan, batch), key)
        return ()

    return run


def make_collectives(spec: GradientSpec, plan: Plan) -> Collectives:
    """Return the collectives of the global view: constraints of global arrays to the plan's specs."""
    mesh = plan.mesh

    def constrain(x: jax.Array, partition: PartitionSpec, leading: int) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*partition[leading:])))

    def constrain_accumulator(x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return constrain(x, placement.rest if spec.strategy.reduce_each_microbatch else placement.compute, leading)

    def microbatches(batch: Batch, count: int) -> Batch:
        sharding = NamedSharding(mesh, PartitionSpec(None, *plan.batch_spec))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(interleave(x, count), sharding), batch)

    def key_of(key: jax.Array, rows: int, index: Any, count: int) -> jax.Array | keys.BatchKey:
        if count == 1:
            return key
        return keys.batch_key(key, rows=rows, total=rows * count, offset=index, stride=count)

    return Collectives(
        gather=lambda x, placement, leading: constrain(x, placement.compute, leading),
        reduce=lambda x, placement, leading, _=None: constrain(x, placement.rest, leading),
        constrain=constrain_accumulator,
        finish=lambda x, placement, leading, _=None: constrain(x, placement.rest, leading),
        sum=lambda x: x,
        average=lambda before, after: after,
        microbatches=microbatches,
        key_of=key_of,
    )


def _constrained(plan: Plan, batch: Batch) -> Batch:
    """Shard a batch over the batch axes, however it was sharded before."""
    sharding = NamedSharding(plan.mesh, plan.batch_spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), batch)
