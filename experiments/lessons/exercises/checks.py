"""The check of each exercise: its numbers, and the collectives of its compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import P

import jdp
from jdp.foresight.program.collectives import collectives, traffic

DATA = P("data")


def _run(function: Callable[..., Any], *given: np.ndarray) -> tuple[Any, dict[str, int], int]:
    """Run on every device; return the results [device, ...], the payload by kind, and the number of collectives."""
    mesh = jdp.make_mesh(data=-1)
    each = lambda *own: jax.tree.map(lambda leaf: leaf[None], function(*(leaf[0] for leaf in own)))  # noqa: E731
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=DATA, out_specs=DATA, check_vma=False))
    sent = collectives(run.lower(*given).compile().as_text())
    return jax.device_get(run(*given)), traffic(sent), len(sent)


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(jax.device_count(), *shape)).astype(np.float32)


def _equal(found: Any, right: Any, what: str) -> None:
    np.testing.assert_allclose(found, np.broadcast_to(right, np.shape(found)), atol=1e-5, err_msg=what)


def broadcast(function: Callable[..., Any]) -> None:
    own = _numbers(3)
    found, _, count = _run(function, own)
    _equal(found, own[0], "every device must have the array of device 0")
    assert count == 1, f"one psum; the program has {count} collectives"


def mean_gradient(function: Callable[..., Any]) -> None:
    summed, rows = _numbers(3), 1.0 + np.arange(jax.device_count(), dtype=np.float32)
    found, *_ = _run(function, summed, rows)
    _equal(found, summed.sum(0) / rows.sum(), "the gradient of the mean over all rows")


def ring(function: Callable[..., Any]) -> None:
    n = jax.device_count()
    own = _numbers(n)
    found, sent, count = _run(function, own)
    _equal(found, own.sum(0), "the sum of all arrays, on every device")
    assert (list(sent), count) == (["collective-permute"], 2 * (n - 1)), f"2(N-1) sends; given {count}: {sent}"


def contracted(function: Callable[..., Any]) -> None:
    n = jax.device_count()
    x, w = _numbers(2, 3), _numbers(3, 4)
    found, sent, _ = _run(function, x, w)
    _equal(found, np.einsum("nbd,ndf->bf", x, w), "the whole product, on every device")
    assert sent == ({"all-reduce": 4 * 2 * 4} if n > 1 else {}), f"one all-reduce of the product; given {sent}"


def last_ends(function: Callable[..., Any]) -> None:
    assert function([1, 2, 3], [2, 2, 2]) == 7, "buckets are ready early: each waits for the one before"
    assert function([1, 5, 9], [2, 2, 2]) == 11, "buckets are ready late: each is sent at once"


def buckets(function: Callable[..., Any]) -> None:
    assert function([4, 4, 4, 4], 8) == [[3, 2], [1, 0]], "two of four in each, the last first"
    assert function([1, 9, 3], 8) == [[2], [1], [0]], "a tensor above the limit is a bucket of its own"
    assert function([2, 3], 100) == [[1, 0]], "one for all"


def sends_over_computes(function: Callable[..., Any]) -> None:
    found = function(1026, 8, 0.4 * 989e12, 450e9)
    assert abs(found - 1) < 1e-3, f"1026 rows per device hide an all-reduce of 8 H100s at 40 % of peak; given {found}"


def zero1_update(function: Callable[..., Any]) -> None:
    n = jax.device_count()
    weights, gradient, moment = np.tile(_numbers(2 * n)[:1], (n, 1)), _numbers(2 * n), _numbers(2)
    (found, kept), sent, _ = _run(function, weights, gradient, moment)
    right = 0.9 * moment.ravel() + gradient.sum(0)
    _equal(np.ravel(kept), right, "each device's part of the moment")
    _equal(found, weights[0] - 0.1 * right, "the weights, whole on every device")
    assert sent == {"reduce-scatter": 8 * n, "all-gather": 8 * n}, f"a reduce-scatter and an all-gather; given {sent}"


def efficiency(function: Callable[..., Any]) -> None:
    assert function(0, 5, 8) == 1, "nothing is repeated"
    assert abs(function(1, 9, 9) - 10 / 18) < 1e-9, "1 s repeated, 9 s divided by 9: 2 s instead of 10"


_ALL = (broadcast, mean_gradient, ring, contracted, last_ends, buckets, sends_over_computes, zero1_update, efficiency)
CHECKS = {each.__name__: each for each in _ALL}
