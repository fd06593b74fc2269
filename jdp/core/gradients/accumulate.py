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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp.core.batch import batch_rows
from jdp.core.batch_keys import BatchKey
from jdp.core.gradients.draws import RowwiseLoss
from jdp.core.gradients.gathers import parameter_scope, reduced_by_layer, reduction_scope
from jdp.core.gradients.jaxprs import places_made
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.model_state import changed_leaves, refuse_varying
from jdp.core.gradients.pipeline import pipelined
from jdp.core.gradients.synchronise import Synchroniser
from jdp.core.gradients.wire import WIDE, Wire
from jdp.core.layers import Gather
from jdp.core.precision import Precision
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, LossFn, PyTree

Collective = Callable[[jax.Array, Placement, int], jax.Array]
"""(array, placement of its parameter, leading) -> array; `leading` counts dimensions that a layer loop sliced off."""
Kept = dict[str, PyTree]
"""What a synchroniser keeps between steps, by name; {} for nothing."""
SQUARES = "squares"
"""The entry of `Kept` to which squared norms are added, of every device's gradient before it is reduced."""


@dataclass(frozen=True)
class Collectives:
    """How arrays are gathered, reduced and sharded in one partitioning.

    Attributes:
        gather: a shard at its rest spec -> the array at its compute spec.
        reduce: a gradient at its compute spec -> at its rest spec, summed over `data`.
        constrain: an accumulator of gradients -> the same values, sharded as the strategy accumulates.
        finish: a gradient at its rest spec -> summed over the batch axes that `reduce` left out.
        sum: scalar -> its sum over the batch axes.
        average: (model state before, after the step) -> floating-point leaves that changed, averaged over the batch
            axes; other leaves of `after` as they are.
        microbatches: (batch, K) -> the batch with leaves [K, rows / K, ...], interleaved.
        key_of: (step key, rows of a microbatch, its index, K) -> the key that the loss gets; a `BatchKey` where the
            loss is called on some of the rows only.
        axes: the mesh axes along which a call of the loss gets only its device's rows; empty where it gets all rows.
        synchroniser: takes the place of `reduce` and `finish` for whole gradients, in buckets or encoded; None where
            every leaf has a collective of its own.
        overlap: True if layer loops gather one layer ahead and reduce one behind.
    """

    gather: Collective
    reduce: Collective
    constrain: Collective
    finish: Collective
    sum: Callable[[jax.Array], jax.Array]
    average: Callable[[PyTree, PyTree], PyTree]
    microbatches: Callable[[Batch, int], Batch]
    key_of: Callable[[jax.Array, int, Any, int], jax.Array | BatchKey]
    axes: tuple[str, ...] = ()
    synchroniser: Synchroniser | None = None
    overlap: bool = False

    def reduce_all(self, grads: PyTree, placements: PyTree, kept: Kept) -> tuple[PyTree, Kept]:
        """Reduce every leaf, compute spec -> rest spec; return `kept` as it is afterwards."""
        kept = _with_squares(kept, grads)
        if self.synchroniser is not None:
            grads, own = self.synchroniser.reduce(grads, {name: kept[name] for name in kept if name != SQUARES})
            return grads, {**kept, **own}
        return _map(self.reduce, grads, placements), kept

    def finish_all(self, grads: PyTree, placements: PyTree, kept: Kept) -> tuple[PyTree, Kept]:
        """Sum every leaf over the batch axes that `reduce_all` left out; return `kept` as it is afterwards."""
        if self.synchroniser is not None:
            grads, own = self.synchroniser.finish(grads, {name: kept[name] for name in kept if name != SQUARES})
            return grads, {**kept, **own}
        return _map(self.finish, grads, placements), kept


