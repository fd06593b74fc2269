"""What a step's gradient is of (`GradientSpec`), and how one partitioning communicates (`Collectives`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jdp.core.gradients.boundary import Collective, Reduction
from jdp.core.gradients.wire import seeds_by_leaf
from jdp.core.random.row_keys import RowDraws
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree


class Collectives(Protocol):
    """How arrays are gathered, reduced and sharded in one view."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which a call of the loss gets only its device's rows; empty where it gets all rows."""
        return ()

    @property
    def by_layer(self) -> bool:
        """Whether layer loops gather one layer ahead and reduce one behind."""
        return False

    def gather(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Return a shard at its rest spec as the array at its compute spec."""
        ...

    def reduce(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Return a gradient at its compute spec at its rest spec, summed over `data`."""
        ...

    def finish(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Return a gradient at its rest spec, summed over the batch axes that `reduce` left out."""
        ...

    def complete(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None, /) -> jax.Array:
        """Return a gradient at its rest spec, summed over all batch axes."""
        return self.finish(self.reduce(x, placement, leading, seed), placement, leading)

    def constrain(self, x: jax.Array, placement: Placement, leading: int, /) -> jax.Array:
        """Return an accumulator of gradients, sharded as the strategy accumulates."""
        ...

    def sum(self, x: jax.Array, /) -> jax.Array:
        """Return a scalar summed over the batch axes."""
        ...

    def average(self, before: PyTree, after: PyTree, /) -> PyTree:
        """Return the model state after a step: floating-point leaves that changed are averaged over the batch axes."""
        ...

    def microbatches(self, batch: Batch, count: int, /) -> Batch:
        """Return the batch with leaves [count, rows / count, ...], interleaved."""
        ...

    def key_of(self, key: jax.Array, rows: int, index: Any, count: int, /) -> jax.Array:
        """Return the key that the loss gets for `rows` rows, microbatch `index` of `count`: a row key if it draws."""
        ...


@dataclass(frozen=True)
class GradientSpec:
    """What a step's gradient is of, in either partitioning.

    Attributes:
        loss_fn: the loss function.
        settings: the step's.
        adapter, trained: as in `jdp.core.state.Static`.
        placements: a tree like the parameters, of `Placement`.
        strategy: the strategy's row of the table.
        draws: which draws of the loss count rows; None if it draws nothing, or is called on all rows at once.
    """

    loss_fn: LossFn
    adapter: Any
    placements: PyTree
    strategy: Strategy
    settings: StepSettings
    trained: tuple[bool, ...] | None = None
    draws: RowDraws | None = None

    @property
    def trained_placements(self) -> PyTree:
        """The placements of the gradients: `placements` with None for frozen parameters."""
        return trained_part(self.placements, self.trained)


def map_leaves(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    """Apply a collective to every leaf of a tree without leading dimensions of its own."""
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)


def sum_leaves(reduction: Reduction, grads: PyTree, placements: PyTree, seed: jax.Array | None) -> PyTree:
    """Apply a reduction to every leaf of gradients; with a seed each leaf draws its own rounding."""
    if seed is None:
        return map_leaves(reduction, grads, placements)
    drawn = seeds_by_leaf(grads, seed)
    return jax.tree.map(lambda leaf, placement, own: reduction(leaf, placement, 0, own), grads, placements, drawn)
