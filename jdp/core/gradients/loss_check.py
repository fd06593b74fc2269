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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.base.notices import notice
from jdp.core.batch import batch_rows
from jdp.core.gradients.accumulate import traced_loss, working_copy
from jdp.core.gradients.collectives import Collectives, GradientSpec
from jdp.core.gradients.loss_call import Sums, names_of, traced_dtype
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

        A loss that does not accept `ROWS` rows is tried on the step's `rows`. Raises UntriedError if neither decides.
        """
        batch_size, reason = batch_rows(self.batch), ""
        for count in dict.fromkeys((min(ROWS, batch_size), min(rows, batch_size))):
            try:
                with jax.transfer_guard("allow"):  # a user's guard is for the loop
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
            nothing = self._compiled(_call_parts(_SUMS, lambda x: x[0, :0]), numbers, constant_key())
        except Exception:  # raised by the user's own code
            nothing = None
        once_and_twice = _call_parts(_SUMS, itemgetter(0), lambda x: jnp.concatenate([x[0], x[0]]))
        twice = cache(partial(self._compiled, once_and_twice, numbers, constant_key()))  # compiled if it is needed
        for moved in (0, 1, 2):
            calls, empty = mixtures(moved), nothing and nothing(moved)[0]
            finding = empty and call_without_rows(empty)
            if finding is None and (empty is None or not np.isfinite(empty.total)):
                finding = doubled_rows(twice()(moved), count)
            decides = np.isfinite(calls.total).all() and np.any(calls.weight)
            if finding is None and decides:
                finding = exchanged_halves(calls, numbers) or (None if self.draws else opposite_order(calls))
            if finding is not None:
                return finding
            if decides:
                decided = True
                report_metrics(calls, empty)
        if not decided:
            raise UntriedError(UNDECIDED)
        if not self.statistics:
            return None
        parts = _call_parts(_STATE, itemgetter(0), itemgetter(1), lambda x: x.reshape(-1, *x.shape[2:]))
        states = [self.state.model_state, *self._compiled(parts, numbers, constant_key())(1)]
        leaves = zip(names_of(self.state.model_state), *map(jax.tree.leaves, states), strict=True)
        return averaged_state([leaf for leaf in leaves if leaf[0] in self.statistics], count)

    def _compiled(self, function: Callable[..., Any], numbers: np.ndarray, key: jax.Array) -> Callable[[int], Any]:
        """Compile `function(forward, two sets of rows)` for values of `moved_rows`; forward(rows) -> (sums, state)."""
        precision = Precision(self.spec.settings.precision.params, "fp32", "fp32")
        settings = replace(self.spec.settings, precision=precision, accumulate=1)
        spec, replicated = replace(self.spec, settings=settings, draws=None), self.spec.plan.replicated
        collectives = Collectives(spec)
        loss = replace(traced_loss(collectives), running_norms=True)
        its_key = key if settings.train and not self.evaluates else None

        def run(params: PyTree, model_state: PyTree, batch: Batch, amount: jax.Array) -> Any:
            sets = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[numbers], replicated), batch)
            sets = moved_rows(sets, amount)
            operands = working_copy(collectives, params)
            return function(lambda rows: loss(operands, model_state, rows, its_key), sets)

        params, *others = self.state.params, self.state.model_state, self.batch
        with jax.default_matmul_precision("highest"):  # GPUs would take TF32
            traced = jax.jit(run, out_shardings=replicated).trace(params, *others, jnp.float32(0))
            if traced.jaxpr.effects:
                raise UntriedError("it prints or calls back, which a trial would do too")
            if any(isinstance(x, Tracer) for x in traced.jaxpr.consts):
                raise UntriedError("it closes over a value of the traced function around it: pass that in the batch")
            program = traced.lower().compile()
        return lambda amount: jax.device_get(program(self._moved if amount else params, *others, jnp.float32(amount)))

    @cached_property
    def _moved(self) -> PyTree:
        """The parameters plus noise: weights such as zeros hide that rows change each other."""

        def moved(number: int, x: jax.Array) -> jax.Array:
            y = _with_noise(x, jnp.uint32(number))
            return jax.device_put(y, x.sharding) if getattr(x, "committed", False) else y

        return _map_numbered(moved, self.state.params)


def _mixtures(forward: Callable[[Batch], tuple[Sums, PyTree]], sets: Batch) -> Sums:
    """Return the sums of a call for each of `exchanged_rows`, and of the first rows in the opposite order."""
    count = jax.tree.leaves(sets)[0].shape[1]
    places = np.arange(count) + count * exchanged_rows(count)
    places = jnp.asarray(np.concatenate([places, np.arange(count)[None, ::-1]]))
    both = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sets)
    return jax.lax.map(lambda rows: forward(jax.tree.map(lambda x: x[rows], both))[0], places)


_SUMS, _STATE = 0, 1


def _call_parts(result: int, *parts: Callable[[jax.Array], jax.Array]) -> Callable[..., list[Any]]:
    """Return a function for `Trial._compiled`: the sums or the state of a call for each part of both sets of rows."""
    return lambda forward, sets: [forward(jax.tree.map(part, sets))[result] for part in parts]


TOLERANCE = 1e-5
"""Relative to the sum of absolute values. Rows keep their places, so only the last sum over rows rounds differently."""


def exchanged_rows(count: int) -> np.ndarray:
    """Return which of `count` rows are exchanged in each call, bool [calls, rows]: none, all, and half of them.

    Each bit of the rows' numbers gives two halves, so any two rows are in different halves at least once.
    """
    splits = [np.arange(count) >> bit & 1 == 1 for bit in range(max(1, (count - 1).bit_length()))]
    return np.array([np.zeros(count, bool), np.ones(count, bool), *(half for s in splits for half in (s, ~s))])


def call_without_rows(empty: Sums) -> str | None:
    if empty.weight:
        return f"without rows Loss.weight is {empty.weight:.6g}, not 0: return jdp.Loss(total, mask.sum()), or the rows"
    if np.isfinite(empty.total) and empty.total:
        penalty = "multiply a penalty by the weight: jdp.Loss(total + penalty * weight, weight)"
        return f"without rows Loss.total is {empty.total:.6g}, not 0: {penalty}"
    return None


def doubled_rows(calls: Sequence[Sums], count: int) -> str | None:
    """Describe sums that do not double with the rows, and report metrics that do not."""
    for name in ("total", "weight"):
        once, twice = (float(getattr(sums, name)) for sums in calls)
        if np.isfinite([once, twice]).all() and abs(twice - 2 * once) > TOLERANCE * (abs(twice) + 2 * abs(once)):
            return f"Loss.{name} is {once:.6g} of {count} rows and {twice:.6g} of the same rows twice"
    for name, pair in calls[0].metrics.items():
        for once, twice in zip(pair, calls[1].metrics[name], strict=True):
            _report_metric(name, np.abs(twice - 2 * once), np.abs(twice) + 2 * np.abs(once))
    return None


def exchanged_halves(calls: Sums, numbers: np.ndarray) -> str | None:
    """Describe rows that change the part of other rows; `calls` has the sums for each of `exchanged_rows`."""
    masks = exchanged_rows(numbers.shape[1])
    for place in range(2, len(masks), 2):
        left, right = (", ".join(map(str, numbers[0, mask])) for mask in masks[place : place + 2])
        for name, f in (("total", calls.total), ("weight", calls.weight)):
            together, apart = f[0] + f[1], f[place] + f[place + 1]
            scale = np.abs(f[[0, 1, place, place + 1]]).sum()
            scale += 1e-3 * np.abs(calls.weight).sum() if name == "total" else 0  # a loss of 0 is rounding
            if abs(together - apart) > TOLERANCE * scale:
                numbers_of = f"Loss.{name} of them is {together:.6g} and not {apart:.6g}, the sum of their parts"
                pairs = "if neighbouring rows belong together, make them one row, [pairs, 2, ...]"
                return f"rows {left} of the batch change the part of rows {right}: {numbers_of}; {pairs}"
    for x in (np.asarray(array)[:-1] for array in calls.aux):
        expected = np.where(masks.reshape(*masks.shape, *(1,) * (x.ndim - 2)), x[1], x[0])
        if not np.allclose(x, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(initial=0), equal_nan=True):
            return "rows of aux depend on the other rows of the call"
    return None


def averaged_state(leaves: list[tuple[str, Any, Any, Any, Any]], count: int) -> str | None:
    """Describe state that is no average over rows: (path, before, after some rows, after others, after all of them)."""
    for name, *arrays in leaves:
        before, first, other, both = (np.asarray(x, np.float64) for x in arrays)
        mean, dtype = (first + other) / 2, arrays[0].dtype
        eps = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0
        change = np.max(np.abs([first - before, other - before, both - before]), initial=0)
        far = np.abs(both - mean) > 1e-3 * change + 8 * eps * np.abs(mean)
        if np.any(far):
            return (
                f"{name} is {both[far][0]:.6g} after a call with {2 * count} rows, and {mean[far][0]:.6g} as the mean "
                "of two devices with half of them each: gather rows (jdp.gather_rows), or take partitioning='auto'"
            )
    return None


def opposite_order(calls: Sums) -> str | None:
    """Compare rows with the same rows in the opposite order."""
    for name, f in (("total", calls.total), ("weight", calls.weight)):
        if abs(f[0] - f[-1]) > 1e-3 * (abs(f[0]) + abs(f[-1])):
            return f"Loss.{name} is {f[0]:.6g} of some rows and {f[-1]:.6g} of the same rows in the opposite order"
    return None


def report_metrics(calls: Sums, empty: Sums | None) -> None:
    """Report once each metric that is no sum over rows: its value depends on how many calls there are."""
    for name, pair in calls.metrics.items():
        for x, nothing in zip(pair, (0,) * len(pair) if empty is None else empty.metrics[name], strict=True):
            if np.isfinite(x).all():
                gap = np.inf if np.any(nothing) else np.abs(x[0] + x[1] - x[2] - x[3])
                _report_metric(name, gap, np.abs(x).sum(axis=0))


def _report_metric(name: str, gap: Any, scale: Any) -> None:
    if np.any(gap > TOLERANCE * scale):
        notice(
            f"metric {name!r} is no sum over rows, so its value depends on the number of devices and "
            "microbatches; return a sum over rows, or a pair (sum, weight)"
        )


@jax.jit  # once for each shape: in the trial's program it would be compiled for each parameter
def _with_noise(x: jax.Array, number: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # constant arrays get more noise, because effects of several zeros (a head, the last scale of a block) multiply
    noise, spread = math.sqrt(12) * (hashed(0, number, x.shape) - 0.5), jnp.std(x)
    return (x + jnp.where(spread > 0, 0.1 * spread + 0.02, 0.3) * noise).astype(x.dtype)


def hashed(seed: Any, array: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return numbers in [0, 1) by MurmurHash3's finalizer (Appleby 2011): jax.random's compile ten times as long."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    x = x * jnp.uint32(0x9E3779B9) + jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x7FEB352D) + jnp.uint32(array + 1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x >> 8).astype(jnp.float32) / 2**24


def _map_numbered(function: Callable[[int, jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Map a function of a leaf's number and the leaf itself."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(function, range(len(leaves)), leaves))


def moved_rows(batch: Batch, amount: jax.Array) -> Batch:
    """Return rows [sets, count, ...] that all differ if `amount` is 1, also in their means; with 2, not in integers.

    Positive numbers stay positive, and no integer exceeds the largest of its array.
    """
    size = jnp.minimum(amount, 1)

    def moved(number: int, x: jax.Array) -> jax.Array:
        uniform, dtype = hashed(53_999, number, x.shape), x.dtype  # the sums of 4-row masks differ between both sets
        if jnp.issubdtype(x.dtype, jnp.floating):
            largest = jnp.max(jnp.abs(x), initial=0.0)
            sizes = hashed(53_999, 2**30, (*x.shape[:2], *(1,) * (x.ndim - 2)))
            x = x * (1 + size * (uniform - 0.5)) + size * 0.3 * largest * (1 - uniform)
            return (x * (1 + size * (sizes - 0.5))).astype(dtype)
        if x.dtype == jnp.bool_:
            return x ^ ((uniform < 0.3) & (amount > 0))
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return x
        low, high = jnp.minimum(0, jnp.min(x, initial=0)), jnp.max(x, initial=0)
        drawn = ((1 - uniform) * low.astype(jnp.float32) + uniform * (high.astype(jnp.float32) + 1)).astype(x.dtype)
        return jnp.where(amount > 1, x[:1, :1], jnp.where(amount > 0, jnp.minimum(drawn, high), x))

    return _map_numbered(moved, jax.tree.map(jnp.asarray, batch))


def drawn_like(tree: PyTree, shardings: PyTree, *, integers: int = 1, positive: bool = False) -> PyTree:
    """Return sharded arrays with these shapes: integers up to `integers`, other numbers near 0, or 1 if `positive`."""

    def drawn(number: int, like: Any) -> jax.Array:
        shape, dtype = like.shape, like.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return (hashed(0, number, shape) + (0.5 if positive else -0.5)).astype(dtype)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), shape)
        return (hashed(0, number, shape) * (integers + 1)).astype(jnp.int32).astype(dtype)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, traced_dtype(x)), tree)
    return jax.jit(lambda: _map_numbered(drawn, shapes), out_shardings=shardings)()


@cache
def _constant_impl() -> Any:
    return jexr.define_prng_impl(
        key_shape=(1,),
        seed=jnp.atleast_1d,  # it is never called
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=lambda key, width, shape: jnp.full(shape, 0x7333333333333333 >> (64 - width), f"uint{width}"),
        fold_in=lambda key, data: key,
        name="jdp_constant",
        tag="jdpc",
    )


def constant_key() -> jax.Array:
    """Return a key that always draws the same: uniform 0.45, normal -0.13, the identity as permutation."""
    return jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_constant_impl())
