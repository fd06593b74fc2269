"""The train state: everything a step changes, in one pytree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jdp.core.host_memory import on_device
from jdp.core.leaves import leaf_text, leaves_of
from jdp.core.notebook import Drawn
from jdp.core.types import PyTree


@dataclass(frozen=True)
class Static:
    """What a step needs besides arrays, fixed when the state is made: part of the tree's structure, not a leaf.

    Attributes:
        tx: the optimizer; therefore a step takes only a state and a batch.
        adapter: turns `params` and `model_state` into the argument of the loss function (a `flax_nnx.Adapter` for an
            NNX module); None if the loss function takes the parameters themselves.
        specs: (path, PartitionSpec) for the parameters that the model's own metadata shards; the plan's rules override
            them.
        trained: for each leaf of the parameters, in order, whether it is trained; None if all are.
    """

    tx: optax.GradientTransformation
    adapter: Any = None
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    trained: tuple[bool, ...] | None = None


STACKED = "rounds"
"""The entry of `TrainState.sync` that counts rounds of local steps; where it is, `opt_state` is each replica's own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState(Drawn):
    """Everything a step changes, as a pytree of global arrays. Immutable: a step returns a new one.

    By default a step donates the old state's memory to the new one: go on with the state that it returned.

    Attributes:
        step: int32 scalar: optimizer steps taken. Schedules count these.
        params: master weights, trained and frozen ones, sharded as the plan says between steps. Nested dicts for an NNX
            module, else the pytree that `init` returned.
        opt_state: the optimizer's state; leaves that mirror a parameter are sharded as it is. Frozen parameters have
            none.
        model_state: nested dict of NNX variables that are not parameters (BatchNorm statistics), replicated; `{}` if
            there are none.
        rng: scalar typed PRNG key from which every step's randomness is derived; it never changes.
        skipped: int32 scalar: steps that changed nothing because a gradient or new model state was not finite.
        sync: what the synchronisation of gradients keeps between steps, by name; {} if it keeps nothing. "error": what
            encoding lost, [D, ...] for the D shards of the batch, sharded over them; "factor": PowerSGD's, replicated;
            "noise": averages of the noise scale, float32 [3]; "rounds" of local steps, int32 scalar, and their
            "momentum", sharded as the parameters are: with these each leaf of `opt_state` is [R, ...] for the R
            replicas. A step that needs it adds it (`Step.complete`).
        static: the optimizer, and what else is no array; see `Static`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    skipped: jax.Array
    sync: dict[str, PyTree]
    static: Static = field(metadata={"static": True})

    def __repr__(self) -> str:
        return leaf_text("TrainState", leaves_of(self))

    @property
    def consumed(self) -> jax.Array:
        """int32 scalar, `step + skipped`: batches consumed so far. The data continues there; it names a checkpoint."""
        return self.step + self.skipped

    @property
    def model(self) -> Any:
        """The model with these weights: an NNX module in evaluation mode, or `params` if `init` returned a pytree.

        Weights that rest in host memory (`Plan.offload`) are copied to the devices.
        """
        params = on_device(self.params)
        if self.static.adapter is None:
            return params
        return self.static.adapter.merge(params, self.model_state, rng=None)


def trained_part(tree: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return `tree`, like the parameters, with None for frozen leaves: what is differentiated and optimized.

    Args:
        tree: a tree of the parameters' structure.
        trained: `Static.trained`.
    """
    if trained is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if kept else None for leaf, kept in zip(leaves, trained, strict=True)])


def with_trained(tree: PyTree, part: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return `tree` with its trained leaves replaced by those of `part`, a tree as `trained_part` returns it.

    Args:
        tree: a tree of the parameters' structure.
        part: the same with None for frozen leaves.
        trained: `Static.trained`.
    """
    if trained is None:
        return part
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(part))
    return treedef.unflatten([next(new) if kept else leaf for leaf, kept in zip(leaves, trained, strict=True)])
