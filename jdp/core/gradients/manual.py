"""Replica view: the gradient region runs under `shard_map` over the batch axes and issues its own collectives.

Each device sees its rows of the batch and differentiates its own sum. That is what lets it add microbatches locally and
synchronise once, and choose the dtype on the wire, or codes (`wire.py`).

The model's own axes stay XLA's while the loss runs; a collective along the batch axes sends the shard that a device
holds along the model's (`model_axes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdp.core.batch import interleave
from jdp.core.gradients import collectives
from jdp.core.gradients.accumulate import evaluate, step_gradients
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.model_state import changed_leaves, mean_over
from jdp.core.gradients.spec import Collectives, GradientSpec
from jdp.core.plan import Plan
from jdp.core.random import row_keys as keys
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import batch_axes
from jdp.core.sharding.placement import Placement, keep_axes
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree


def gradients(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """Return a function (params, model_state, batch, key) -> (Σ∇total at rest specs, sums, model_state).

    All arrays are global.
    """
    changed: list[bool] = []

    def local(params: PyTree, model_state: PyTree, *others: Any) -> Any:
        grads, sums, after = step_gradients(spec, make_collectives(spec, plan), params, model_state, *others)
        changed[:] = changed_leaves(model_state, after)
        return grads, sums, trained_part(after, changed)

    rest, replicated = _rest_specs(plan, spec.placements), PartitionSpec()
    reduced = _rest_specs(plan, spec.trained_placements)
    prefix: Any = Sums
    sums_specs = prefix(replicated, replicated, replicated, rows=plan.batch_spec, whole=replicated)

    def run(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        params = collectives.to_replica_view(params, spec.placements, plan.mesh)
        replicas = _shard_map(
            local, plan, (rest, replicated, plan.batch_spec, replicated), (reduced, sums_specs, replicated)
        )
        grads, sums, after = replicas(params, model_state, batch, key)
        grads = collectives.from_replica_view(grads, spec.trained_placements, plan.mesh)
        return grads, sums, with_trained(model_state, after, changed)

    return run


def evaluation(spec: GradientSpec, plan: Plan) -> Callable[..., Any]:
    """Return a function (params, model_state, batch) -> sums, global."""

    def local(params: PyTree, model_state: PyTree, batch: Batch) -> Any:
        return evaluate(spec, make_collectives(spec, plan), params, model_state, batch)

    rest, replicated = _rest_specs(plan, spec.placements), PartitionSpec()
    replicas = _shard_map(local, plan, (rest, replicated, plan.batch_spec), replicated)
    return lambda params, *others: replicas(collectives.to_replica_view(params, spec.placements, plan.mesh), *others)


def within(spec: GradientSpec, plan: Plan, function: Callable[..., None]) -> Callable[..., tuple[()]]:
    """Return a function (params, model_state, batch, key) that calls `function` as a step is traced."""

    def local(*arguments: Any) -> tuple[()]:
        function(make_collectives(spec, plan), *arguments)
        return ()

    replicated = PartitionSpec()
    specs = _rest_specs(plan, spec.placements), replicated, plan.batch_spec, replicated
    replicas = _shard_map(local, plan, specs, ())
    return lambda params, *others: replicas(collectives.to_replica_view(params, spec.placements, plan.mesh), *others)


def replicated_within(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return a function that every device calls with the same arrays, and with its mesh axes named."""
    return _shard_map(function, plan, PartitionSpec(), PartitionSpec())


def _shard_map(local: Callable[..., Any], plan: Plan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
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
    """Return the rest specs in the replica view with the batch axes alone; the model's axes stay automatic."""
    keep = partial(keep_axes, set(batch_axes(plan.mesh)))

    def rest_spec(placement: Placement) -> PartitionSpec:
        return PartitionSpec(*map(keep, collectives.replica_view_spec(placement, plan.mesh)))

    return jax.tree.map(rest_spec, placements)


def make_collectives(spec: GradientSpec, plan: Plan) -> Collectives:
    """Return the collectives of the replica view: those of `jax.lax`, on a device's own arrays."""
    mesh, axes, wire = plan.mesh, batch_axes(plan.mesh), spec.settings.wire
    others = tuple(axis for axis in axes if axis != DATA)
    replicas = plan.batch_shards

    def reduce(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return collectives.psum_scatter(x, placement, leading, mesh, wire, seed)

    def finish(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        summed = axes if placement.dim is None else others
        return collectives.psum(x, summed, placement, leading, mesh, wire, seed)

    def average(before: Any, after: Any) -> Any:
        unchanged = before is after or not jnp.issubdtype(after.dtype, jnp.floating)
        return after if unchanged else mean_over(after, axes, replicas)

    def key_of(key: jax.Array, rows: int, index: Any, count: int) -> jax.Array | keys.BatchKey:
        if replicas == count == 1:
            return key
        first = jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(rows * count)
        first += jnp.uint32(index)
        return keys.batch_key(key, rows=rows, total=rows * count * replicas, offset=first, stride=count)

    return Collectives(
        gather=lambda x, placement, leading: collectives.all_gather(x, placement, leading, mesh),
        reduce=reduce,
        constrain=lambda x, placement, leading: x,
        finish=finish,
        sum=lambda x: jax.lax.psum(x, axes),
        average=lambda before, after: jax.tree.map(average, before, after),
        microbatches=lambda batch, count: jax.tree.map(lambda x: interleave(x, count), batch),
        key_of=key_of,
        axes=axes,
        by_layer=replicas > 1,
    )
