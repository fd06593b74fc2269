"""The gradient of a step: one algorithm for every strategy and both partitionings.

1. Gather the working copy in compute dtype, unless the strategy gathers at each use.
2. For each microbatch: differentiate the loss's *total*. Where the strategy reduces each microbatch, reduce here (under
   ZeRO-3 the backward pass of the gather already did). Add to the accumulator.
3. Reduce, where that happens once per step, and finish (small leaves, the `replica` axis).
4. Sum totals, weights and metrics over devices. Nothing was divided yet: the caller divides by the global weight, once.

How to gather, reduce and sum is the vocabulary (`Collectives`) that `auto` and `manual` supply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.batch import batch_rows
from jdp.core.batch_keys import BatchKey
from jdp.core.gradients.draws import RowwiseLoss
from jdp.core.gradients.gathers import named
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.model_state import moved, refuse_varying
from jdp.core.layers import Gather
from jdp.core.precision import Precision
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, LossFn, PyTree

Move = Callable[[jax.Array, Placement, int], jax.Array]


@dataclass(frozen=True)
class Collectives:
    """How arrays move, in one partitioning. `leading` counts dimensions already sliced off by a layer loop.

    Attributes:
        gather: (shard at rest, placement, leading) -> the array at its compute spec.
        reduce: (gradient at compute spec, placement, leading) -> at its rest spec, summed over `data`.
        hold: (accumulator, placement, 0) -> the same, kept where the strategy accumulates.
        finish: (gradient at rest, placement, 0) -> summed over whatever `reduce` left out.
        total: scalar -> its sum over the batch axes.
        average: (model state before, after the step) -> one value for all shards; what did not change, as it is.
        microbatches: (batch, K) -> the same with leaves [K, rows / K, ...], interleaved.
        key: (step key, rows of a microbatch, index of it, K) -> the key that the loss gets, or where it
            sees some of the rows only, a `BatchKey`.
        axes: the mesh axes that the loss sees a part of the batch along; none where it sees the whole.
    """

    gather: Move
    reduce: Move
    hold: Move
    finish: Move
    total: Callable[[jax.Array], jax.Array]
    average: Callable[[PyTree, PyTree], PyTree]
    microbatches: Callable[[Batch, int], Batch]
    key: Callable[[jax.Array, int, Any, int], jax.Array | BatchKey]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientSpec:
    """What is asked for, the same in both partitionings.

    Attributes:
        loss_fn, precision, accumulate, sync_batch_norm, group: as for `jdp.make_train_step`.
        adapter, trained: `Static.adapter`, `Static.trained`.
        placements: a tree like the parameters, of `Placement`.
        row: the strategy.
    """

    loss_fn: LossFn
    adapter: Any
    placements: PyTree
    row: Strategy
    precision: Precision
    accumulate: int = 1
    trained: tuple[bool, ...] | None = None
    sync_batch_norm: bool = True
    group: int = 1

    @property
    def trained_placements(self) -> PyTree:
        """Where gradients go: `placements` with None for what is frozen."""
        return trained_part(self.placements, self.trained)


def step_gradients(
    spec: GradientSpec, collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[PyTree, Sums, PyTree]:
    """Return (Σ∇total at rest specs, the sums, the model state), all global, nothing divided.

    The gradients are a tree like `trained_part(params)`: frozen parameters have none.
    """
    count = spec.accumulate
    rows = batch_rows(batch) // count
    loss, operands = RowwiseLoss(_traced(spec, collectives)), working_copy(spec, collectives, params)
    one = partial(_microbatch_gradients, spec, collectives, loss, operands)
    micro = batch if count == 1 else collectives.microbatches(batch, count)
    first = (micro if count == 1 else jax.tree.map(lambda x: x[0], micro), collectives.key(key, rows, 0, count))
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        refuse_varying(lambda *given: loss(operands, *given)[1], model_state, *first, carried=count > 1)

    if count == 1:
        grads, sums, after = one(model_state, *first)
    else:
        changed: list[bool] = []  # of the model state's leaves, which the model's calls change: only those are carried

        def probe(microbatch: Batch, key: jax.Array | BatchKey) -> Any:
            grads, sums, after = one(model_state, microbatch, key)
            changed[:] = moved(model_state, after)
            return grads, sums

        def body(carry: Any, this: Any) -> tuple[Any, None]:
            grads, sums, state = carry
            index, microbatch = this
            before = with_trained(model_state, state, changed)
            more, more_sums, after = one(before, microbatch, collectives.key(key, rows, index, count))
            return (*jax.tree.map(jnp.add, (grads, sums), (more, more_sums)), trained_part(after, changed)), None

        zero_grads, zero_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(probe, *first)
        )
        start = (
            _map(collectives.hold, zero_grads, spec.trained_placements),
            zero_sums,
            trained_part(model_state, changed),
        )
        (grads, sums, state), _ = jax.lax.scan(body, start, (jnp.arange(count, dtype=jnp.uint32), micro))
        after = with_trained(model_state, state, changed)

    if not spec.row.reduce_each_microbatch:
        grads = _map(collectives.reduce, grads, spec.trained_placements)
    grads = _map(collectives.finish, grads, spec.trained_placements)
    return grads, jax.tree.map(collectives.total, sums), collectives.average(model_state, after)


def evaluate(spec: GradientSpec, collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """The sums of one batch, forward only; the loss gets `rng=None`, which means evaluation."""
    loss, operands = _traced(spec, collectives), working_copy(spec, collectives, params)

    def one(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, None)[0]

    if spec.accumulate == 1:
        sums = one(batch)
    else:
        each = jax.lax.map(one, collectives.microbatches(batch, spec.accumulate))
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
    return jax.tree.map(collectives.total, sums)


def together_and_apart(
    spec: GradientSpec,
    collectives: Collectives,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    parts: Batch,
    key: Any,
) -> tuple[Sums, Sums]:
    """The sums of one batch, and of each of its parts (leaves [parts, rows, ...]): forward only, evaluation mode."""
    loss, operands = replace(_traced(spec, collectives), training=False), working_copy(spec, collectives, params)

    def one(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, key)[0]

    return one(batch), jax.lax.map(one, parts)


def working_copy(spec: GradientSpec, collectives: Collectives, params: PyTree) -> PyTree:
    """What the loss is differentiated by: whole weights in compute dtype, or under ZeRO-3 the shards as they rest."""
    if spec.row.gather == "use":
        return params
    dtype = spec.precision.compute_dtype
    return _map(lambda leaf, placement, _: _gather(collectives, dtype, leaf, placement, 0), params, spec.placements)


def _traced(spec: GradientSpec, collectives: Collectives) -> TracedLoss:
    gather = gather_with_reduced_grad(collectives, spec.precision) if spec.row.gather == "use" else None
    return TracedLoss(
        spec.loss_fn, spec.adapter, spec.placements, gather, collectives.axes if spec.sync_batch_norm else ()
    )


def _microbatch_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    loss: RowwiseLoss,
    operands: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: Any,
) -> tuple[PyTree, Sums, PyTree]:
    def total(trained: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
        sums, changed = loss(with_trained(operands, trained, spec.trained), model_state, batch, key)
        return sums.total, (sums, changed)

    (_, (sums, changed)), grads = jax.value_and_grad(total, has_aux=True)(trained_part(operands, spec.trained))
    grads = jax.tree.map(lambda g: g.astype(spec.precision.reduce_dtype), grads)
    if spec.row.gather == "step" and spec.row.reduce_each_microbatch:
        grads = _map(collectives.reduce, grads, spec.trained_placements)
    return grads, sums, changed


def gather_with_reduced_grad(collectives: Collectives, precision: Precision) -> Gather:
    """The gather boundary of ZeRO-3: forward, a shard is cast and gathered; backward, its gradient goes straight to the
    shard's spec. Without it XLA moves the activations instead: 60 times the traffic.
    """

    def gather(shard: jax.Array, placement: Placement, leading: int) -> jax.Array:
        if placement.dim is None:
            return _gather(collectives, precision.compute_dtype, shard, placement, leading)

        def named_gather(shard: jax.Array) -> jax.Array:
            with named(placement.path):
                return _gather(collectives, precision.compute_dtype, shard, placement, leading)

        if not placement.trained:
            return named_gather(shard)

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            reduced = collectives.reduce(cotangent.astype(precision.reduce_dtype), placement, leading)
            return (reduced.astype(shard.dtype),)

        boundary = jax.custom_vjp(named_gather)
        boundary.defvjp(lambda shard: (named_gather(shard), None), backward)
        return boundary(shard)

    return gather


def _gather(
    collectives: Collectives, dtype: jnp.dtype, shard: jax.Array, placement: Placement, leading: int
) -> jax.Array:
    """Cast, then gather: the barrier keeps XLA from moving the cast behind the gather, which doubles the bytes.

    Frozen weights may rest in fewer bytes than are computed with: they are gathered as they rest. What is not floating
    point is never cast.
    """
    if not jnp.issubdtype(shard.dtype, jnp.floating):
        return collectives.gather(shard, placement, leading)
    if not placement.trained and shard.dtype.itemsize < dtype.itemsize:
        return collectives.gather(shard, placement, leading).astype(dtype)
    if shard.dtype != dtype:
        shard = shard.astype(dtype)
        if placement.dim is not None:
            shard = jax.lax.optimization_barrier(shard)
    return collectives.gather(shard, placement, leading)


def _map(move: Any, tree: PyTree, placements: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, placement: move(leaf, placement, 0), tree, placements)
