"""Rules that take a norm of a parameter, for layers that are stacked in one array: each layer has its own.

LAMB, LARS and Adafactor are defined by layer. A stack [layers, …] is one leaf to optax, so it would have one norm.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from jdp.base.tree_paths import path_of


def by_layer(rule: optax.GradientTransformation, stacked: bool) -> optax.GradientTransformation:
    """Return a rule without state, of one leaf at a time, that sees each layer of the leaves below `layers` alone."""
    if not stacked:
        return rule

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def one(update: jax.Array, *param: jax.Array) -> Any:
            return rule.update(update, state, *param)[0]

        def leaf(path: Any, *arrays: jax.Array) -> Any:
            return (jax.vmap(one) if path_of(path).startswith("layers/") else one)(*arrays)

        trees = (updates,) if params is None else (updates, params)
        return jax.tree.map_with_path(leaf, *trees), state

    return optax.GradientTransformation(rule.init, update)
