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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp.core.batch import batch_rows, joined
from jdp.core.gradients.boundary import (
    Collective,
    Held,
    Reduction,
    cast_and_gather,
    gather_with_reduced_grad,
    is_reduced_at_use,
)
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.loss_program import Programs
from jdp.core.gradients.model_state import changed_leaves, refuse_varying
from jdp.core.gradients.pipeline import pipelined
from jdp.core.gradients.row_proof.quotients import Reading
from jdp.core.gradients.rowwise_loss import RowwiseLoss
from jdp.core.random.row_keys import BatchKey
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import SQUARES, trained_part, with_trained
from jdp.core.step_settings import StepSettings
from jdp.core.tracing.collectives import reduced_by_layer
from jdp.core.tracing.jaxprs import places_made
from jdp.core.types import Batch, LossFn, PyTree
from jdp.core.wire import feedback, rounding
from jdp.core.wire.buckets import Synchroniser

Kept = dict[str, PyTree]
"""What a synchroniser keeps between steps, by name; {} for nothing."""


@dataclass(frozen=True)
class Collectives:
    """How arrays are gathered, reduced and sharded in one partitioning.

    Attributes:
        gather: a shard at its rest spec -> the array at its compute spec, still flat and padded if it rests so.
        reduce: a gradient at its compute spec, flat and padded likewise -> at its rest spec, summed over `data`.
        constrain: an accumulator of gradients -> the same values, sharded as the strategy accumulates.
        finish: a gradient at its rest spec -> summed over the batch axes that `reduce` left out.
        sum: scalar -> its sum over the batch axes.
        average: (model state before, after the step) -> floating-point leaves that changed, averaged over the batch
            axes; other leaves of `after` as they are.
        microbatches: (batch, K) -> the batch with leaves [K, rows / K, ...], interleaved.
        key_of: (step key, rows of a microbatch, its index, K) -> the key that the loss gets; a `BatchKey` where the
            loss is called on some of the rows only.
        axes: the mesh axes along which a call of the loss gets only its device's rows; empty where it gets all rows.
        finish_at_use: `finish` for the gather boundary, which first adds the shards of the microbatches before; None
            where it only reduces.
        synchroniser: takes the place of `reduce` and `finish` for whole gradients, in buckets or encoded; None where
            every leaf has a collective of its own.
        overlap: True if layer loops gather one layer ahead and reduce one behind.
    """

    gather: Collective
    reduce: Reduction
    constrain: Collective
    finish: Collective
    sum: Callable[[jax.Array], jax.Array]
    average: Callable[[PyTree, PyTree], PyTree]
    microbatches: Callable[[Batch, int], Batch]
    key_of: Callable[[jax.Array, int, Any, int], jax.Array | BatchKey]
    axes: tuple[str, ...] = ()
    finish_at_use: Collective | None = None
    synchroniser: Synchroniser | None = None
    overlap: bool = False

    def reduce_all(
        self, grads: PyTree, placements: PyTree, kept: Kept, weight: jax.Array, seed: Any
    ) -> tuple[PyTree, Kept]:
        """Reduce every leaf, compute spec -> rest spec, of rows of this weight; return `kept` as it is afterwards."""
        kept = _with_squares(kept, grads, weight)
        if self.synchroniser is not None:
            grads, own = self.synchroniser.reduce(grads, {name: kept[name] for name in kept if name != SQUARES}, seed)
            return grads, {**kept, **own}
        return _map(self.reduce, grads, placements), kept

    def finish_all(self, grads: PyTree, placements: PyTree, kept: Kept, seed: Any) -> tuple[PyTree, Kept]:
        """Sum every leaf over the batch axes that `reduce_all` left out; return `kept` as it is afterwards."""
        if self.synchroniser is not None:
            grads, own = self.synchroniser.finish(grads, {name: kept[name] for name in kept if name != SQUARES}, seed)
            return grads, {**kept, **own}
        return _map(self.finish, grads, placements), kept


