"""The gradient of a step: one algorithm for every strategy and both partitionings.

`jdp.core.gradients` shows its four parts. With one microbatch the backward pass sums all gradients over devices.
Nothing is divided here: the caller divides by the global weight, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdp.base.chips import GPUS
from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.link_times import Group, group_cost
from jdp.base.notices import notice
from jdp.core.batch import batch_rows, joined
from jdp.core.gradients.boundary import Boundary, Weight, cast_and_gather
from jdp.core.gradients.collectives import Collectives, GradientSpec, map_leaves, sum_leaves
from jdp.core.gradients.loss_call import Sums, TracedLoss, changed_leaves, refuse_varying
from jdp.core.gradients.wire import seeds, seeds_by_row
from jdp.core.reading import branches_of, count_flops, gathers_by_layer, reduced_by_layer
from jdp.core.rematerialisation import keep_costly
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.mesh import batch_axes, traced_mesh, traced_model_axes
from jdp.core.sharding.placement import Placement
from jdp.core.state import trained_part, with_trained
from jdp.core.types import Batch, PyTree


def first_microbatch(collectives: Collectives, batch: Batch, key: Any) -> tuple[Batch, Any]:
    count = collectives.spec.settings.accumulate
    its_key = collectives.key_of(key, batch_rows(batch) // count, 0, count)
    return batch if count == 1 else jax.tree.map(itemgetter(0), collectives.microbatches(batch, count)), its_key


def working_copy(collectives: Collectives, params: PyTree) -> PyTree:
    """Return gathered weights in compute dtype; under ZeRO-3, which gathers at each use, the shards at rest."""
    spec = collectives.spec
    if spec.strategy.gather == "use":
        return params
    dtype = spec.settings.precision.compute_dtype
    return map_leaves(partial(cast_and_gather, collectives.gather, dtype), params, spec.placements)


def boundary_of(collectives: Collectives, *, in_loops: bool = False, sums_others: bool = False) -> Boundary:
    """Return the boundary of a microbatch; with `sums_others`, of the last one, which sums the gradients of all."""
    strategy, settings = collectives.spec.strategy, collectives.spec.settings
    is_only, at_use = settings.accumulate == 1, strategy.gather == "use"
    completes = (is_only or sums_others) and settings.wire is None
    gathers, reduces = is_only or at_use, is_only or sums_others or strategy.reduce_each_microbatch
    return Boundary(
        collectives.gather if gathers else None,
        collectives.reduce if reduces else None,
        collectives.finish if completes else None,
        settings.precision,
        with_replicated=completes and not strategy.shard_state,
        sends_twice=completes and strategy.shard_state and collectives.spec.plan.mesh.shape.get(REPLICA, 1) > 1,
        again=at_use,
        in_loops=in_loops,
    )


def traced_loss(collectives: Collectives, boundary: Boundary | None = None) -> TracedLoss:
    """Return the loss as a function of `Weight`s; without a boundary, of the result of `working_copy`."""
    spec = collectives.spec
    if boundary is None and spec.strategy.gather == "use":
        boundary = boundary_of(collectives, in_loops=collectives.by_layer)
    return TracedLoss(spec.loss_fn, spec.adapter, spec.placements, boundary, collectives.axes)


@dataclass(frozen=True)
class Microbatch:
    """The gradient of a microbatch, as a function."""

    spec: GradientSpec
    boundary: Boundary
    loss: TracedLoss  # behind this boundary
    params: PyTree  # at rest
    values: PyTree  # the boundary's inputs: `params`, or the result of `working_copy`
    is_plain: bool = False  # no layer loop gathers: the backward pass gathers all, and recomputes cheap operations

    @staticmethod
    def of(collectives: Collectives, params: PyTree, values: PyTree, boundary: Boundary) -> Microbatch:
        return Microbatch(collectives.spec, boundary, traced_loss(collectives, boundary), params, values)

    def __call__(
        self, model_state: PyTree, batch: Batch, key: Any, seed: jax.Array | None = None, earlier: PyTree = None
    ) -> tuple[PyTree, Sums, PyTree]:
        """Return the gradients, the sums of the loss, and the model state afterwards.

        The gradients are added to `earlier`, the sum of earlier microbatches'; their rounding is drawn from `seed`.
        """
        seeds = None if seed is None else seeds_by_row(self.spec.placements, self.slots, seed)
        changed: list[bool] = []

        def total(slots: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
            sums, after = self.loss(self._weights(slots, earlier, seeds), model_state, batch, key)
            changed[:] = changed_leaves(model_state, after)
            return sums.total, (sums, after)

        function = jax.checkpoint(total, policy=keep_costly) if self.is_plain else total
        (_, (sums, after)), grads = jax.value_and_grad(function, has_aux=True)(self.slots)
        return grads, sums, with_trained(model_state, trained_part(after, changed), changed)

    def forward(self, model_state: PyTree, batch: Batch, key: Any) -> tuple[Sums, PyTree]:
        """Return the sums of the loss, and the model state afterwards."""
        return self.loss(self._weights(None, None, None), model_state, batch, key)

    def _weights(self, *fields: PyTree) -> PyTree:
        placements = self.spec.placements
        nothing = jax.tree.map(lambda _: None, placements)
        given = [nothing if tree is None else tree for tree in fields]
        return jax.tree.map(lambda _, *leaves: Weight(*leaves), placements, self.values, *given)

    @property
    def slots(self) -> PyTree:
        """Zeros with the shapes of the gradients; None for frozen parameters."""
        dtype = self.spec.settings.precision.reduce_dtype

        def slot(placement: Placement, shard: jax.Array, value: jax.Array) -> jax.Array | None:
            like = shard if placement.dim is None or self.boundary.reduces(placement) else value
            return jnp.zeros(like.shape, dtype) if placement.trained else None

        return jax.tree.map(slot, self.spec.placements, self.params, self.values)


_HIDING = 0.75
"""Share of a layer's computation that may hide its collectives: the first and the last layer hide less."""
_PRINTS = frozenset(("debug_print", "debug_callback", "io_callback", "pure_callback"))


