"""The loss as a step calls it for one microbatch, and the gradients of that call."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.batch import batch_rows
from jdp.core.gradients.boundary import Held, cast_and_gather, gather_with_reduced_grad, is_reduced_at_use
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.pipeline import pipelined
from jdp.core.gradients.spec import Collectives, GradientSpec, map_leaves
from jdp.core.gradients.wire import seeds_by_row
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree


def microbatches(spec: GradientSpec, collectives: Collectives, batch: Batch, key: Any) -> tuple[Batch, Batch, Any]:
    """Return the batch as microbatches, the first of them and its key."""
    count = spec.settings.accumulate
    its_key = None if key is None else collectives.key_of(key, batch_rows(batch) // count, 0, count)
    if count == 1:
        return batch, batch, its_key
    micro = collectives.microbatches(batch, count)
    return micro, jax.tree.map(lambda x: x[0], micro), its_key


def working_copy(spec: GradientSpec, collectives: Collectives, params: PyTree) -> PyTree:
    """Return what the loss is differentiated by: gathered weights in compute dtype; under ZeRO-3 the shards at rest."""
    if spec.strategy.gather == "use":
        return params
    dtype = spec.settings.precision.compute_dtype
    return map_leaves(partial(cast_and_gather, collectives.gather, dtype), params, spec.placements)


def traced_loss(spec: GradientSpec, collectives: Collectives) -> TracedLoss:
    """Return the loss as a function of the working copy."""
    gather, whole = None, not spec.strategy.shard_state
    if spec.strategy.gather == "use":
        reduce, finish = collectives.reduce, collectives.finish_at_use
        gather = gather_with_reduced_grad(collectives.gather, reduce, spec.settings.precision, whole, finish)
    sync_axes = collectives.axes if spec.settings.sync_batch_norm else ()
    return TracedLoss(
        spec.loss_fn,
        spec.adapter,
        spec.placements,
        gather,
        sync_axes,
        keep=spec.keep_gathered,
        whole=whole,
    )


def microbatch_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    loss: TracedLoss,
    operands: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: Any,
    seed: jax.Array | None = None,
    *,
    copies: PyTree = None,
    earlier: PyTree = None,
) -> tuple[PyTree, Sums, PyTree]:
    """Return the gradients of one microbatch, its sums, and the model state afterwards.

    With `copies`, the working copy of the operands, and `earlier`, the gradients of the microbatches before, as `Held`
    has them: then the gradients are of all of these. `seed` is of the rounding in the backward pass.
    """
    nothing = jax.tree.map(lambda _: None, spec.placements)
    narrow, shards = nothing, operands
    if spec.strategy.gather == "use" and _is_narrow(spec, operands):
        dtype, narrow = spec.settings.precision.params_dtype, operands
        shards = jax.tree.map(lambda x, p: jnp.zeros(x.shape, dtype) if p.trained else x, operands, spec.placements)
    seeds = None
    if seed is not None and spec.strategy.gather == "use":
        seeds = seeds_by_row(spec.placements, shards, seed)

    def total(trained: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
        weights = with_trained(shards, trained, spec.trained)
        if copies is not None or seeds is not None or narrow is not nothing:
            held = [nothing if tree is None else tree for tree in (copies, earlier, seeds)]
            weights = jax.tree.map(lambda _, *given: Held(*given), spec.placements, weights, narrow, *held)
        sums, after = loss(weights, model_state, batch, key)
        return sums.total, (sums, after)

    differentiate = jax.value_and_grad(total, has_aux=True)
    if collectives.overlap and spec.strategy.gather == "use":
        differentiate = pipelined(differentiate, after=jax.tree.leaves(earlier))
    (_, (sums, after)), grads = differentiate(trained_part(shards, spec.trained))
    grads = jax.tree.map(lambda g: g.astype(spec.settings.precision.reduce_dtype), grads)
    if earlier is not None:
        whole = not spec.strategy.shard_state
        add = partial(jax.tree.map, lambda g, e, placement: g if is_reduced_at_use(placement, whole) else g + e)
        grads = add(grads, earlier, spec.trained_placements)
    return grads, sums, after


def _is_narrow(spec: GradientSpec, params: PyTree) -> bool:
    """Return True if trained parameters come in another dtype than they rest in."""
    dtype = spec.settings.precision.params_dtype
    return any(x.dtype != dtype for x in jax.tree.leaves(trained_part(params, spec.trained)))
