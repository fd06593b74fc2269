"""With respect to what is differentiated: `wrt`, resolved once, when the state is made.

Frozen parameters have no gradient and no optimizer state, and may be of any dtype; they are sharded and gathered as the
others are. So fine-tuning a part of a model (LoRA: Hu et al. 2021, arXiv:2106.09685) costs what the part costs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core import flax_nnx
from jdp.core.paths import path_of
from jdp.core.types import PyTree


def resolve(params: PyTree, adapter: Any, wrt: Any) -> tuple[bool, ...] | None:
    """Of each leaf of `params`, in order, whether it is trained; None: all are.

    Args:
        params: the parameters, real or abstract.
        adapter: `Static.adapter`.
        wrt: see `jdp.init_state`.

    Raises:
        ValueError: there are no parameters, a pattern matches none, nothing is trained, a trained one is not floating
            point, or `wrt` is a filter and the model is not an NNX module.
    """
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("`init` must return a module or pytree with parameters; it returned none.")
    paths = [path_of(path) for path, _ in leaves]
    chosen = _chosen(paths, adapter, wrt)
    for (_, leaf), path, trained in zip(leaves, paths, chosen, strict=True):
        if trained and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"Every parameter that is trained must be floating point; {path} is {leaf.dtype}. Freeze it "
                "(init_state(..., wrt=patterns of what is trained)), or keep counters and tables out of what `init` "
                "returns (in NNX: a variable that is not an nnx.Param)."
            )
    return None if all(chosen) else chosen


def _chosen(paths: list[str], adapter: Any, wrt: Any) -> tuple[bool, ...]:
    if wrt is None:
        return (True,) * len(paths)
    patterns = _patterns(wrt)
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"Every pattern of `wrt` must match a parameter; {pattern!r} matches none of {_some(paths)}."
                )
        chosen = tuple(any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns) for path in paths)
    elif adapter is None:
        raise ValueError(f"For a pytree, `wrt` is a path pattern or a sequence of them ('head/*'); got {wrt!r}.")
    else:
        chosen = flax_nnx.matches(adapter, paths, wrt)
    if not any(chosen):
        raise ValueError(f"`wrt` must leave something to train; {wrt!r} matches none of {_some(paths)}.")
    return chosen


def _patterns(wrt: Any) -> tuple[str, ...] | None:
    """`wrt` as path patterns; None where it is something else."""
    if isinstance(wrt, str):
        return (wrt,)
    if isinstance(wrt, Sequence) and all(isinstance(pattern, str) for pattern in wrt):
        return tuple(wrt)
    return None


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
