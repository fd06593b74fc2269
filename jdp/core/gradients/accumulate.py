"""The gradient of a step: one algorithm for every strategy and both partitionings.

1. Gather the working copy in compute dtype, unless the strategy gathers at each use.
2. For each microbatch: differentiate the loss's *total*. Where the strategy reduces each microbatch, reduce (under
   ZeRO-3 the backward pass of the gather already did). Add to the accumulator.
3. Reduce, where that happens once per step, and finish (small leaves, the `replica` axis).
4. Sum totals, weights and metrics over devices. Nothing was divided yet: the caller divides by the global weight, once.

How to gather, reduce and sum is what `auto` and `manual` supply (`Collectives`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.batch import batch_rows, joined
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.microbatch import microbatch_gradients, microbatches, traced_loss, working_copy
from jdp.core.gradients.model_state import changed_leaves, refuse_varying
from jdp.core.gradients.overlap_cost import why_off
from jdp.core.gradients.spec import Collectives, GradientSpec, map_leaves, sum_leaves
from jdp.core.gradients.wire import seeds
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.traced_mesh import traced_mesh
from jdp.core.state import trained_part, with_trained
from jdp.core.tracing.collectives import reduced_by_layer
from jdp.core.types import Batch, PyTree


def step_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
) -> tuple[PyTree, Sums, PyTree]:
    """Return (Σ∇total at rest specs, the sums, the model state), summed over devices, nothing divided.

    The gradients are a tree like `trained_part(params)`: frozen parameters have none.
    """
    count = spec.settings.accumulate
    rows = batch_rows(batch) // count
    micro, part, its_key = microbatches(spec, collectives, batch, key)
    first = part, its_key
    by_layer = spec, collectives
    if collectives.overlap and (count == 1 or spec.strategy.gather != "use"):
        by_layer = _by_layer(spec, collectives, params, model_state, *first)
    if count == 1:
        spec, collectives = by_layer
    loss, operands = traced_loss(spec, collectives), working_copy(spec, collectives, params)
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        refuse_varying(lambda *given: loss(operands, *given)[1], model_state, *first, carried=count > 1)

    each, last = partial(microbatch_gradients, spec, collectives, loss, operands), None
    if count > 1 and by_layer[0] is not spec:
        last = partial(microbatch_gradients, *by_layer, traced_loss(*by_layer), params, copies=operands)
        if spec.strategy.reduce_each_microbatch:
            spec = by_layer[0]
            loss = traced_loss(spec, collectives)
            each = partial(microbatch_gradients, spec, collectives, loss, params, copies=operands)
            replicas = math.prod(jax.lax.axis_size(axis) for axis in collectives.axes if axis != DATA)
            last = last if replicas > 1 else None  # which differs in what it sends over `replica` alone
    reduces_each = count > 1 and spec.strategy.reduce_each_microbatch and spec.strategy.gather != "use"
    seed_of = seeds(spec.settings.wire, key)
    if count == 1:
        grads, sums, after = each(model_state, *first, seed_of(0))
    else:
        changed: list[bool] = []  # the leaves of the model state that the model's calls change: only those are carried

        def probe(microbatch: Batch, key: jax.Array) -> Any:
            grads, sums, after = each(model_state, microbatch, key, seed_of(0))
            changed[:] = changed_leaves(model_state, after)
            if reduces_each:
                grads = sum_leaves(collectives.reduce, grads, spec.trained_placements, seed_of(0))
            return grads, sums

        def one_more(before: Any, xs: Any, differentiate: Any) -> Any:
            (sums, state), (index, microbatch), seed = before, xs, seed_of(xs[0])
            state, its_key = with_trained(model_state, state, changed), collectives.key_of(key, rows, index, count)
            grads, more, after = differentiate(state, microbatch, its_key, seed)
            sums = jax.tree.map(jnp.add, sums, more.only)
            if reduces_each:
                grads = sum_leaves(collectives.reduce, grads, spec.trained_placements, seed)
            return grads, (sums, trained_part(after, changed)), (more.rows, more.whole)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            more, others, outputs = one_more(carry[1], xs, each)
            return (jax.tree.map(jnp.add, carry[0], more), others), outputs

        zero_grads, zero_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(probe, *first)
        )
        zero_grads = map_leaves(collectives.constrain, zero_grads, spec.trained_placements)
        start = zero_grads, (zero_sums.only, trained_part(model_state, changed))
        slices = (jnp.arange(count, dtype=jnp.uint32), micro)
        if last is None:
            (grads, (sums, state)), outputs = jax.lax.scan(body, start, slices)
        else:
            (grads, before), outputs = jax.lax.scan(body, start, jax.tree.map(lambda x: x[:-1], slices))
            # Without the barrier XLA may run the forward pass before the others', and hold the activations of two.
            earlier, xs = jax.lax.optimization_barrier((grads, jax.tree.map(lambda x: x[-1], slices)))
            grads, (sums, state), end = one_more(before, xs, partial(last, earlier=earlier))
            outputs = jax.tree.map(lambda x, y: jnp.concatenate([x, jnp.expand_dims(y, 0)]), outputs, end)
            spec, collectives = by_layer
        after = with_trained(model_state, state, changed)
        by_row, whole = [joined(x) for x in outputs[0]], [x[-1] for x in outputs[1]]
        sums = replace(sums, rows=by_row, whole=whole)

    total = replace(jax.tree.map(collectives.sum, sums.only), rows=sums.rows, whole=sums.whole)
    if not reduces_each and spec.strategy.gather != "use":  # else the backward pass reduced, of the last at least
        grads = sum_leaves(collectives.reduce, grads, spec.trained_placements, seed_of(0))
    grads = sum_leaves(collectives.finish, grads, spec.trained_placements, seed_of(count))
    return grads, total, collectives.average(model_state, after)


def _by_layer(
    spec: GradientSpec, collectives: Collectives, params: PyTree, *given: Any
) -> tuple[GradientSpec, Collectives]:
    """Have gathers and reductions made layer by layer, inside the forward and the backward pass of a microbatch.

    Every strategy then is as zero3 is; but what the forward pass gathered is kept for the backward pass, and under ddp
    nothing is gathered. Of several microbatches all take the weights that were gathered before the first (`Held`), and
    the last alone sends what is sent once a step, with the gradients of the others added before: all gradients of ddp
    and zero1, zero2's shards over `replica`. Nothing changes for a loss without a layer loop, or for one that uses a
    layer's weights in several places, each of which would reduce. Nor for gradients that are encoded, or of another
    dtype than the parameters.
    """
    if spec.settings.wire is not None or spec.settings.precision.params != spec.settings.precision.reduce:
        return spec, collectives
    whole = not spec.strategy.shard_state

    def reduce(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return collectives.finish(collectives.reduce(x, placement, leading, seed), placement, leading)

    def finish(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return x if whole or placement.dim is not None else collectives.finish(x, placement, leading)

    row = replace(spec.strategy, gather="use", reduce_each_microbatch=True)
    new = replace(spec, strategy=row, keep_gathered=spec.strategy.gather != "use")
    within = replace(collectives, finish=finish)
    if spec.settings.accumulate > 1 and spec.strategy.reduce_each_microbatch:
        within = replace(within, finish_at_use=collectives.finish)  # zero2's last microbatch
    else:
        within = replace(within, reduce=reduce)
    if not new.keep_gathered:
        return new, within
    plain = replace(within, overlap=False)
    backward = partial(microbatch_gradients, new, plain, traced_loss(new, plain), params)
    most = {placement.path: math.prod(placement.shape) for placement in jax.tree.leaves(spec.placements)}
    traced = jax.make_jaxpr(backward)(*given).jaxpr
    reduced = reduced_by_layer(traced)
    if not reduced or any(elements > most[path] for path, elements in reduced.items()):
        return spec, collectives
    mesh = traced_mesh()
    if spec.settings.overlap is None and mesh is not None and (why := why_off(traced, mesh, spec.settings)):
        spec.off.append(why)
        return spec, collectives
    return new, within


def evaluate(spec: GradientSpec, collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """Return the sums of one batch, forward only; the loss gets `rng=None`, which means evaluation."""
    loss, operands = traced_loss(spec, collectives), working_copy(spec, collectives, params)

    def forward(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, None)[0]

    if spec.settings.accumulate == 1:
        sums = forward(batch)
    else:
        each = jax.lax.map(forward, collectives.microbatches(batch, spec.settings.accumulate))
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
    return jax.tree.map(collectives.sum, sums)
