"""The train state: everything a step changes, in one pytree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jdp.core.types import PyTree


@dataclass(frozen=True)
class Static:
    """What a step needs to know of the state's making and never changes: part of the tree's structure, not a leaf.

    Attributes:
        tx: the optimizer, so that a step needs no other argument.
        adapter: turns `params` and `model_state` into what the loss function takes (a `flax_nnx.Adapter` for an NNX
            module); None when the parameters are handed over as they are.
        specs: parameters' paths and the PartitionSpecs that the model's own metadata asks for; the plan's rules go
            before them.
        trained: of each leaf of the parameters, in order, whether it is trained; None: all are.
    """

    tx: optax.GradientTransformation
    adapter: Any = None
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    trained: tuple[bool, ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Frozen: a step returns a new one, and the old one's memory is donated to it.

    Attributes:
        step: int32 scalar, optimizer steps taken. Schedules count these.
        params: master weights, at their rest specs; trained ones and frozen ones. Nested dicts for an NNX module, else
            the pytree `init` gave.
        opt_state: the optimizer's state; leaves that mirror a parameter lie where it lies. Frozen ones have none.
        model_state: NNX variables that are not parameters (BatchNorm statistics); `{}` if there are none.
        rng: the typed PRNG key that every step's randomness is derived from; it never changes.
        skipped: int32 scalar, steps that changed nothing because a gradient or new model state was not finite.
            `consumed`, their sum with `step`, is how many batches the state has seen.
        static: optimizer and adapter; see `Static`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    skipped: jax.Array
    static: Static = field(metadata={"static": True})

    @property
    def consumed(self) -> jax.Array:
        """int32 scalar, batches consumed so far: where the data goes on, and what names a checkpoint."""
        return self.step + self.skipped

    @property
    def model(self) -> Any:
        """The model with these weights: an NNX module in evaluation mode, or `params` itself."""
        if self.static.adapter is None:
            return self.params
        return self.static.adapter.merge(self.params, self.model_state, rng=None)


def trained_part(tree: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """`tree` with None in place of its frozen leaves: what is differentiated, and what the optimizer sees."""
    if trained is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if kept else None for leaf, kept in zip(leaves, trained, strict=True)])


def with_trained(tree: PyTree, part: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """`tree` with its trained leaves taken from `part`, a tree as `trained_part` makes them."""
    if trained is None:
        return part
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(part))
    return treedef.unflatten([next(new) if kept else leaf for leaf, kept in zip(leaves, trained, strict=True)])
