"""Which parameters are trained: `wrt` (with respect to what the loss is differentiated), resolved with the state.

Frozen parameters have no gradient and no optimizer state, and may be of any dtype; they are sharded and gathered as the
others are. So fine-tuning a part of a model (LoRA: Hu et al. 2021, arXiv:2106.09685) costs what that part costs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.tree_paths import matches, path_of
from jdp.core import flax_nnx
from jdp.core.types import PyTree


def resolve(params: PyTree, adapter: Any, wrt: Any) -> tuple[bool, ...] | None:
    """Return for each leaf of `params`, in order, whether it is trained; None if all are."""
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise UserError(
            "A model must have parameters: a module or a pytree with arrays; given one without. Give it some, or leave "
            "it out."
        )
    paths = [path_of(path) for path, _ in leaves]
    selected = _selected(paths, adapter, wrt)
    for (_, leaf), path, trained in zip(leaves, paths, selected, strict=True):
        if trained and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"Every parameter that is trained must be floating point; {path} is {leaf.dtype}. Freeze it "
                "(wrt=patterns of what is trained), keep counters and tables out of the model's parameters (in NNX: a "
                "variable that is not an nnx.Param), and complex weights as two arrays, their real and imaginary parts."
            )
    return None if all(selected) else selected


def _selected(paths: list[str], adapter: Any, wrt: Any) -> tuple[bool, ...]:
    if wrt is None:
        return (True,) * len(paths)
    if flax_nnx.is_pattern(wrt):
        patterns = [wrt] if isinstance(wrt, str) else wrt
        for pattern in patterns:
            if not any(matches(path, [pattern]) for path in paths):
                raise UserError(
                    f"Every pattern of `wrt` must match a parameter; {pattern!r} matches none of {listed(paths, 5)}."
                )
        selected = tuple(matches(path, patterns) for path in paths)
    elif adapter is None:
        raise UserError(
            f"For a pytree, `wrt` is a path pattern or a sequence of them ('head/*'); given {wrt!r}. Write patterns."
        )
    else:
        selected = flax_nnx.matches(adapter, paths, wrt)
    if not any(selected):
        raise UserError(f"`wrt` must leave something to train; {wrt!r} matches none of {listed(paths, 5)}.")
    return selected
