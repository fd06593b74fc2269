"""Global view: arrays are whole, moves are sharding constraints, and XLA inserts every collective.

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
from jdp.core.gradients.accumulate import Moves, Task, evaluate, step_gradients
from jdp.core.gradients.loss_call import Sums
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.plan import Plan
from jdp.core.types import Batch, PyTree


def gradients(task: Task, plan: Plan) -> Callable[..., Any]:
    """(params, model_state, batch, key) -> (Σ∇total at rest specs, sums, model_state)."""
    moves = _moves(task, plan)

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        return step_gradients(task, moves, params, model_state, _whole(plan, batch), key)

    return run


def evaluation(task: Task, plan: Plan) -> Callable[..., Any]:
    """(params, model_state, batch) -> sums."""
    moves = _moves(task, plan)
    return lambda params, model_state, batch: evaluate(task, moves, params, model_state, _whole(plan, batch))


def together_and_apart(
    task: Task, plan: Plan, params: PyTree, model_state: PyTree, batch: Batch, parts: Batch, key: Any
) -> tuple[Sums, Sums]:
    """`accumulate.together_and_apart` of a few rows that every device has."""
    return accumulate.together_and_apart(task, _moves(task, plan), params, model_state, batch, parts, key)


def _moves(task: Task, plan: Plan) -> Moves:
    mesh = plan.mesh

    def constrain(x: jax.Array, spec: PartitionSpec, leading: int) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec[leading:])))

    def hold(x: jax.Array, place: Placement, leading: int) -> jax.Array:
        return constrain(x, place.rest if task.row.reduce_each_microbatch else place.compute, leading)

    def microbatches(batch: Batch, count: int) -> Batch:
        sharding = NamedSharding(mesh, PartitionSpec(None, *plan.batch_spec))
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(interleave(x, count, task.group), sharding), batch
        )

    return Moves(
        gather=lambda x, place, leading: constrain(x, place.compute, leading),
        reduce=lambda x, place, leading: constrain(x, place.rest, leading),
        hold=hold,
        finish=lambda x, place, leading: constrain(x, place.rest, leading),
        total=lambda x: x,
        average=lambda before, after: after,
        microbatches=microbatches,
        key=partial(_key, task),
    )


def _key(task: Task, key: jax.Array, rows: int, index: Any, count: int) -> jax.Array | keys.BatchKey:
    if count == 1:
        return key
    group, first = task.group, index * task.group
    return keys.batch_key(key, rows=rows, total=rows * count, offset=first, stride=count, group=group)


def _whole(plan: Plan, batch: Batch) -> Batch:
    """The batch, laid over the batch axes whatever way it came in."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, plan.batch_sharding), batch)
