"""The train state: everything that a step changes, in one pytree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import optax
from jax.sharding import PartitionSpec

from jdp.core.sharding.leaf_table import leaf_text, leaves_of
from jdp.core.types import Model, PyTree


@dataclass(frozen=True)
class Static:
    """The part of a state that is not an array: fixed when the state is made, and part of the tree's structure."""

    tx: optax.GradientTransformation
    adapter: Any = None  # makes the model of `params` and `model_state`; None: the loss takes the parameters themselves
    specs: tuple[tuple[str, PartitionSpec], ...] = ()  # of parameters that the model's own metadata shards, by path
    trained: tuple[bool, ...] | None = None  # for each leaf of the parameters, in order; None: all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState(Generic[Model]):
    """Everything that a step changes, as a pytree of global arrays. Immutable: a step returns a new state.

        >>> int(state.step), int(state.consumed)
        (0, 0)
        >>> state.model(jnp.ones((1, 64))).shape  # the NNX module with these weights
        (1, 32)

    By default a step donates the old state's memory to the new one: continue with the state that it returned.

    Attributes:
        step: int32 scalar: optimizer steps taken. Schedules count these.
        params: master weights, trained and frozen ones, sharded between steps as the plan says. Nested dicts for an NNX
            module, else the pytree that `init` returned.
        opt_state: the optimizer's state; leaves that mirror a parameter are sharded like it. Frozen parameters have
            none.
        model_state: nested dict of NNX variables that are not parameters (BatchNorm statistics), replicated; `{}` if
            there are none.
        rng: scalar typed PRNG key from which every step's randomness is derived; it never changes.
        skipped: int32 scalar: steps that changed nothing because a gradient or a part of the new state was not finite.
        static: the optimizer and everything else that is not an array; see `Static`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    skipped: jax.Array
    static: Static = field(metadata={"static": True})

    def __repr__(self) -> str:
        return leaf_text("TrainState", leaves_of(self))

    @property
    def consumed(self) -> jax.Array:
        """int32 scalar, `step + skipped`: batches consumed so far. The data continues there, and checkpoints have this
        number."""
        return self.step + self.skipped

    @property
    def model(self) -> Model:
        """The model with these weights: an NNX module in evaluation mode, or `params` if `init` returned a pytree."""
        if self.static.adapter is None:
            return self.params
        return self.static.adapter.merge(self.params, self.model_state, rng=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Models:
    """The arguments of a gradient's loss beside its batch: like a `TrainState`, with an entry for each model."""

    params: PyTree
    model_state: PyTree
    rng: jax.Array
    static: Static = field(metadata={"static": True})


AnyState = TrainState[Any] | Models
"""A state with parameters, model state, a key and a `Static`."""


def trained_part(tree: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return a tree like the parameters with None for frozen leaves."""
    if trained is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if kept else None for leaf, kept in zip(leaves, trained, strict=True)])


def with_trained(tree: PyTree, part: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return `tree` with its trained leaves replaced by those of `part`, a tree as `trained_part` returns it."""
    if trained is None:
        return part
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(part))
    return treedef.unflatten([next(new) if kept else leaf for leaf, kept in zip(leaves, trained, strict=True)])
