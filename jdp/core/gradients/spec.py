"""The inputs of a step's gradient (`GradientSpec`), and how a view communicates (`Collectives`).

`Collectives` are those of `auto`; `collectives.py` has those of `manual`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.core.batch import interleave
from jdp.core.gradients.boundary import Collective
from jdp.core.gradients.row_keys import RowDraws
from jdp.core.gradients.wire import seeds_by_leaf
from jdp.core.plan import Plan
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree


@dataclass(frozen=True)
class GradientSpec:
    """The inputs of a step's gradient, in either partitioning."""

    loss_fn: LossFn
    adapter: Any  # like `trained`, as in `jdp.core.state.Static`
    placements: PyTree  # a tree like the parameters, of `Placement`
    plan: Plan
    settings: StepSettings
    trained: tuple[bool, ...] | None = None
    draws: RowDraws | None = None  # which draws count rows; None if nothing is drawn, or all rows are in one call

    @property
    def strategy(self) -> Strategy:
        """The strategy's row of the table."""
        return self.plan.row

    @property
    def trained_placements(self) -> PyTree:
        """The placements of the gradients: `placements` with None for frozen parameters."""
        return trained_part(self.placements, self.trained)


@dataclass(frozen=True)
class Collectives:
    """Gathers, reduces and shards arrays under `auto`, by constraining global arrays to the plan's specs."""

    spec: GradientSpec

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which a call of the loss gets only its device's rows; empty if it gets all rows."""
        return ()

    @property
    def by_layer(self) -> bool:
        """Whether layer loops gather one layer ahead and reduce one behind."""
        return False

    def _constrained(self, x: jax.Array, partition: PartitionSpec, leading: int) -> jax.Array:
        sharding = NamedSharding(self.spec.plan.mesh, PartitionSpec(*partition[leading:]))
        return jax.lax.with_sharding_constraint(x, sharding)

    def gather(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Gather a shard: from its rest spec to its compute spec."""
        return self._constrained(x, placement.compute, leading)

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Sum a gradient over `data`: from its compute spec to its rest spec."""
        return self._constrained(x, placement.rest, leading)

    def finish(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Sum a gradient at its rest spec over the batch axes that `reduce` left out."""
        return self._constrained(x, placement.rest, leading)

    def constrain(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Return an accumulator of gradients, sharded as the strategy accumulates."""
        each_microbatch = self.spec.strategy.reduce_each_microbatch
        return self._constrained(x, placement.rest if each_microbatch else placement.compute, leading)

    def sum(self, x: jax.Array, /) -> jax.Array:
        """Return a scalar summed over the batch axes."""
        return x

    def average(self, before: PyTree, after: PyTree, /) -> PyTree:
        """Return the model state after a step: floating-point leaves that changed are averaged over the batch axes."""
        return after

    def microbatches(self, batch: Batch, count: int, /) -> Batch:
        """Return the batch with leaves [count, rows / count, ...], interleaved."""
        sharding = NamedSharding(self.spec.plan.mesh, PartitionSpec(None, *self.spec.plan.batch_spec))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(interleave(x, count), sharding), batch)

    def key_of(self, key: jax.Array, rows: int, index: Any, count: int, /) -> jax.Array:
        """Return the key that the loss gets for `rows` rows, microbatch `index` of `count`: a row key if it draws."""
        draws = self.spec.draws
        return key if draws is None else draws.key(key, offset=index, stride=count, total=rows * count)


def map_leaves(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    """Apply a collective to every leaf of a tree, none of which a layer loop has sliced."""
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)


def sum_leaves(reduction: Collective, grads: PyTree, placements: PyTree, seed: jax.Array | None) -> PyTree:
    """Apply a reduction to every leaf of gradients; with a seed each leaf draws its own rounding."""
    if seed is None:
        return map_leaves(reduction, grads, placements)
    drawn = seeds_by_leaf(grads, seed)
    return jax.tree.map(lambda leaf, placement, own: reduction(leaf, placement, 0, own), grads, placements, drawn)
