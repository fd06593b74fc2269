"""Check a loss's promise before the first step: `total` and `weight` are sums over examples.

A step calls the loss on parts of the batch: on each device's rows under "manual", on each microbatch where there are
several. A loss that is no sum over examples then means something else than on the whole batch. Where `row_proof` does
not tell, two checks, once:

1. `constant_term` reads the trace for a term of `total` that depends neither on the batch nor on the number of rows, as
   a weight penalty does: it would be counted once for every part.
2. `mixing` computes: the loss of a few rows of the first batch together, compared with that of the same rows apart. NNX
   modules are in evaluation mode, and all random bits are one constant, so that only the rows can make a difference.

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
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.notices import notice
from jdp.core.batch import batch_rows
from jdp.core.gradients.auto import make_collectives
from jdp.core.gradients.loss_call import LossWithAux, Sums
from jdp.core.gradients.loss_trace import LossTrace, computes_in_float32, redraws
from jdp.core.gradients.microbatch import traced_loss, working_copy
from jdp.core.gradients.outputs import rows_that_mix, with_outputs
from jdp.core.gradients.spec import GradientSpec
from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.state import AnyState
from jdp.core.types import Batch

MOST = 4
"""Rows that are compared: memory stays that of a few examples, forward only."""
LARGEST = 64
"""Rows of a trial with as many rows a call as a step has."""
TOLERANCE = {True: 1e-4, False: 5e-2}
"""Of the sum of absolute values: for losses all in float32, whose sums run in another order, and for others."""


def constant_term(trace: LossTrace, other: LossTrace) -> str | None:
    """Return the source line of a term of `Loss.total` that is no sum over examples; None if there is none.

    A term that does not depend on the batch is right if the weight does not depend on it either.
    """
    if not trace.is_sum or (trace.constant_weight is not None and trace.constant_weight == other.constant_weight):
        return None
    same = {term.signature for term in other.terms_without_batch()}
    return next((term.line for term in trace.terms_without_batch() if term.signature in same), None)


class Untried(ValueError):
    """A loss that must not be tried; the message is the reason."""


Chunks = np.ndarray[Any, Any]
"""Indices of a batch's rows, integers [chunks, rows of a chunk]: the loss is called on each chunk, and on all rows."""


def mixing(spec: GradientSpec, plan: Plan, state: AnyState, batch: Batch, rows: int) -> str | None:
    """Describe how the loss of a few rows together differs from that of the same rows apart; None if it does not."""
    trial = functools.partial(_Trial, spec, plan, state, batch)
    every = np.arange(batch_rows(batch))
    trials = _few_rows(every)
    try:
        message, weighty = trial(trials[0].shape, 1.0).difference(trials)
        if not message and len(weighty) < len(np.unique(np.concatenate(trials), axis=0)):
            trials = _with_weight(trial(trials[0].shape, 1.0), every)
            message, _ = trial(trials[0].shape, 1.0).difference(trials)
    except Untried:
        raise
    except Exception:
        if 2 * rows > LARGEST:
            raise
        trials = [_two_calls(rows, spec.settings.accumulate)]
        message, _ = trial(trials[0].shape, 1.0).difference(trials)
    # Of a loss that is zero with these weights (a distance to the model it starts from) only rounding errors are left.
    return message if message and trial(trials[0].shape, 1.25).difference(trials)[0] else None


