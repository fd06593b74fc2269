"""What a step's gradient is of (`GradientSpec`), and how one partitioning communicates (`Collectives`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jdp.core.gradients.boundary import Collective, Reduction
from jdp.core.gradients.wire import seeds_by_leaf
from jdp.core.random.row_keys import RowDraws
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree


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
        key_of: (step key, rows of a microbatch, its index, K) -> the key that the loss gets, a row key if it draws.
        axes: the mesh axes along which a call of the loss gets only its device's rows; empty where it gets all rows.
        by_layer: True if layer loops gather one layer ahead and reduce one behind.
    """

    gather: Collective
    reduce: Reduction
    constrain: Collective
    finish: Reduction
    sum: Callable[[jax.Array], jax.Array]
    average: Callable[[PyTree, PyTree], PyTree]
    microbatches: Callable[[Batch, int], Batch]
    key_of: Callable[[jax.Array, int, Any, int], jax.Array]
    axes: tuple[str, ...] = ()
    by_layer: bool = False

    def complete(self, x: jax.Array, placement: Placement, leading: int, seed: jax.Array | None = None) -> jax.Array:
        """Return a gradient at its rest spec, summed over all batch axes."""
        return self.finish(self.reduce(x, placement, leading, seed), placement, leading)


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
