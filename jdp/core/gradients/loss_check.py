"""The trial of a loss before the first step: is what it declares a sum over rows one?

A step calls the loss on parts of the batch: on each device's rows under `manual`, on each microbatch if there are
several. That is right if `total` and `weight` are sums over rows, as `jdp.Loss` declares. Two facts of such sums are
tried on a few rows, in float32:

1. Without rows both are 0. That finds a penalty which is counted once a call, however small. If the loss does not take
   zero rows, or is not finite there, the same rows twice are compared with twice the rows.
2. No row changes another row's part. With rows (a, b) and others (a', b') of the same shapes
   f(a, b) + f(a', b') = f(a', b) + f(a, b'). Rows are split into a and b by each bit of their number, so any two are
   apart once. And a loss that draws nothing is the same for rows in another order.

Values alone are tried: rows that meet behind a `stop_gradient`, and cancel, are not seen. Batch norms of NNX, which are
known, take their running averages meanwhile. Weights and rows are those of the first call, and then the same moved into
general position. With a head of zeros, or with weights that are all 1, no row would make a difference. A result that is
not finite decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.base.notices import notice
from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.microbatch import traced_loss, working_copy
from jdp.core.gradients.outputs import changed_rows
from jdp.core.gradients.spec import GradientSpec
from jdp.core.gradients.views import AutoCollectives
from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.random.trial_values import constant_key, moved_rows, moved_weights
from jdp.core.state import AnyState
from jdp.core.types import Batch, PyTree

ROWS = 4
"""Rows of a call in the trial: memory stays that of a few examples, forward only."""
TOLERANCE = 1e-5
"""Of the sum of absolute values. Rows keep their places, so only the last sum over rows is rounded otherwise."""

UNDECIDED = "on the rows that were tried it is not finite, or they have no weight"

Program = Callable[[bool], Any]
"""What was compiled, as a function of whether weights and rows are moved."""


class UntriedError(ValueError):
    """A loss that cannot be tried; the message is the reason."""


@dataclass(frozen=True)
class Trial:
    """A loss, and the state and the batch that it is tried on.

    Attributes:
        draws: True if the loss draws random numbers.
        evaluates: True to try it as an evaluation calls it: without a key, and a module in evaluation mode.
    """

    spec: GradientSpec
    plan: Plan
    state: AnyState
    batch: Batch
    draws: bool = False
    evaluates: bool = False

    def finding(self, rows: int) -> str | None:
        """Describe how the loss is no sum over rows, with the two numbers; None if it passes.

        Args:
            rows: the rows of a call of the step, which are tried if the loss does not take `ROWS` of them.

        Raises:
            UntriedError: nothing was decided.
        """
        batch_size, reason = batch_rows(self.batch), ""
        for count in dict.fromkeys((min(ROWS, batch_size), min(rows, batch_size))):
            try:
                return self._finding(count)
            except UntriedError:
                raise
            except Exception as error:  # the user's own code, at a size that it may not expect
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UntriedError(f"it cannot be tried on a few rows ({reason})")

    def _finding(self, count: int) -> str | None:
        numbers, decided = _spread(count, batch_rows(self.batch)), False
        mixtures = self._compiled(_mixtures, numbers, jax.random.key(1))
        try:
            nothing = self._compiled(_nothing, numbers, constant_key())
        except Exception:  # the user's own code
            nothing = None
        for moved in (False, True):
            calls, empty = mixtures(moved), nothing and nothing(moved)
            if empty is not None and (found := _of_no_rows(empty)):
                return found
            no_value = empty is None or not np.isfinite(empty.total)
            if no_value and (found := _of_twice(self._compiled(_twice, numbers, constant_key())(moved), count)):
                return found
            if np.isfinite(calls.total).all() and np.any(calls.weight):
                decided = True
                if found := _of_halves(calls, numbers) or _of_order(calls, self.draws):
                    return found
                _report_metrics(calls, empty)
        if not decided:
            raise UntriedError(UNDECIDED)
        return None

    def _compiled(self, function: Callable[..., Any], numbers: np.ndarray, key: jax.Array) -> Program:
        """Compile `function(loss as a function of rows, two sets of rows)`."""
        precision = Precision(self.spec.settings.precision.params, "fp32", "fp32")
        settings = replace(self.spec.settings, precision=precision, accumulate=1)
        spec, replicated = replace(self.spec, settings=settings, draws=None), self.plan.replicated
        collectives = AutoCollectives(spec, self.plan)
        loss = replace(traced_loss(spec, collectives), running_norms=True)
        its_key = key if settings.train and not self.evaluates else None

        def run(params: PyTree, model_state: PyTree, batch: Batch, amount: jax.Array) -> Any:
            sets = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[numbers.ravel()], replicated), batch)
            sets = jax.tree.map(lambda x: x.reshape(*numbers.shape, *x.shape[1:]), moved_rows(sets, amount))
            operands = working_copy(spec, collectives, moved_weights(params, amount))
            return function(lambda rows: loss(operands, model_state, rows, its_key)[0], sets)

        arguments = self.state.params, self.state.model_state, self.batch
        with jax.default_matmul_precision("highest"):  # GPUs would take TF32
            traced = jax.jit(run, out_shardings=replicated).trace(*arguments, jnp.float32(0))
            if traced.jaxpr.effects:
                raise UntriedError("it prints or calls back, which a trial would do too")
            if any(isinstance(x, Tracer) for x in traced.jaxpr.consts):
                raise UntriedError("it closes over a value of the function that is traced: pass that in the batch")
            program = traced.lower().compile()
        return lambda moved: jax.device_get(program(*arguments, jnp.float32(moved)))


def _spread(count: int, rows: int) -> np.ndarray:
    """Return two sets of `count` rows of a batch, [2, count], spread over it: padding is often contiguous."""
    spread = np.arange(2 * count) * rows // (2 * count)
    return np.stack([spread[::2], spread[1::2] if rows >= 2 * count else np.roll(spread[::2], 1)])


def _masks(count: int) -> np.ndarray:
    """Return which rows are exchanged in each call: none, all, and both halves of each split."""
    splits = [np.arange(count) >> bit & 1 == 1 for bit in range(max(1, (count - 1).bit_length()))]
    return np.array([np.zeros(count, bool), np.ones(count, bool), *(half for s in splits for half in (s, ~s))])


def _mixtures(forward: Callable[[Batch], Sums], sets: Batch) -> Sums:
    """Return the sums of a call for each of `_masks`, and of one with the first rows in the opposite order."""
    count = jax.tree.leaves(sets)[0].shape[1]
    places = np.arange(count) + count * _masks(count)
    both = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sets)
    places = np.concatenate([places, np.arange(count)[None, ::-1]])
    return jax.lax.map(lambda rows: forward(jax.tree.map(lambda x: x[rows], both)), jnp.asarray(places))


def _nothing(forward: Callable[[Batch], Sums], sets: Batch) -> Sums:
    return forward(jax.tree.map(lambda x: x[0, :0], sets))


def _twice(forward: Callable[[Batch], Sums], sets: Batch) -> tuple[Sums, Sums]:
    first = jax.tree.map(lambda x: x[0], sets)
    return forward(first), forward(jax.tree.map(lambda x: jnp.concatenate([x, x]), first))


def _of_no_rows(empty: Sums) -> str | None:
    if empty.weight:
        return f"without rows Loss.weight is {empty.weight:.6g}, not 0: return jdp.Loss(total, mask.sum()), or the rows"
    if np.isfinite(empty.total) and empty.total:
        penalty = "multiply a penalty by the weight: jdp.Loss(total + penalty * weight, weight)"
        return f"without rows Loss.total is {empty.total:.6g}, not 0: {penalty}"
    return None


def _of_twice(calls: tuple[Sums, Sums], count: int) -> str | None:
    for name in ("total", "weight"):
        once, twice = (float(getattr(sums, name)) for sums in calls)
        if np.isfinite([once, twice]).all() and abs(twice - 2 * once) > TOLERANCE * (abs(twice) + 2 * abs(once)):
            return f"Loss.{name} is {once:.6g} of {count} rows and {twice:.6g} of the same rows twice"
    return None


def _of_halves(calls: Sums, numbers: np.ndarray) -> str | None:
    masks = _masks(numbers.shape[1])
    for place in range(2, len(masks), 2):
        left, right = (", ".join(map(str, numbers[0, mask])) for mask in masks[place : place + 2])
        for name, f in (("total", calls.total), ("weight", calls.weight)):
            together, apart = f[0] + f[1], f[place] + f[place + 1]
            scale = np.abs(f[[0, 1, place, place + 1]]).sum()
            scale += 1e-3 * np.abs(calls.weight).sum() if name == "total" else 0  # a loss of 0 is rounding
            if abs(together - apart) > TOLERANCE * scale:
                numbers_of = f"Loss.{name} of them is {together:.6g} and not {apart:.6g}, the sum of their parts"
                pairs = "if neighbouring rows belong together, make one row of them, [pairs, 2, ...]"
                return f"rows {left} of the batch change the part of rows {right}: {numbers_of}; {pairs}"
    return changed_rows([np.asarray(x)[:-1] for x in calls.rows], masks)


def _of_order(calls: Sums, draws: bool) -> str | None:
    """Compare rows with the same in the opposite order: at other places they may be rounded otherwise."""
    for name, f in (("total", calls.total), ("weight", calls.weight)):
        if not draws and abs(f[0] - f[-1]) > 1e-3 * (abs(f[0]) + abs(f[-1])):
            return f"Loss.{name} is {f[0]:.6g} of some rows and {f[-1]:.6g} of the same rows in the opposite order"
    return None


def _report_metrics(calls: Sums, empty: Sums | None) -> None:
    """Report once each metric that is no sum over rows: its value depends on how many calls there are."""
    for name, pair in calls.metrics.items():
        for x, nothing in zip(pair, (0, 0) if empty is None else empty.metrics[name], strict=True):
            gap, scale = np.abs(x[0] + x[1] - x[2] - x[3]), np.abs(x).sum(axis=0)
            if np.isfinite(x).all() and (np.any(gap > TOLERANCE * scale) or np.any(nothing)):
                notice(
                    f"metric {name!r} is no sum over rows, so its value depends on the number of devices and "
                    "microbatches; return a sum over rows, or a pair (sum, weight)"
                )
