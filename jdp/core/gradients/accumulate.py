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
from jdp.core.gradients.microbatch import microbatch_gradients, microbatches, rowwise_loss, working_copy
from jdp.core.gradients.model_state import changed_leaves, refuse_varying
from jdp.core.gradients.overlap_cost import why_off
from jdp.core.gradients.rowwise_loss import RowwiseLoss
from jdp.core.gradients.spec import Collectives, GradientSpec, Kept, map_leaves
from jdp.core.random.row_keys import BatchKey
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.traced_mesh import traced_mesh
from jdp.core.state import trained_part, with_trained
from jdp.core.tracing.collectives import reduced_by_layer
from jdp.core.tracing.jaxprs import places_made
from jdp.core.types import Batch, PyTree
from jdp.core.wire import feedback, rounding


def step_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
    kept: Kept,
) -> tuple[PyTree, Sums, PyTree, Kept]:
    """Return (Σ∇total at rest specs, the sums, the model state, `kept`), summed over devices, nothing divided.

    The gradients are a tree like `trained_part(params)`: frozen parameters have none. `kept` is what a synchroniser
    keeps from step to step.
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
    loss, operands = rowwise_loss(spec, collectives), working_copy(spec, collectives, params)
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        refuse_varying(lambda *given: loss(operands, *given)[1], model_state, *first, carried=count > 1)

    collectives = _ready_first(spec, collectives, loss, operands, model_state, *first)
    each, last = partial(microbatch_gradients, spec, collectives, loss, operands), None
    if count > 1 and by_layer[0] is not spec:
        last = partial(microbatch_gradients, *by_layer, rowwise_loss(*by_layer), params, copies=operands)
        if spec.strategy.reduce_each_microbatch:
            spec = by_layer[0]
            loss = rowwise_loss(spec, collectives)
            each = partial(microbatch_gradients, spec, collectives, loss, params, copies=operands)
            replicas = math.prod(jax.lax.axis_size(axis) for axis in collectives.axes if axis != DATA)
            last = last if replicas > 1 else None  # which differs in what it sends over `replica` alone
    reduces_each = count > 1 and spec.strategy.reduce_each_microbatch and spec.strategy.gather != "use"
    seed_of, (kept, lost) = rounding.seeds(spec.settings.wire, key), feedback.split_off(kept)
    if count == 1:
        grads, sums, after = each(model_state, *first, seed_of(0))
    else:
        changed: list[bool] = []  # the leaves of the model state that the model's calls change: only those are carried

        def probe(microbatch: Batch, key: jax.Array | BatchKey) -> Any:
            grads, sums, after = each(model_state, microbatch, key, seed_of(0))
            changed[:] = changed_leaves(model_state, after)
            if reduces_each:
                grads, _ = collectives.reduce_all(grads, spec.trained_placements, kept, seed_of(0))
            return grads, sums

        def one_more(before: Any, xs: Any, differentiate: Any) -> Any:
            (sums, state, kept), (index, microbatch), seed = before, xs, seed_of(xs[0])
            state, its_key = with_trained(model_state, state, changed), collectives.key_of(key, rows, index, count)
            grads, more, after = differentiate(state, microbatch, its_key, seed)
            sums = jax.tree.map(jnp.add, sums, more.only)
            if reduces_each:
                if lost is not None:  # which the last sends: the step's weight is known then
                    weight = jnp.where(index == count - 1, spec.summed(collectives, sums).weight, 0)
                    kept = feedback.added(kept, lost, weight)
                grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept, seed)
            return grads, (sums, trained_part(after, changed), kept), (more.rows, more.whole)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            more, others, outputs = one_more(carry[1], xs, each)
            return (jax.tree.map(jnp.add, carry[0], more), others), outputs

        zero_grads, zero_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(probe, *first)
        )
        zero_grads = map_leaves(collectives.constrain, zero_grads, spec.trained_placements)
        start = zero_grads, (zero_sums.only, trained_part(model_state, changed), kept)
        slices = (jnp.arange(count, dtype=jnp.uint32), micro)
        if last is None:
            (grads, (sums, state, kept)), outputs = jax.lax.scan(body, start, slices)
        else:
            (grads, before), outputs = jax.lax.scan(body, start, jax.tree.map(lambda x: x[:-1], slices))
            # Without the barrier XLA may run the forward pass before the others', and hold the activations of two.
            earlier, xs = jax.lax.optimization_barrier((grads, jax.tree.map(lambda x: x[-1], slices)))
            grads, (sums, state, kept), end = one_more(before, xs, partial(last, earlier=earlier))
            outputs = jax.tree.map(lambda x, y: jnp.concatenate([x, jnp.expand_dims(y, 0)]), outputs, end)
            spec, collectives = by_layer
        after = with_trained(model_state, state, changed)
        by_row, whole = [joined(x, spec.settings.group) for x in outputs[0]], [x[-1] for x in outputs[1]]
        sums = replace(sums, rows=by_row, whole=whole)

    total = replace(spec.summed(collectives, sums.only), rows=sums.rows, whole=sums.whole)
    if not reduces_each and spec.strategy.gather != "use":  # else the backward pass reduced, of the last at least
        if lost is not None:
            kept = feedback.added(kept, lost, total.weight)
        grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept, seed_of(0))
    grads, kept = collectives.finish_all(grads, spec.trained_placements, kept, seed_of(count))
    kept = feedback.per_weight(kept, total.weight)
    return grads, total, collectives.average(model_state, after), kept


def _by_layer(
    spec: GradientSpec, collectives: Collectives, params: PyTree, *given: Any
) -> tuple[GradientSpec, Collectives]:
    """Have gathers and reductions made layer by layer, inside the forward and the backward pass of a microbatch.

    Every strategy then is as zero3 is; but what the forward pass gathered is kept for the backward pass, and under ddp
    nothing is gathered. Of several microbatches all take the weights that were gathered before the first (`Held`), and
    the last alone sends what is sent once a step, with the gradients of the others added before: all gradients of ddp
    and zero1, zero2's shards over `replica`. Nothing changes for a loss without a layer loop, or for one that uses a
    layer's weights in several places, each of which would reduce. Nor for gradients in buckets, encoded, or of another
    dtype than the parameters.
    """
    if collectives.synchroniser is not None or spec.settings.precision.params != spec.settings.precision.reduce:
        return spec, collectives
    whole = not spec.strategy.shard_state

    def reduce(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        return collectives.finish(collectives.reduce(x, placement, leading, seed), placement, leading)

    def finish(x: jax.Array, placement: Placement, leading: int) -> jax.Array:
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
    backward = partial(microbatch_gradients, new, plain, rowwise_loss(new, plain), params)
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


def _ready_first(
    spec: GradientSpec, collectives: Collectives, loss: RowwiseLoss, operands: PyTree, *given: Any
) -> Collectives:
    """Have the synchroniser fill its buckets in the order in which the backward pass finishes the gradients."""
    if collectives.synchroniser is None:
        return collectives
    backward = partial(microbatch_gradients, spec, collectives, loss)
    jaxpr, shapes = jax.make_jaxpr(backward, return_shape=True)(operands, *given)
    count = len(jax.tree.leaves(shapes[0]))
    places = places_made(jaxpr.jaxpr)[:count]
    order = tuple(sorted(range(count), key=lambda i: (places[i], -i)))
    return replace(collectives, synchroniser=replace(collectives.synchroniser, order=order))


def evaluate(spec: GradientSpec, collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """Return the sums of one batch, forward only; the loss gets `rng=None`, which means evaluation."""
    loss, operands = rowwise_loss(spec, collectives), working_copy(spec, collectives, params)

    def forward(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, None)[0]

    if spec.settings.accumulate == 1:
        sums = forward(batch)
    else:
        each = jax.lax.map(forward, collectives.microbatches(batch, spec.settings.accumulate))
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
    return spec.summed(collectives, sums)