def step_gradients(
    collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
) -> tuple[PyTree, Sums, PyTree]:
    """Return (Σ∇total of the trained parameters at rest specs, the sums, the model state) of all devices, undivided."""
    spec = collectives.spec
    count, seed_of = spec.settings.accumulate, seeds(spec.settings.wire, key)
    first = first_microbatch(collectives, batch, key)
    values = params if count == 1 else working_copy(collectives, params)
    of = partial(Microbatch.of, collectives, params, values)
    in_loops = _sends_in_loops(collectives, params, model_state, *first)
    sums_once = count > 1 and not spec.strategy.reduce_each_microbatch
    gradient = of(boundary_of(collectives, in_loops=in_loops and not sums_once))
    summing = of(boundary_of(collectives, in_loops=True, sums_others=True)) if in_loops and sums_once else None
    gradient = replace(gradient, is_plain=_gathers_again(gradient, model_state, *first))
    if math.prod(map(jax.lax.axis_size, collectives.axes)) > 1:
        boundary = replace(gradient.boundary, in_loops=False)  # a plain loop shows all dependencies
        refuse_varying(of(boundary).forward, model_state, *first, carried=count > 1)
    if count == 1:
        grads, sums, after = gradient(model_state, *first, seed_of(0))
    else:
        grads, sums, after = scan_microbatches(collectives, gradient, summing, model_state, batch, key)
    grads = _summed(collectives, (summing or gradient).boundary, grads, seed_of)
    total = replace(jax.tree.map(collectives.sum, sums.only), aux=sums.aux)
    return grads, total, collectives.average(model_state, after)


