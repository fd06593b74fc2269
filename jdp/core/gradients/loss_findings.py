"""The findings of a trial: each function compares the sums of its calls, and describes a difference."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jdp.base.notices import notice
from jdp.core.gradients.loss_call import Sums

TOLERANCE = 1e-5
"""Relative to the sum of absolute values. Rows keep their places, so only the last sum over rows rounds differently."""


def exchanged_rows(count: int) -> np.ndarray:
    """Return which of `count` rows are exchanged in each call, bool [calls, rows]: none, all, and half of them.

    Each bit of the rows' numbers gives two halves, so any two rows are in different halves at least once.
    """
    splits = [np.arange(count) >> bit & 1 == 1 for bit in range(max(1, (count - 1).bit_length()))]
    return np.array([np.zeros(count, bool), np.ones(count, bool), *(half for s in splits for half in (s, ~s))])


def without_rows(empty: Sums) -> str | None:
    if empty.weight:
        return f"without rows Loss.weight is {empty.weight:.6g}, not 0: return jdp.Loss(total, mask.sum()), or the rows"
    if np.isfinite(empty.total) and empty.total:
        penalty = "multiply a penalty by the weight: jdp.Loss(total + penalty * weight, weight)"
        return f"without rows Loss.total is {empty.total:.6g}, not 0: {penalty}"
    return None


def of_rows_twice(calls: tuple[Sums, Sums], count: int) -> str | None:
    """Describe sums that do not double with the rows, and report metrics that do not."""
    for name in ("total", "weight"):
        once, twice = (float(getattr(sums, name)) for sums in calls)
        if np.isfinite([once, twice]).all() and abs(twice - 2 * once) > TOLERANCE * (abs(twice) + 2 * abs(once)):
            return f"Loss.{name} is {once:.6g} of {count} rows and {twice:.6g} of the same rows twice"
    for name, pair in calls[0].metrics.items():
        for once, twice in zip(pair, calls[1].metrics[name], strict=True):
            _report_metric(name, np.abs(twice - 2 * once), np.abs(twice) + 2 * np.abs(once))
    return None


def of_halves(calls: Sums, numbers: np.ndarray) -> str | None:
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


def of_averages(leaves: list[tuple[str, Any, Any, Any, Any]], count: int) -> str | None:
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


def of_order(calls: Sums) -> str | None:
    """Compare rows with the same rows in the opposite order."""
    for name, f in (("total", calls.total), ("weight", calls.weight)):
        if abs(f[0] - f[-1]) > 1e-3 * (abs(f[0]) + abs(f[-1])):
            return f"Loss.{name} is {f[0]:.6g} of some rows and {f[-1]:.6g} of the same rows in the opposite order"
    return None


def report_metrics(calls: Sums, empty: Sums | None) -> None:
    """Report once each metric that is no sum over rows: its value depends on how many calls there are."""
    for name, pair in calls.metrics.items():
        for x, nothing in zip(pair, (0, 0) if empty is None else empty.metrics[name], strict=True):
            if np.isfinite(x).all():
                gap = np.inf if np.any(nothing) else np.abs(x[0] + x[1] - x[2] - x[3])
                _report_metric(name, gap, np.abs(x).sum(axis=0))


def _report_metric(name: str, gap: Any, scale: Any) -> None:
    if np.any(gap > TOLERANCE * scale):
        notice(
            f"metric {name!r} is no sum over rows, so its value depends on the number of devices and "
            "microbatches; return a sum over rows, or a pair (sum, weight)"
        )
