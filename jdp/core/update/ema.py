"""An exponential moving average of the parameters (Tarvainen and Valpola 2017, arXiv:1703.01780).

As part of the optimizer's state, the average is sharded and saved with its parameter. It has no leaf for frozen
parameters, and does not change when a step is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.base.errors import UserError, public
from jdp.base.words import is_number
from jdp.core.batch import check_state
from jdp.core.sharding.host_memory import on_device
from jdp.core.state import TrainState, trained_part, with_trained
from jdp.core.types import Model, PyTree
from jdp.core.update.optimizer import check_optimizer


class EmaState(NamedTuple):
    """State of `with_ema`: the inner optimizer's, the averaged parameters, and the sum of their weights (None: 1)."""

    inner: Any
    average: PyTree
    weight: jax.Array | None


@public()
def with_ema(tx: Any, decay: float, *, debias: bool = False) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it also keeps a moving average of the parameters; its updates do not change.

        >>> tx = jdp.with_ema(optax.adamw(1e-3), decay=0.999)
        >>> state = jdp.init_state(init, tx, plan, rng=jax.random.key(0))
        >>> averaged = jdp.ema_params(state)  # for evaluation

    After each step average = decay · average + (1 - decay) · params, in float32 even if the parameters are bfloat16.
    Wrap the whole optimizer: a transformation outside of it would change the updates after they were averaged.

    Args:
        tx: any optax optimizer. With `optax.MultiSteps` put the average inside, `MultiSteps(with_ema(tx, decay), k)`:
            outside, each of the k calls would count as a step.
        decay: in [0, 1): about 1 / (1 - decay) steps are averaged; 0.999 to 0.9999 is usual.
        debias: False starts from the initial weights, whose weight then is decay^steps. True starts from zero and
            divides by 1 - decay^steps, as Adam does (Kingma and Ba 2014, arXiv:1412.6980, section 3). Give True to
            evaluate early, within the first 1 / (1 - decay) steps.

    Returns:
        An optax optimizer whose state is an `EmaState`.

    Raises:
        ValueError: `tx` is not an optimizer, or `decay` is out of range.
    """
    check_optimizer(tx)
    if not (is_number(decay) and 0 <= decay < 1):
        raise UserError(f"The decay of a moving average is a number in [0, 1); given {decay!r}. Give 0.999.")
    wrapped = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> Any:
        first = jnp.zeros_like if debias else jnp.asarray
        average = jax.tree.map(lambda p: first(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), params)
        return EmaState(wrapped.init(params), average, jnp.zeros(()) if debias else None)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise UserError("with_ema averages the parameters: pass them to update(updates, state, params).")
        updates, inner = wrapped.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        new = optax.tree.cast_like(new, state.average)
        average = optax.tree.update_moment(new, state.average, decay, 1)
        weight = None if state.weight is None else decay * state.weight + (1 - decay)
        return updates, EmaState(inner, average, weight)

    return optax.GradientTransformationExtraArgs(init, update)


@public()
def ema_params(state: TrainState[Model]) -> TrainState[Model]:
    """Return the state with averaged parameters instead of the trained ones, for evaluation.

        >>> state = jdp.init_state(init, jdp.with_ema(optax.sgd(0.1), 0.9), plan, rng=jax.random.key(0))
        >>> state, _ = jdp.make_train_step(loss_fn, plan)(state, batch)
        >>> metrics = jdp.make_eval_step(loss_fn, plan)(jdp.ema_params(state), batch)

    Averages inside `optax.masked` or `multi_transform` are used too. Parameters without an average do not change, nor
    does the model state: BatchNorm's statistics remain those of the weights in training. The result shares memory with
    `state`: do not train it, and make a new one after each step.

    Args:
        state: a train state whose optimizer was made by `with_ema`.

    Returns:
        A `TrainState` like `state`; the averages have the parameters' dtypes and shardings, and are in device memory.

    Raises:
        ValueError: it is not a state, or the optimizer keeps no average.
    """
    check_state(state, "jdp.ema_params(state)")
    is_ema = lambda node: isinstance(node, EmaState)  # noqa: E731
    averages = [node for node in jax.tree.leaves(state.opt_state, is_leaf=is_ema) if is_ema(node)]
    if not averages:
        raise UserError("ema_params needs an optimizer that keeps an average: jdp.with_ema(tx, decay=0.999).")
    params = trained_part(state.params, state.static.trained)
    for ema in averages:  # each may have some of the parameters (`multi_transform`)
        average = on_device(ema.average)
        params = jax.tree.map(partial(_averaged, ema.weight), average, params, is_leaf=_is_masked)
    return replace(state, params=with_trained(state.params, params, state.static.trained))


def _averaged(weight: jax.Array | None, average: Any, param: Any) -> Any:
    """Return the average of a parameter in its dtype, or the parameter itself if it has no average."""
    if _is_masked(average):
        return param
    if weight is None:
        return average.astype(param.dtype)
    mean = average / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
    return jnp.where(weight == 0, param, mean.astype(param.dtype))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