@dataclass(frozen=True)
class GradientSpec:
    """What a step's gradient is of, in either partitioning.

    Attributes:
        loss_fn: the loss function.
        settings: the step's; `accumulate` counts the local steps of a replica too, and `overlap` is settled.
        adapter, trained: as in `jdp.core.state.Static`.
        placements: a tree like the parameters, of `Placement`.
        strategy: the strategy's row of the table.
        keep_gathered: the backward pass uses the weights that the forward pass gathered.
        reading: how a loss that returns a quotient of sums is read; None for other losses.
        programs: the programs of the loss that were traced for this step already.
    """

    loss_fn: LossFn
    adapter: Any
    placements: PyTree
    strategy: Strategy
    settings: StepSettings
    trained: tuple[bool, ...] | None = None
    keep_gathered: bool = False
    reading: Reading | None = None
    programs: Programs = field(default_factory=Programs, compare=False, repr=False)

    def summed(self, collectives: Collectives, sums: Sums) -> Sums:
        """Return the sums over the batch axes, and what the loss divides by as their weight."""
        sums = jax.tree.map(collectives.sum, sums)
        return sums if self.reading is None else replace(sums, weight=self.reading.divisor(sums.weight))

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
    """
    count = spec.settings.accumulate
    rows = batch_rows(batch) // count
    micro, part, its_key = _microbatches(spec, collectives, batch, key)
    first = part, its_key
    by_layer = spec, collectives
    if collectives.overlap and SQUARES not in kept and (count == 1 or spec.strategy.gather != "use"):
        by_layer = _by_layer(spec, collectives, params, model_state, *first)
    if count == 1:
        spec, collectives = by_layer
    loss, operands = rowwise_loss(spec, collectives), working_copy(spec, collectives, params)
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        refuse_varying(lambda *given: loss(operands, *given)[1], model_state, *first, carried=count > 1)

    collectives = _ready_first(spec, collectives, loss, operands, model_state, *first)
    each, last = partial(_microbatch_gradients, spec, collectives, loss, operands), None
    if count > 1 and by_layer[0] is not spec:
        last = partial(_microbatch_gradients, *by_layer, rowwise_loss(*by_layer), params, copies=operands)
        if spec.strategy.reduce_each_microbatch:
            spec = by_layer[0]
            loss = rowwise_loss(spec, collectives)
            each = partial(_microbatch_gradients, spec, collectives, loss, params, copies=operands)
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
                grads, _ = collectives.reduce_all(grads, spec.trained_placements, kept, sums.weight, seed_of(0))
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
                grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept, more.weight, seed)
            return grads, (sums, trained_part(after, changed), kept), (more.rows, more.whole)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            more, others, outputs = one_more(carry[1], xs, each)
            return (jax.tree.map(jnp.add, carry[0], more), others), outputs

        zero_grads, zero_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(probe, *first)
        )
        zero_grads = _map(collectives.constrain, zero_grads, spec.trained_placements)
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
        grads, kept = collectives.reduce_all(grads, spec.trained_placements, kept, sums.weight, seed_of(0))
    grads, kept = collectives.finish_all(grads, spec.trained_placements, kept, seed_of(count))
    kept = feedback.per_weight(kept, total.weight)
    if SQUARES in kept:
        kept = {**kept, SQUARES: collectives.sum(kept[SQUARES])}
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
    backward = partial(_microbatch_gradients, new, plain, rowwise_loss(new, plain), params)
    most = {placement.path: math.prod(placement.shape) for placement in jax.tree.leaves(spec.placements)}
    reduced = reduced_by_layer(jax.make_jaxpr(backward)(*given).jaxpr)
    once = reduced and all(elements <= most[path] for path, elements in reduced.items())
    return (new, within) if once else (spec, collectives)


def _with_squares(kept: Kept, grads: PyTree, weight: jax.Array) -> Kept:
    """Add the squared norm of these gradients and their rows' squared weight, where they are asked for."""
    if SQUARES not in kept:
        return kept
    own = optax.tree.norm(grads, squared=True).astype(jnp.float32)
    return {**kept, SQUARES: kept[SQUARES] + jnp.stack([own, weight**2])}


def _ready_first(
    spec: GradientSpec, collectives: Collectives, loss: RowwiseLoss, operands: PyTree, *given: Any
) -> Collectives:
    """Have the synchroniser fill its buckets in the order in which the backward pass finishes the gradients."""
    if collectives.synchroniser is None:
        return collectives
    backward = partial(_microbatch_gradients, spec, collectives, loss)
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


def first_call(
    spec: GradientSpec,
    collectives: Collectives,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array | None,
) -> tuple[RowwiseLoss, tuple[Any, ...]]:
    """Return the loss as a step calls it, and the arguments of the first call; without a key those of an evaluation."""
    _, first, its_key = _microbatches(spec, collectives, batch, key)
    its_key = its_key.key if isinstance(its_key, BatchKey) else its_key
    return rowwise_loss(spec, collectives), (working_copy(spec, collectives, params), model_state, first, its_key)


def _microbatches(spec: GradientSpec, collectives: Collectives, batch: Batch, key: Any) -> tuple[Batch, Batch, Any]:
    """Return the batch as microbatches, the first of them and its key."""
    count = spec.settings.accumulate
    its_key = None if key is None else collectives.key_of(key, batch_rows(batch) // count, 0, count)
    if count == 1:
        return batch, batch, its_key
    micro = collectives.microbatches(batch, count)
    return micro, jax.tree.map(lambda x: x[0], micro), its_key


def rowwise_loss(spec: GradientSpec, collectives: Collectives) -> RowwiseLoss:
    """Return the loss as a function of the working copy, or under ZeRO-3 of the shards, and of keys by row."""
    loss, form = traced_loss(spec, collectives), None
    if loss.gather is not None:
        sends = collectives.reduce if collectives.overlap else collectives.axes  # rebuilt layer by layer, with overlap
        form = spec.strategy, spec.settings.precision, spec.settings.wire, sends
    return RowwiseLoss(loss, spec.programs, form)


def working_copy(spec: GradientSpec, collectives: Collectives, params: PyTree) -> PyTree:
    """Return what the loss is differentiated by: gathered weights in compute dtype; under ZeRO-3 the shards at rest."""
    if spec.strategy.gather == "use":
        return params
    dtype = spec.settings.precision.compute_dtype
    return _map(partial(cast_and_gather, collectives.gather, dtype), params, spec.placements)


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
        products=spec.settings.precision.products,
        reading=spec.reading,
    )


def _microbatch_gradients(
    spec: GradientSpec,
    collectives: Collectives,
    loss: RowwiseLoss,
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
        seeds = rounding.seeds_by_row(spec.placements, shards, seed)

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
    if spec.strategy.gather != "use":
        to_rest: Any = lambda g, placement: g if placement.flat is None else placement.flat.to_rest(g)  # noqa: E731
        grads = jax.tree.map(to_rest, grads, spec.trained_placements)
    if earlier is not None:
        whole = not spec.strategy.shard_state
        add = partial(jax.tree.map, lambda g, e, placement: g if is_reduced_at_use(placement, whole) else g + e)
        grads = add(grads, earlier, spec.trained_placements)
    return grads, sums, after


def _is_narrow(spec: GradientSpec, params: PyTree) -> bool:
    """Return True if trained parameters come in another dtype than they rest in."""
    dtype = spec.settings.precision.params_dtype
    return any(x.dtype != dtype for x in jax.tree.leaves(trained_part(params, spec.trained)))


def _map(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)
