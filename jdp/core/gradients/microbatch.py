"""The loss as a step calls it for one microbatch, and the gradients of that call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.batch import batch_rows
from jdp.core.gradients.boundary import Boundary, Weight, cast_and_gather
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.model_state import changed_leaves
from jdp.core.gradients.spec import Collectives, GradientSpec, map_leaves
from jdp.core.gradients.wire import seeds_by_row
from jdp.core.rematerialisation import keep_costly
from jdp.core.sharding.axes import REPLICA
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

    def state_after(self, model_state: PyTree, batch: Batch, key: Any) -> PyTree:
        return self.loss(self._weights(self.slots, None, None), model_state, batch, key)[1]

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
