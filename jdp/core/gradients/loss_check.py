"""The trial of a loss before the first step: are its total and its weight sums over rows, as `jdp.Loss` declares?

A step relies on this when it calls the loss on parts of the batch. Two properties are tried on a few rows, in float32:

1. Without rows both are 0. This finds a penalty that is counted once a call, however small. If the loss does not accept
   zero rows, or is not finite there, a call with every row twice must give twice the sums.
2. No row changes another row's part. For rows (a, b) and other rows (a', b') of the same shapes,
   f(a, b) + f(a', b') = f(a', b) + f(a, b'). If the loss draws nothing, the order of the rows does not matter either.

Only values are compared, so rows are not found that change each other's gradients alone, by a `stop_gradient`. Batch
norms of NNX use their running averages meanwhile. The weights and rows of the first call are tried, then again with
noise: with a head of zeros no row would make a difference. Last, all rows have the integers of one row, because a loss
may compare rows of equal integers, such as a query's. A result that is not finite decides nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.core.batch import batch_rows
from jdp.core.gradients import loss_findings
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.microbatch import traced_loss, working_copy
from jdp.core.gradients.model_state import names_of
from jdp.core.gradients.spec import Collectives, GradientSpec
from jdp.core.gradients.trial_values import constant_key, moved_rows, moved_weights, rows_at
from jdp.core.precision import Precision
from jdp.core.state import AnyState
from jdp.core.types import Batch, PyTree

ROWS = 4
"""Rows of a call in the trial, so that it takes the memory of a few examples, forward only."""
UNDECIDED = "on the rows that were tried it is not finite, or their weight is 0"


class UntriedError(ValueError):
    """A loss that cannot be tried; the message is the reason."""


@dataclass(frozen=True)
class Trial:
    """A loss, and the state and the batch that it is tried on."""

    spec: GradientSpec
    state: AnyState
    batch: Batch
    draws: bool = False  # random numbers
    evaluates: bool = False  # called as in an evaluation: without a key, and with modules in evaluation mode
    statistics: tuple[str, ...] = ()  # paths of model state that is computed by each device, then averaged

    def finding(self, rows: int) -> str | None:
        """Describe the first violation, with its two numbers; None if the loss passes.

        A loss that does not accept `ROWS` rows is tried on the `rows` of a call of the step. Raises UntriedError if
        neither decides.
        """
        batch_size, reason = batch_rows(self.batch), ""
        for count in dict.fromkeys((min(ROWS, batch_size), min(rows, batch_size))):
            try:
                return self._finding(count)
            except UntriedError:
                raise
            except Exception as error:  # raised by the user's own code, perhaps at this size only
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UntriedError(f"it cannot be tried on a few rows ({reason})")

    def _finding(self, count: int) -> str | None:
        rows, decided = batch_rows(self.batch), False
        spread = np.arange(2 * count) * rows // (2 * count)  # over the batch: padding is often contiguous
        numbers = np.stack([spread[::2], spread[1::2] if rows >= 2 * count else np.roll(spread[::2], 1)])
        mixtures = self._compiled(_mixtures, numbers, jax.random.key(1))
        try:
            without_rows = lambda forward, sets: forward(jax.tree.map(lambda x: x[0, :0], sets))[0]  # noqa: E731
            nothing = self._compiled(without_rows, numbers, constant_key())
        except Exception:  # raised by the user's own code
            nothing = None
        twice = cache(partial(self._compiled, _twice, numbers, constant_key()))  # compiled if it is needed
        for moved in (0, 1, 2):
            calls, empty = mixtures(moved), nothing and nothing(moved)
            finding = empty and loss_findings.without_rows(empty)
            if finding is None and (empty is None or not np.isfinite(empty.total)):
                finding = loss_findings.of_rows_twice(twice()(moved), count)
            decides = np.isfinite(calls.total).all() and np.any(calls.weight)
            if finding is None and decides:
                finding = loss_findings.of_halves(calls, numbers)
            if finding is None and decides and not self.draws:
                finding = loss_findings.of_order(calls)
            if finding is not None:
                return finding
            if decides:
                decided = True
                loss_findings.report_metrics(calls, empty)
        if not decided:
            raise UntriedError(UNDECIDED)
        if not self.statistics:
            return None
        states = self._compiled(_states, numbers, constant_key())(1)
        leaves = zip(names_of(self.state.model_state), jax.tree.leaves(self.state.model_state), *states, strict=True)
        return loss_findings.of_averages([leaf for leaf in leaves if leaf[0] in self.statistics], count)

    def _compiled(self, function: Callable[..., Any], numbers: np.ndarray, key: jax.Array) -> Callable[[int], Any]:
        """Compile `function(forward, two sets of rows)` for values of `moved_rows`; forward(rows) -> (sums, state)."""
        precision = Precision(self.spec.settings.precision.params, "fp32", "fp32")
        settings = replace(self.spec.settings, precision=precision, accumulate=1)
        spec, replicated = replace(self.spec, settings=settings, draws=None), self.spec.plan.replicated
        collectives = Collectives(spec)
        loss = replace(traced_loss(collectives), running_norms=True)
        its_key = key if settings.train and not self.evaluates else None

        def run(params: PyTree, model_state: PyTree, batch: Batch, amount: jax.Array) -> Any:
            sets = moved_rows(rows_at(batch, numbers, replicated), amount)
            operands = working_copy(collectives, moved_weights(params, amount))
            return function(lambda rows: loss(operands, model_state, rows, its_key), sets)

        arguments = self.state.params, self.state.model_state, self.batch
        with jax.default_matmul_precision("highest"):  # GPUs would take TF32
            traced = jax.jit(run, out_shardings=replicated).trace(*arguments, jnp.float32(0))
            if traced.jaxpr.effects:
                raise UntriedError("it prints or calls back, which a trial would do too")
            if any(isinstance(x, Tracer) for x in traced.jaxpr.consts):
                raise UntriedError("it closes over a value of the traced function around it: pass that in the batch")
            program = traced.lower().compile()
        return lambda moved: jax.device_get(program(*arguments, jnp.float32(moved)))


def _mixtures(forward: Callable[[Batch], tuple[Sums, PyTree]], sets: Batch) -> Sums:
    """Return the sums of a call for each of `exchanged_rows`, and of the first rows in the opposite order."""
    count = jax.tree.leaves(sets)[0].shape[1]
    places = np.arange(count) + count * loss_findings.exchanged_rows(count)
    places = jnp.asarray(np.concatenate([places, np.arange(count)[None, ::-1]]))
    both = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sets)
    return jax.lax.map(lambda rows: forward(jax.tree.map(lambda x: x[rows], both))[0], places)


def _twice(forward: Callable[[Batch], tuple[Sums, PyTree]], sets: Batch) -> tuple[Sums, Sums]:
    first = jax.tree.map(lambda x: x[0], sets)
    return forward(first)[0], forward(jax.tree.map(lambda x: jnp.concatenate([x, x]), first))[0]


def _states(forward: Callable[[Batch], tuple[Sums, PyTree]], sets: Batch) -> list[list[jax.Array]]:
    """Return the leaves of the state after the first rows, after the others, and after all of them in one call."""
    parts = [lambda x: x[0], lambda x: x[1], lambda x: x.reshape(-1, *x.shape[2:])]
    return [jax.tree.leaves(forward(jax.tree.map(part, sets))[1]) for part in parts]
