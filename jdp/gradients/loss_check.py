"""Hold a loss to its promise, before the first step: `total` and `weight` are sums over examples.

A step calls the loss on parts of the batch: on each device's rows under "manual", on each microbatch where there are
several. What is no sum over examples then means something else than on the whole batch. Two looks, once:

1. `constant_term` reads the trace: a term of `total` that no leaf of the batch reaches, and that more rows leave as it
   is (a weight penalty), is counted once for every part.
2. `mixing` computes: the loss of a few rows of the first batch together, against the same rows apart. NNX modules are
   in evaluation mode, and all random bits are one constant, so that only the rows can make a difference.

A mean whose weight is a constant 1 passes both: all parts have the same number of rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np

from jdp.gradients import auto
from jdp.gradients.accumulate import Task
from jdp.gradients.loss_trace import LossTrace, computes_in_float32, redraws
from jdp.gradients.traced import batch_rows
from jdp.plan import Plan
from jdp.precision import Precision
from jdp.state import TrainState
from jdp.types import Batch

MOST = 4
"""Groups of rows that are compared: memory stays that of a few examples, forward only."""
TOLERANCE = {True: 1e-4, False: 5e-2}
"""Of the sum of absolute values: for losses all in float32, whose sums run in another order, and for others."""


def constant_term(whole: LossTrace, part: LossTrace) -> str | None:
    """The line of a term of `Loss.total` that is no sum over examples, unless the weight is as constant as it is.

    Args:
        whole, part: the loss traced on two different numbers of rows.
    """
    if not whole.is_sum or (whole.constant_weight is not None and whole.constant_weight == part.constant_weight):
        return None
    same = {term.signature for term in part.terms_without_batch()}
    return next((term.line for term in whole.terms_without_batch() if term.signature in same), None)


def mixing(task: Task, plan: Plan, state: TrainState, batch: Batch, train: bool) -> str | None:
    """Say how the loss of a few rows together differs from that of the same rows apart; None where it does not.

    Args:
        task, plan: what the step was made of.
        state, batch: real values. All processes of a cluster call this together.
        train: the loss gets a key to draw from; else `rng=None`.

    Raises:
        ValueError: the loss draws again until a draw is accepted, which may never end where all draws are the same; or
            it has effects, such as a callback.
    """
    found = _difference(task, plan, state, batch, train, 1.0)
    # Of a loss that is zero with these weights (a distance to the model it starts from) only rounding errors are left.
    return found if found and _difference(task, plan, state, batch, train, 1.25) else None


def _difference(task: Task, plan: Plan, state: TrainState, batch: Batch, train: bool, factor: float) -> str | None:
    """What `mixing` says with all parameters times `factor`."""
    of_batch = batch_rows(batch) // task.group
    groups = min(MOST, of_batch)
    spread, near = np.arange(groups) * (of_batch // groups), np.arange(groups)
    choices = [spread, spread + (of_batch - 1) - spread[-1], near, near + (of_batch - groups) // 2]
    task = replace(task, precision=Precision(task.precision.params, "fp32", "fp32"), accumulate=1)

    def compare(params: Any, model_state: Any, batch: Batch, rows: jax.Array) -> Any:
        picked = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], plan.replicated), batch)
        key = jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_constant_bits()) if train else None
        if factor != 1:
            scaled = lambda p: (p * factor).astype(p.dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p  # noqa: E731
            params = jax.tree.map(scaled, params)
        return auto.together_and_apart(task, plan, params, model_state, picked, key)

    with jax.default_matmul_precision("highest"):  # GPUs would take TF32, of another rounding for other shapes
        rows = jax.ShapeDtypeStruct((groups * task.group,), jnp.int32)
        traced = jax.jit(compare, out_shardings=plan.replicated).trace(state.params, state.model_state, batch, rows)
        if traced.jaxpr.effects:
            raise ValueError("it prints or calls back, which a trial would do too")
        if redraws(traced.jaxpr.jaxpr):
            raise ValueError("it draws again until a draw is accepted")
        run = traced.lower().compile()
    tolerance = TOLERANCE[computes_in_float32(traced.jaxpr.jaxpr)]
    for chosen in choices:
        rows = (chosen[:, None] * task.group + np.arange(task.group)).ravel().astype(np.int32)
        together, apart = jax.device_get(run(state.params, state.model_state, batch, rows))
        total, weight = float(together.total), float(together.weight)
        totals, weights = float(apart.total.sum()), float(apart.weight.sum())
        if not np.isfinite([total, totals]).all() or 0 in (weight, weights):
            continue  # such as rows that all weigh nothing
        scale = np.abs(apart.total).sum() / abs(weights) + abs(total / weight)
        if abs(total / weight - totals / weights) <= tolerance * scale:
            continue
        each = "one by one" if task.group == 1 else f"in groups of {task.group}"
        return (
            f"of {len(rows)} rows together it is {total / weight:.6g}, of the same rows {each} {totals / weights:.6g}"
        )
    return None


@functools.cache
def _constant_bits() -> Any:
    """A PRNG whose every word is the same: uniform 0.45, normal -0.13, permutations that permute nothing."""

    def bits(_: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        return jnp.full(shape, 0x7333333333333333 >> (64 - width), jnp.dtype(f"uint{width}"))

    return jexr.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros(1, jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="jdp_constant",
        tag="jdpc",
    )
