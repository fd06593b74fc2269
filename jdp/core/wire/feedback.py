"""Error feedback: the error of encoding the mean gradient, per unit of weight.

A step of weight W sends G + W · e in place of the gradient G = Σ∇total, and applies the received sum divided by W. The
error of encoding, again divided by W, is the e of the next step. So the updates of any steps add up to those of
unencoded gradients, up to the last e, however the weights of the steps differ.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdp.core.state import ERROR
from jdp.core.types import PyTree


def split_off(kept: dict[str, PyTree]) -> tuple[dict[str, PyTree], PyTree]:
    """Return `kept` with zeros for the error of this step, and the error of the steps before; None if none is kept."""
    if ERROR not in kept:
        return kept, None
    return {**kept, ERROR: jax.tree.map(jnp.zeros_like, kept[ERROR])}, kept[ERROR]


def added(kept: dict[str, PyTree], before: PyTree, weight: jax.Array) -> dict[str, PyTree]:
    """Return `kept` with the error of the steps before added, times the weight of this one."""
    return {**kept, ERROR: jax.tree.map(lambda own, e: own + weight * e, kept[ERROR], before)}


def per_weight(kept: dict[str, PyTree], weight: jax.Array) -> dict[str, PyTree]:
    """Return `kept` with the error divided by the weight of the step."""
    return kept if ERROR not in kept else {**kept, ERROR: jax.tree.map(lambda e: e / weight, kept[ERROR])}
