"""The gradient of a step: one algorithm for every strategy and both partitionings.

1. Gather the working copy in compute dtype, if there are several microbatches and the strategy gathers once a step.
   Else weights are gathered where the loss uses them (`boundary.py`).
2. Differentiate the loss's *total*, of one microbatch or of several in turn. Where the strategy sums each microbatch's
   gradients over devices, or there is one microbatch, the backward pass does so.
3. Sum what is left, which happens once a step: gradients (ddp, zero1), small leaves, the `replica` axis.
4. Sum totals, weights and metrics over devices. Nothing was divided yet: the caller divides by the global weight, once.

How to gather, reduce and sum is what `auto` and `manual` supply (`Collectives`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.notices import notice
from jdp.core.batch import batch_rows, joined
from jdp.core.gradients.boundary import Boundary
from jdp.core.gradients.layer_latency import hides_collectives
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.microbatch import Microbatch, boundary_of, microbatches, traced_loss, working_copy
from jdp.core.gradients.model_state import changed_leaves, refuse_varying
from jdp.core.gradients.spec import Collectives, GradientSpec, map_leaves, sum_leaves
from jdp.core.gradients.wire import seeds
from jdp.core.reading.collectives import gathers_by_layer, reduced_by_layer
from jdp.core.reading.flops import count_flops
from jdp.core.reading.jaxprs import every_eqn
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.traced_mesh import traced_mesh
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree

_PRINTS = frozenset(("debug_print", "debug_callback", "io_callback", "pure_callback"))


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
    count, seed_of = spec.settings.accumulate, seeds(spec.settings.wire, key)
    _, part, its_key = microbatches(spec, collectives, batch, key)
    first = part, its_key
    values = params if count == 1 else working_copy(spec, collectives, params)
    of = partial(Microbatch.of, spec, collectives, params, values)
    in_loops = _sends_in_loops(spec, collectives, params, model_state, *first)
    sums_once = count > 1 and not spec.strategy.reduce_each_microbatch
    gradient = of(boundary_of(spec, collectives, in_loops=in_loops and not sums_once))
    summing = of(boundary_of(spec, collectives, in_loops=True, sums_others=True)) if in_loops and sums_once else None
    gradient = replace(gradient, is_plain=_gathers_again(spec, gradient, model_state, *first))
    _refuse_varying(spec, collectives, gradient, model_state, *first)
    if count == 1:
        grads, sums, after = gradient(model_state, *first, seed_of(0))
    else:
        grads, sums, after = scan_microbatches(collectives, gradient, summing, model_state, batch, key)
    grads = _summed(spec, collectives, (summing or gradient).boundary, grads, seed_of)
    total = replace(jax.tree.map(collectives.sum, sums.only), rows=sums.rows, whole=sums.whole)
    return grads, total, collectives.average(model_state, after)


def _sends_in_loops(spec: GradientSpec, collectives: Collectives, params: PyTree, *first: Any) -> bool:
    """Return whether layer loops gather and reduce, which needs that the loss uses their weights nowhere else.

    A weight that two loops use, or a loop and a penalty, would be reduced in each. Read from the trace of a backward
    pass. Under zero3 each use gathers and reduces in any case. Nor do they where layers compute too shortly
    to hide collectives.
    """
    if not collectives.by_layer or spec.strategy.gather == "use":
        return collectives.by_layer
    if spec.settings.wire is not None:
        return False
    spec = replace(spec, settings=replace(spec.settings, accumulate=1))
    probe = Microbatch.of(spec, collectives, params, params, boundary_of(spec, collectives, in_loops=True))
    sizes = {placement.path: math.prod(placement.shape) for placement in jax.tree.leaves(spec.placements)}
    traced, mesh = jax.make_jaxpr(probe)(*first).jaxpr, traced_mesh()
    reduced = reduced_by_layer(traced)
    if not reduced or any(elements > sizes[path] for path, (elements, _) in reduced.items()):
        return False
    layer = sum(elements // count for elements, count in reduced.values() if count)
    share = layer / sum(elements for elements, _ in reduced.values())
    flops, itemsize = share * count_flops(traced), spec.settings.precision.compute_dtype.itemsize
    if mesh is None or hides_collectives(flops, layer, itemsize, mesh, is_sharded=spec.strategy.shard_state):
        return True
    notice(
        "scan_layers: all layers share their collectives, because one layer computes for less time than its own would "
        "take to start"
    )
    return False


def _gathers_again(spec: GradientSpec, gradient: Microbatch, *first: Any) -> bool:
    """Return True if the backward pass gathers all weights again, as no layer loop gathers any; report what it holds.

    Not of a loss that prints or calls back, which would do so twice.
    """
    sharded = [placement.path for placement in jax.tree.leaves(spec.placements) if placement.dim is not None]
    if spec.strategy.gather != "use" or not sharded:
        return False
    traced = jax.make_jaxpr(gradient.state_after)(*first)
    if gathers_by_layer(traced.jaxpr):
        return False
    others = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
    holds = "gathers them again in the backward pass, all at once where XLA's scheduler does so"
    if prints := any(eqn.primitive.name in _PRINTS for eqn in every_eqn(traced.jaxpr)):
        holds = "holds them whole until the backward pass is done, as zero2 does, because the loss prints or calls back"
    notice(
        f"zero3 gathers its weights ({sharded[0]}{others}) at the top of the step and {holds}. jdp.scan_layers gathers "
        "one layer at a time, also of linen and equinox: jdp/core/scan_layers.md has recipes, help(jdp.scan_layers) "
        "the arguments"
    )
    return not prints


def _refuse_varying(spec: GradientSpec, collectives: Collectives, gradient: Microbatch, *first: Any) -> None:
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        boundary = replace(gradient.boundary, in_loops=False)  # a plain loop shows what depends on what
        plain = Microbatch.of(spec, collectives, gradient.params, gradient.values, boundary)
        refuse_varying(plain.state_after, *first, carried=spec.settings.accumulate > 1)


def _summed(spec: GradientSpec, collectives: Collectives, boundary: Boundary, grads: PyTree, seed_of: Any) -> PyTree:
    """Return gradients that left this boundary as sums over all devices, at rest specs."""

    def finish(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        is_complete = boundary.completes and boundary.reduces(placement)
        return x if is_complete else collectives.finish(x, placement, leading, seed)

    if boundary.reduce is None:
        grads = sum_leaves(collectives.reduce, grads, spec.trained_placements, seed_of(0))
    return sum_leaves(finish, grads, spec.trained_placements, seed_of(spec.settings.accumulate))


def scan_microbatches(
    collectives: Collectives,
    gradient: Microbatch,
    summing: Microbatch | None,
    model_state: PyTree,
    batch: Batch,
    key: jax.Array,
) -> tuple[PyTree, Sums, PyTree]:
    """Return what `gradient` does of one microbatch, of all of them together.

    `summing`, if given, is of the last microbatch: it adds the gradients of the others to its own before it sums them
    over devices.
    """
    spec = gradient.spec
    count = spec.settings.accumulate
    slices = jnp.arange(count, dtype=jnp.uint32), collectives.microbatches(batch, count)
    changed, shapes = _probe(gradient, model_state, *microbatches(spec, collectives, batch, key)[1:], key)
    turn = _Turn(collectives, model_state, changed, batch_rows(batch) // count, key)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        grads, sums, outputs = turn(gradient, carry[1], xs)
        return (jax.tree.map(jnp.add, carry[0], grads), sums), outputs

    zeros = map_leaves(collectives.constrain, gradient.slots, spec.trained_placements)
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = zeros, (zero_sums, trained_part(model_state, changed))
    if summing is None:
        (grads, (sums, state)), outputs = jax.lax.scan(body, start, slices)
    else:
        (grads, before), outputs = jax.lax.scan(body, start, jax.tree.map(lambda x: x[:-1], slices))
        # Without the barrier XLA may run the forward pass before the others', and hold the activations of two.
        earlier, xs = jax.lax.optimization_barrier((grads, jax.tree.map(lambda x: x[-1], slices)))
        grads, (sums, state), end = turn(summing, before, xs, earlier)
        outputs = jax.tree.map(lambda x, y: jnp.concatenate([x, jnp.expand_dims(y, 0)]), outputs, end)
    by_row, whole = [joined(x) for x in outputs[0]], [x[-1] for x in outputs[1]]
    return grads, replace(sums, rows=by_row, whole=whole), with_trained(model_state, state, changed)


def _probe(
    gradient: Microbatch, model_state: PyTree, batch: Batch, batch_key: Any, key: jax.Array
) -> tuple[list[bool], Sums]:
    """Return which leaves of the model state a call changes, as only those are carried, and the shapes of its sums."""
    changed: list[bool] = []

    def call(batch: Batch, batch_key: Any) -> Sums:
        _, sums, after = gradient(model_state, batch, batch_key, seeds(gradient.spec.settings.wire, key)(0))
        changed[:] = changed_leaves(model_state, after)
        return sums.only

    return changed, jax.eval_shape(call, batch, batch_key)


@dataclass(frozen=True)
class _Turn:
    """One microbatch among several.

    Attributes:
        collectives: of the view.
        model_state: before the step.
        changed: which leaves of it calls change.
        rows: of a microbatch.
        key: the step's.
    """

    collectives: Collectives
    model_state: PyTree
    changed: list[bool]
    rows: int
    key: jax.Array

    def __call__(
        self,
        gradient: Microbatch,
        before: tuple[Sums, PyTree],
        xs: tuple[jax.Array, Batch],
        earlier: PyTree = None,
    ) -> tuple[PyTree, tuple[Sums, PyTree], tuple[list[jax.Array], list[jax.Array]]]:
        """Return a microbatch's gradients, the sums and the changed model state after it, and the arrays of its aux."""
        (sums, state), (index, microbatch), settings = before, xs, gradient.spec.settings
        state = with_trained(self.model_state, state, self.changed)
        key = self.collectives.key_of(self.key, self.rows, index, settings.accumulate)
        seed = seeds(settings.wire, self.key)(index)
        grads, own, after = gradient(state, microbatch, key, seed, earlier)
        sums = jax.tree.map(jnp.add, sums, own.only)
        return grads, (sums, trained_part(after, self.changed)), (own.rows, own.whole)


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
