"""An exponential moving average of the parameters, kept in the optimizer's state.

Averaged weights often evaluate better than the last ones (Polyak and Juditsky 1992, "Acceleration of stochastic
approximation by averaging": a plain mean, as in Izmailov et al. 2018, arXiv:1803.05407; exponential in Tarvainen and
Valpola 2017, arXiv:1703.01780). Being part of the optimizer's state, the average lies where its parameter lies, is
saved with it, has no leaf for frozen parameters, and stays as it was when a step is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.state import TrainState, trained_part, with_trained
from jdp.types import PyTree


class EmaState(NamedTuple):
    """State of `with_ema`.

    Attributes:
        inner: the wrapped optimizer's.
        average: a tree like the trained parameters, float32 (or wider).
        weight: float32 scalar, what the average's weights sum to; None where that is always 1.
    """

    inner: Any
    average: PyTree
    weight: jax.Array | None


def with_ema(tx: Any, decay: float, *, debias: bool = False) -> optax.GradientTransformationExtraArgs:
    """`tx`, and beside it the moving average of the parameters it leads to; the updates stay those of `tx`.

    After each step average = decay · average + (1 - decay) · params, in float32 whatever the parameters rest in. Wrap
    the whole optimizer: what stands outside would change the updates unseen. Evaluate with `ema_params(state)`.

    Args:
        tx: any optax optimizer, `optax.MultiSteps` too.
        decay: in [0, 1): about 1 / (1 - decay) steps are averaged; 0.999 to 0.9999 is usual.
        debias: start from nothing and divide by 1 - decay^steps, as Adam does (Kingma and Ba 2014, arXiv:1412.6980,
            section 3), instead of starting from the initial weights, which then weigh decay^steps.

    Raises:
        ValueError: `decay` is out of range.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"The decay of a moving average is in [0, 1); got {decay}.")
    wrapped = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> Any:
        first = jnp.zeros_like if debias else jnp.asarray
        average = jax.tree.map(lambda p: first(p, dtype=_wide(p)), params)
        return EmaState(wrapped.init(params), average, jnp.zeros(()) if debias else None)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("with_ema averages the parameters: hand them to update(updates, state, params).")
        updates, inner = wrapped.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), state.average, new)
        weight = None if state.weight is None else decay * state.weight + (1 - decay)
        return updates, EmaState(inner, average, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_params(state: TrainState) -> TrainState:
    """The same state with the averaged parameters in place of the trained ones, for evaluation.

    The result shares memory with `state`: evaluate, then drop it; do not train on it, and make it anew after each step.

    Raises:
        ValueError: the optimizer keeps no average.
    """
    found = [leaf for leaf in jax.tree.leaves(state.opt_state, is_leaf=_is_ema) if _is_ema(leaf)]
    if not found:
        raise ValueError("ema_params needs an optimizer that keeps an average: jdp.with_ema(tx, decay=0.999).")
    ema, trained = found[0], state.static.trained
    part = trained_part(state.params, trained)
    if ema.weight is None:
        mean = jax.tree.map(lambda a, p: a.astype(p.dtype), ema.average, part)
    else:
        none, weight = ema.weight == 0, jnp.maximum(ema.weight, jnp.finfo(jnp.float32).tiny)
        mean = jax.tree.map(lambda a, p: jnp.where(none, p, (a / weight).astype(p.dtype)), ema.average, part)
    return replace(state, params=with_trained(state.params, mean, trained))


def _is_ema(node: Any) -> bool:
    return isinstance(node, EmaState)


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)