def _sends_in_loops(collectives: Collectives, params: PyTree, *first: Any) -> bool:
    """Return whether layer loops gather and reduce layer by layer.

    Under zero3 they do, because each use gathers and reduces anyway. Otherwise the loss must not use a loop's weights
    elsewhere, in a second loop or a penalty: each use would reduce them. This is read from the trace of a backward
    pass. And a layer must compute for long enough to hide its collectives.
    """
    spec = collectives.spec
    if not collectives.by_layer or spec.strategy.gather == "use":
        return collectives.by_layer
    if spec.settings.wire is not None or "scan" not in spec.operations:
        return False
    collectives = replace(collectives, spec=replace(spec, settings=replace(spec.settings, accumulate=1)))
    probe = Microbatch.of(collectives, params, params, boundary_of(collectives, in_loops=True))
    sizes = {placement.path: math.prod(placement.shape) for placement in jax.tree.leaves(spec.placements)}
    traced, mesh = jax.make_jaxpr(probe)(*first).jaxpr, traced_mesh()
    reduced = reduced_by_layer(traced)
    if not reduced or any(elements > sizes[path] for path, (elements, _) in reduced.items()):
        return False
    layer = sum(elements // count for elements, count in reduced.values() if count)
    share = layer / sum(elements for elements, _ in reduced.values())
    shards = math.prod(traced_model_axes().values())  # the trace has whole arrays along these axes
    flops, layer = share * count_flops(traced) / shards, layer // shards
    itemsize = spec.settings.precision.compute_dtype.itemsize
    if mesh is None or hides_collectives(flops, layer, itemsize, mesh, is_sharded=spec.strategy.shard_state):
        return True
    notice(
        "scan_layers: all layers share their collectives, because a layer computes for less time than its own "
        "collectives would take to start"
    )
    return False


def hides_collectives(flops: float, elements: int, itemsize: int, mesh: Mesh, *, is_sharded: bool) -> bool:
    """Return whether a layer computes for longer than its collectives take to start; True for unknown devices.

    `flops` are a device's, forward and backward. Each of `elements` weights is gathered with `itemsize` bytes, if
    `is_sharded`, and reduced with 4. The collectives of a layer hide behind the layers before and after it, but each
    takes time to start: with little work a device and many hosts, one collective for all layers is faster (measured in
    experiments/LOG.md: "Short layers share their collectives").
    """
    kind = mesh.devices.flat[0].device_kind
    chip = next((chip for chip in GPUS.values() if chip.name == kind), None)
    if chip is None:
        return True
    axes = batch_axes(mesh)
    sends: list[tuple[str, tuple[str, ...], float]] = [("all-reduce", axes, 4.0 * elements)]
    if is_sharded:
        replicas, shard = tuple(axis for axis in axes if axis != DATA), 4 * elements / mesh.shape[DATA]
        sends = [("all-gather", (DATA,), float(itemsize * elements)), ("reduce-scatter", (DATA,), 4.0 * elements)]
        sends.append(("all-reduce", replicas, shard))
    latency = 0.0
    for name, along, payload in sends:
        first = tuple(slice(None) if axis in along else 0 for axis in mesh.axis_names)
        group = Group.of(device.process_index for device in np.ravel(mesh.devices[first]))
        if group.members > 1:
            latency += group_cost(name, payload, group, chip).latency_seconds
    return latency < _HIDING * flops / (chip.matmul_efficiency * chip.matmul_flops["bf16"])


def _gathers_again(gradient: Microbatch, *first: Any) -> bool:
    """Return True if the backward pass gathers all weights again, because no layer loop gathers any; report it.

    Return False for a loss that prints or calls back, which it would do twice. Refuse a branch that gathers.
    """
    placements = jax.tree.leaves(gradient.spec.placements)
    sharded = [placement.path for placement in placements if placement.dim is not None]
    if gradient.spec.strategy.gather != "use" or not sharded:
        return False
    traced = jax.make_jaxpr(gradient.forward)(*first).jaxpr
    if any(map(gathers_by_layer, branches_of(traced))):
        raise UserError(
            "A branch of jax.lax.cond gathers no weights under zero3, because devices that take another branch would "
            "hang; given a branch that calls jdp.scan_layers. Call it outside, and choose by jnp.where; or take "
            "partitioning='auto'."
        )
    if gathers_by_layer(traced):
        return False
    holds = "gathers them again in the backward pass, when XLA's scheduler chooses"
    if prints := _PRINTS & gradient.spec.operations:
        holds = "holds them until the backward pass is done, as zero2 does, because the loss prints or calls back"
    notice(
        f"zero3 gathers its weights ({listed(sharded, 1)}) at the top of the step and {holds}. jdp.scan_layers gathers "
        "one layer at a time, also of linen and equinox: see jdp/core/scan_layers.md"
    )
    return not prints


def _summed(collectives: Collectives, boundary: Boundary, grads: PyTree, seed_of: Any) -> PyTree:
    """Complete the sum over devices of gradients that this boundary returned; return them at rest specs."""

    def finish(x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        is_complete = boundary.finish is not None and boundary.reduces(placement)
        return x if is_complete else collectives.finish(x, placement, leading, seed)

    spec = collectives.spec
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
    """Return the results of `gradient`, summed over all microbatches.

    `summing`, if given, replaces it for the last microbatch: it adds the gradients of the others to its own before it
    sums them over devices.
    """
    spec, seed_of = gradient.spec, seeds(gradient.spec.settings.wire, key)
    count, rows = spec.settings.accumulate, batch_rows(batch) // spec.settings.accumulate
    slices = jnp.arange(count, dtype=jnp.uint32), collectives.microbatches(batch, count)
    changed, shapes = _probe(gradient, model_state, *first_microbatch(collectives, batch, key))

    def turn(gradient: Microbatch, before: Any, xs: Any, earlier: PyTree = None) -> tuple[PyTree, Any, list[jax.Array]]:
        """Return a microbatch's gradients, the sums and the changed model state after it, and the arrays of its aux."""
        (sums, state), (index, microbatch) = before, xs
        state = with_trained(model_state, state, changed)
        its_key = collectives.key_of(key, rows, index, count)
        grads, its_sums, state = gradient(state, microbatch, its_key, seed_of(index), earlier)
        return grads, (jax.tree.map(jnp.add, sums, its_sums.only), trained_part(state, changed)), its_sums.aux

    def body(carry: Any, xs: Any) -> tuple[Any, list[jax.Array]]:
        grads, sums, aux = turn(gradient, carry[1], xs)
        return (jax.tree.map(jnp.add, carry[0], grads), sums), aux

    zeros = map_leaves(collectives.constrain, gradient.slots, spec.trained_placements)
    start = zeros, (jax.tree.map(jnp.zeros_like, shapes), trained_part(model_state, changed))
    if summing is None:
        (grads, (sums, state)), aux = jax.lax.scan(body, start, slices)
    else:
        others, final = (jax.tree.map(itemgetter(part), slices) for part in (slice(-1), -1))
        (grads, before), aux = jax.lax.scan(body, start, others)
        # Without the barrier XLA may run the forward pass before the others', and hold the activations of two.
        earlier, xs = jax.lax.optimization_barrier((grads, final))
        grads, (sums, state), final_aux = turn(summing, before, xs, earlier)
        aux = [jnp.concatenate([x, y[None]]) for x, y in zip(aux, final_aux, strict=True)]
    return grads, replace(sums, aux=[joined(x) for x in aux]), with_trained(model_state, state, changed)


def _probe(gradient: Microbatch, model_state: PyTree, batch: Batch, key: Any) -> tuple[list[bool], Sums]:
    """Return which leaves of the model state a call changes (the scan carries only these), and its sums' shapes."""
    changed: list[bool] = []

    def sums_of(batch: Batch, key: Any) -> Sums:
        sums, state = gradient.forward(model_state, batch, key)
        changed[:] = changed_leaves(model_state, state)
        return sums.only

    return changed, jax.eval_shape(sums_of, batch, key)


def evaluate(collectives: Collectives, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
    """Return the sums of one batch, forward only; the loss gets `rng=None`, which means evaluation."""
    loss, operands = traced_loss(collectives), working_copy(collectives, params)
    count = collectives.spec.settings.accumulate

    def forward(batch: Batch) -> Sums:
        return loss(operands, model_state, batch, None)[0]

    if count == 1:
        sums = forward(batch)
    else:
        sums = jax.tree.map(partial(jnp.sum, axis=0), jax.lax.map(forward, collectives.microbatches(batch, count)))
    return jax.tree.map(collectives.sum, sums)
