"""What a step's gradient is of (`GradientSpec`), and how one partitioning communicates (`Collectives`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jdp.core.gradients.boundary import Collective, Reduction
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.loss_program import Programs
from jdp.core.gradients.row_proof.quotients import Reading
from jdp.core.random.row_keys import BatchKey
from jdp.core.sharding.strategy import Strategy
from jdp.core.state import trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree
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

    def reduce_all(self, grads: PyTree, placements: PyTree, kept: Kept, seed: Any) -> tuple[PyTree, Kept]:
        """Reduce every leaf, compute spec -> rest spec; return `kept` as it is afterwards."""
        if self.synchroniser is not None:
            return self.synchroniser.reduce(grads, kept, seed)
        return map_leaves(self.reduce, grads, placements), kept

    def finish_all(self, grads: PyTree, placements: PyTree, kept: Kept, seed: Any) -> tuple[PyTree, Kept]:
        """Sum every leaf over the batch axes that `reduce_all` left out; return `kept` as it is afterwards."""
        if self.synchroniser is not None:
            return self.synchroniser.finish(grads, kept, seed)
        return map_leaves(self.finish, grads, placements), kept


@dataclass(frozen=True)
class GradientSpec:
    """What a step's gradient is of, in either partitioning.

    Attributes:
        loss_fn: the loss function.
        settings: the step's; `overlap` None: by cost.
        adapter, trained: as in `jdp.core.state.Static`.
        placements: a tree like the parameters, of `Placement`.
        strategy: the strategy's row of the table.
        keep_gathered: the backward pass uses the weights that the forward pass gathered.
        reading: how a loss that returns a quotient of sums is read; None for other losses.
        programs: the programs of the loss that were traced for this step already.
        off: why layer loops do not send while they compute; the trace adds it.
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
    off: list[str] = field(default_factory=list[str], compare=False, repr=False)

    def summed(self, collectives: Collectives, sums: Sums) -> Sums:
        """Return the sums over the batch axes, and what the loss divides by as their weight."""
        sums = jax.tree.map(collectives.sum, sums)
        return sums if self.reading is None else replace(sums, weight=self.reading.divisor(sums.weight))

    @property
    def trained_placements(self) -> PyTree:
        """The placements of the gradients: `placements` with None for frozen parameters."""
        return trained_part(self.placements, self.trained)


def map_leaves(collective: Collective, tree: PyTree, placements: PyTree) -> PyTree:
    """Apply a collective to every leaf of a tree without leading dimensions of its own."""
    return jax.tree.map(lambda leaf, placement: collective(leaf, placement, 0), tree, placements)
