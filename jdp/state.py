"""The train state: everything a step changes, in one pytree."""

from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from jdp.types import PyTree


@dataclass(frozen=True)
class Static:
    """What a step needs to know of the state's making and never changes: part of the tree's structure, not a leaf.

    Attributes:
        tx: the optimizer, so that a step needs no other argument.
        adapter: turns `params` and `model_state` into what the loss function takes (`jdp.flax_nnx.Adapter` for an NNX
            module); None when the parameters are handed over as they are.
    """

    tx: optax.GradientTransformation
    adapter: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Frozen: a step returns a new one, and the old one's memory is donated to it.

    Attributes:
        step: int32 scalar, optimizer steps taken. Schedules count these.
        params: master weights, at their rest specs. Nested dicts for an NNX module, else the pytree `init` gave.
        opt_state: the optimizer's state; leaves that mirror a parameter lie where it lies.
        model_state: NNX variables that are not parameters (BatchNorm statistics); `{}` if there are none.
        rng: the typed PRNG key that every step's randomness is derived from; it never changes.
        skipped: int32 scalar, steps that changed nothing because a gradient was not finite.
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