@dataclass(frozen=True)
class GradientSpec:
    """What a step's gradient is of, in either partitioning.

    Attributes:
        loss_fn, precision, accumulate, sync_batch_norm, group, wire, buckets, overlap: as in `jdp.make_train_step`.
        adapter, trained: as in `jdp.core.state.Static`.
        placements: a tree like the parameters, of `Placement`.
        strategy: the strategy's row of the table.
        keep_gathered: the backward pass uses the weights that the forward pass gathered.
    """

    loss_fn: LossFn
    adapter: Any
    placements: PyTree
    strategy: Strategy
    precision: Precision
    accumulate: int = 1
    trained: tuple[bool, ...] | None = None
    sync_batch_norm: bool = True
    group: int = 1
    wire: Wire = WIDE
    buckets: int | str | None = None
    overlap: bool = False
    keep_gathered: bool = False

    @property
    def trained_placements(self) -> PyTree:
        """The placements of the gradients: `placements` with None for frozen parameters."""
        return trained_part(self.placements, self.trained)


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

    Raises:
        ValueError: model state that is not floating point would differ between devices.
    """
    count = spec.accumulate
    rows = batch_rows(batch) // count
    if collectives.overlap and count == 1 and SQUARES not in kept:
        spec, collectives = _by_layer(
            spec, collectives, params, model_state, batch, collectives.key_of(key, rows, 0, 1)
        )
    loss, operands = RowwiseLoss(traced_loss(spec, collectives)), working_copy(spec, collectives, params)
    micro = batch if count == 1 else collectives.microbatches(batch, count)
    first = (micro if count == 1 else jax.tree.map(lambda x: x[0], micro), collectives.key_of(key, rows, 0, count))
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        refuse_varying(lambda *given: loss(operands, *given)[1], model_state, *first, carried=count > 1)

    collectives = _ready_first(spec, collectives, loss, operands, model_state, *first)
    differentiate = partial(_microbatch_gradients, spec, collectives, loss, operands)
    if count == 1:
        grads, sums, after, kept = differentiate(model_state, *first, kept)
    else:
        changed: list[bool] = []  # the leaves of the model state that the model's calls change: only those are carried

        def probe(microbatch: Batch, key: jax.Array | BatchKey) -> Any:
            grads, sums, after, _ = differentiate(model_state, microbatch, key, kept)
            changed[:] = changed_leaves(model_state, after)
            return grads, sums

        def body(carry: Any, xs: Any) -> tuple[Any, None]:
            grads, sums, state, kept = carry
            index, microbatch = xs
            before, its_key = with_trained(model_state, state, changed), collectives.key_of(key, rows, index, count)
            more, more_sums, after, kept = differentiate(before, microbatch, its_key, kept)
            added = jax.tree.map(jnp.add, (grads, sums), (more, more_sums))
            return (*added, trained_part(after, changed), kept), None

        zero_grads, zero_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(probe, *first)
        )
        zero_grads = _map(collectives.constrain, zero_grads, spec.trained_placements)
        start = (zero_grads, zero_sums, trained_part(model_state, changed), kept)
        (grads, sums, state, kept), _ = jax.lax.scan(body, start, (jnp.arange(count, dtype=jnp.uint32), micro))
        after = with_trained(model_state, state, changed)

    if not spec.strategy.reduce_each_microbatch:
        grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept)
    grads, kept = collectives.finish_all(grads, spec.trained_placements, kept)
    if SQUARES in kept:
        kept = {**kept, SQUARES: collectives.sum(kept[SQUARES])}
    return grads, jax.tree.map(collectives.sum, sums), collectives.average(model_state, after), kept


def _by_layer(
    spec: GradientSpec, collectives: Collectives, params: PyTree, *given: Any
) -> tuple[GradientSpec, Collectives]:
    """Have gathers and reductions made layer by layer, inside the forward and the backward pass of the one microbatch.

    Every strategy then is as zero3 is; but what the forward pass gathered is kept for the backward pass, and under ddp
    nothing is gathered. Nothing changes for a loss without a layer loop, for one that uses a layer's weights in several
    places, each of which would reduce, and for gradients in buckets, encoded, or of another dtype than the parameters.
    """
    if collectives.synchroniser is not None or spec.precision.params != spec.precision.reduce:
        return spec, collectives
    whole = not spec.strategy.shard_state

    def reduce(x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return collectives.finish(collectives.reduce(x, placement, leading), placement, leading)

    def finish(x: jax.Array, placement: Placement, leading: int) -> jax.Array:
        return x if whole or placement.dim is not None else collectives.finish(x, placement, leading)

    row = replace(spec.strategy, gather="use", reduce_each_microbatch=True)
    new = replace(spec, strategy=row, keep_gathered=spec.strategy.gather != "use")
    within = replace(collectives, reduce=reduce, finish=finish)
    if not new.keep_gathered:
        return new, within
    plain = replace(within, overlap=False)
    backward = partial(_microbatch_gradients, new, plain, RowwiseLoss(traced_loss(new, plain)), params)
    most = {placement.path: math.prod(placement.shape) for placement in jax.tree.leaves(spec.placements)}
    reduced = reduced_by_layer(jax.make_jaxpr(backward)(*given, {}).jaxpr)
    once = reduced and all(elements <= most[path] for path, elements in reduced.items())
    return (new, within) if once else (spec, collectives)


def _with_squares(kept: Kept, grads: PyTree) -> Kept:
    """Add the squared norm of these gradients, where it is asked for."""
    if SQUARES not in kept:
        return kept
    return {**kept, SQUARES: kept[SQUARES] + optax.tree.norm(grads, squared=True).astype(jnp.float32)}


def _ready_first(
    spec: GradientSpec, collectives: Collectives, loss: RowwiseLoss, operands: PyTree, *given: Any
) -> Collectives:
    """Have the synchroniser fill its buckets in the order in which the backward pass finishes the gradients."""
    if collectives.synchroniser is None:
        return collectives
    backward = partial(_microbatch_gradients, spec, replace(collectives, synchroniser=None), loss)
    jaxpr, shapes = jax.make_jaxpr(backward, return_shape=True)(operands, *given, {})
    count = len(jax.tree.leaves(shapes[0]))
    places = places_made(jaxpr.jaxpr)[:count]
    order = tuple(sorted(range(count), key=lambda i: (places[i], -i)))
    return replace(collectives, synchroniser=replace(collectives.synchroniser, order=order))


def evaluate(spec: GradientSpec, collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """Return the sums of one batch, forward only; the loss gets `rng=None`, which means evaluation."""
    loss, operands = traced_loss(spec, collectives), working_copy(spec, collectives, params)

    def forward(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, None)[0]

    if spec.accumulate == 1:
        sums = forward(batch)
    else:
        each = jax.lax.map(forward, collectives.microbatches(batch, spec.accumulate))
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
    return jax.tree.map(collectives.sum, sums)


def working_copy(spec: GradientSpec, collectives: Collectives, params: PyTree) -> PyTree:
    """Return what the loss is differentiated by: gathered weights in compute dtype; under ZeRO-3 the shards at rest."""
    if spec.strategy.gather == "use":
        return params
    dtype = spec.precision.compute_dtype
    return _map(partial(_cast_and_gather, collectives, dtype), params, spec.placements)


def traced_loss(spec: GradientSpec, collectives: Collectives) -> TracedLoss:
    """Return the loss as a function of the working copy."""
    gather, whole = None, not spec.strategy.shard_state
    if spec.strategy.gather == "use":
        gather = gather_with_reduced_grad(collectives, spec.precision, whole)
    sync_axes = collectives.axes if spec.sync_batch_norm else ()
    return TracedLoss(
        spec.loss_fn,
        spec.adapter,
        spec.placements,
        gather,
        sync_axes,
        keep=spec.keep_gathered,
        whole=whole,
        products=spec.precision.products,
    )


def _microbatch_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    loss: RowwiseLoss,
    operands: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: Any,
    kept: Kept,
) -> tuple[PyTree, Sums, PyTree, Kept]:
    def total(trained: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
        sums, after = loss(with_trained(operands, trained, spec.trained), model_state, batch, key)
        return sums.total, (sums, after)

    differentiate = jax.value_and_grad(total, has_aux=True)
    if collectives.overlap and spec.strategy.gather == "use":
        differentiate = pipelined(differentiate)
    (_, (sums, after)), grads = differentiate(trained_part(operands, spec.trained))
    grads = jax.tree.map(lambda g: g.astype(spec.precision.reduce_dtype), grads)
    if spec.strategy.gather == "step" and spec.strategy.reduce_each_microbatch:
        grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept)
    return grads, sums, after, kept


def gather_with_reduced_grad(collectives: Collectives, precision: Precision, whole: bool = False) -> Gather:
    """Return the gather boundary: forward, a shard is cast to compute dtype and gathered; backward, its gradient is
    reduced straight to the shard's spec.

    Under ZeRO-3 XLA would move the activations instead without the boundary: 60 times the traffic.

    Args:
        collectives: how to gather and reduce.
        precision: the dtypes.
        whole: gradients of parameters that rest whole are reduced here too.
    """

    def gather(shard: jax.Array, placement: Placement, leading: int) -> jax.Array:
        if placement.dim is None and not whole:
            return _cast_and_gather(collectives, precision.compute_dtype, shard, placement, leading)

        def named_gather(shard: jax.Array) -> jax.Array:
            with parameter_scope(placement.path) if placement.dim is not None else nullcontext():
                return _cast_and_gather(collectives, precision.compute_dtype, shard, placement, leading)

        if not placement.trained:
            return named_gather(shard)

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            with reduction_scope(placement.path):
                reduced = collectives.reduce(cotangent.astype(precision.reduce_dtype), placement, leading)
                return (reduced.astype(shard.dtype),)

        boundary = jax.custom_vjp(named_gather)
        boundary.defvjp(lambda shard: (named_gather(shard), None), backward)
        return boundary(shard)

    return gather


def _cast_and_gather(
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


def _map(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)