def _few_rows(rows: np.ndarray[Any, Any]) -> list[Chunks]:
    """Choose at most four of these rows, each a chunk: far apart (padding is often contiguous), and neighbours."""
    count = min(MOST, len(rows))
    spread, near = np.arange(count) * (len(rows) // count), np.arange(count)
    choices = [spread, spread + (len(rows) - 1) - spread[-1], near, near + (len(rows) - count) // 2]
    return [rows[choice][:, None] for choice in choices]


def _with_weight(trial: _Trial, rows: np.ndarray[Any, Any]) -> list[Chunks]:
    """Choose rows that have a weight, of `LARGEST` neighbours here and there. Raises Untried if there are none."""
    count = min(MOST, len(rows))
    starts = np.linspace(0, len(rows) - count, min(LARGEST // MOST, len(rows) // count)).astype(int)
    blocks = [(start + np.arange(count))[:, None] for start in starts]
    _, weighty = trial.difference(blocks)
    if not weighty:
        raise Untried("none of the rows that were tried has a weight and a finite loss")
    found = np.array(sorted(chunk[0] for chunk in weighty))
    return _few_rows(np.concatenate([found, np.setdiff1d(rows, found)[: max(0, count - len(found))]]))


def _two_calls(rows: int, accumulate: int) -> Chunks:
    """Return the rows of two calls as a step makes them: two microbatches of one device, or the rows of two devices."""
    if accumulate == 1:
        return np.arange(2 * rows).reshape(2, rows)
    return np.arange(rows * accumulate).reshape(-1, accumulate).T[:2]


class _Trial:
    """The loss, compiled for chunks of this shape together and apart, with all parameters times `factor`."""

    def __init__(
        self,
        spec: GradientSpec,
        plan: Plan,
        state: AnyState,
        batch: Batch,
        shape: tuple[int, ...],
        factor: float,
    ) -> None:
        precision = Precision(spec.settings.precision.params, "fp32", "fp32")
        spec = replace(spec, settings=replace(spec.settings, precision=precision, accumulate=1))
        collectives = make_collectives(spec, plan)
        if isinstance(spec.loss_fn, LossWithAux):
            spec = with_outputs(spec, lambda loss: loss, 1, state, batch)
        loss = replace(traced_loss(spec, collectives), training=False)
        replicated = NamedSharding(plan.mesh, PartitionSpec())

        def compare(params: Any, model_state: Any, batch: Batch, chunks: jax.Array) -> Any:
            key = None
            if spec.settings.train:
                key = jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_constant_bits())
            if factor != 1:
                scaled = lambda p: (p * factor).astype(p.dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p  # noqa: E731
                params = jax.tree.map(scaled, params)
            operands = working_copy(spec, collectives, params)

            def take(rows: jax.Array) -> Batch:
                return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], replicated), batch)

            def forward(batch: Batch) -> Sums:
                return loss(operands, model_state, batch, key)[0]

            together = jax.lax.with_sharding_constraint(jnp.sort(chunks.ravel()), replicated)
            return forward(take(together)), jax.lax.map(forward, take(chunks))

        with jax.default_matmul_precision("highest"):  # GPUs would take TF32, of another rounding for other shapes
            chunks = jax.ShapeDtypeStruct(shape, jnp.int32)
            traced = jax.jit(compare, out_shardings=replicated).trace(state.params, state.model_state, batch, chunks)
            if traced.jaxpr.effects:
                raise Untried("it prints or calls back, which a trial would do too")
            if redraws(traced.jaxpr.jaxpr):
                raise Untried("it draws again until a draw is accepted")
            run = traced.lower().compile()
        self._run = lambda chunks: jax.device_get(run(state.params, state.model_state, batch, chunks))
        self._tolerance = TOLERANCE[computes_in_float32(traced.jaxpr.jaxpr)]

    def difference(self, trials: list[Chunks]) -> tuple[str | None, list[Any]]:
        """Describe the first difference in `trials`, or None; return also the chunks that have a weight."""
        weighty: dict[int, Any] = {}
        for chunks in trials:
            together, apart = self._run(chunks.astype(np.int32))
            total, weight = float(together.total), float(together.weight)
            totals, weights = float(apart.total.sum()), float(apart.weight.sum())
            if not np.isfinite(total) or weight == 0:
                continue  # such as rows that all weigh nothing
            if not np.isfinite(totals):
                return f"the loss of {chunks.size} rows together is finite, and that of a part of them is not", []
            weighty |= {int(chunk[0]): chunk for chunk, own in zip(chunks, apart.weight, strict=True) if own != 0}
            _report_metrics(together, apart, self._tolerance, chunks)
            if message := rows_that_mix(together.rows, apart.rows, chunks, self._tolerance):
                return message, []
            scale = np.abs(apart.total).sum() / abs(weights) + abs(total / weight) if weights else np.inf
            if not weights or abs(total / weight - totals / weights) > self._tolerance * scale:
                apart_now = f"{totals / weights:.6g}" if weights else "nothing"
                return (
                    f"Σtotal / Σweight is {total / weight:.6g} of {chunks.size} rows together, {apart_now} of them in "
                    f"{len(chunks)} parts"
                ), []
        return None, list(weighty.values())


def _report_metrics(together: Sums, apart: Sums, tolerance: float, chunks: Chunks) -> None:
    """Report once each metric that is no sum over examples: its value depends on how many calls there are."""
    for name, (total, weight) in together.metrics.items():
        totals, weights = (np.sum(x, axis=0) for x in apart.metrics[name])
        with np.errstate(all="ignore"):
            one, several = np.asarray(total) / weight, totals / weights
            scale = np.sum(np.abs(apart.metrics[name][0]), axis=0) / np.abs(weights) + np.abs(one)
        differs = np.abs(one - several) > tolerance * scale
        if np.any(differs & np.isfinite(one) & np.isfinite(several)):
            notice(
                f"metric {name!r} is no sum over examples: its value for {chunks.size} rows is another in "
                f"{len(chunks)} calls of the loss than in one, so it depends on the number of devices and "
                "microbatches; return a sum over examples, or a pair (sum, weight)"
            )


@functools.cache
def _constant_bits() -> Any:
    """Return a PRNG whose words are all the same: uniform 0.45, normal -0.13, permutations that permute nothing."""

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
