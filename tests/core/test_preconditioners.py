"""Optimizers that multiply matrices, of a user's own or optax': the same as on one device, and reported."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from judged import judged
from matrix_runs import LAST, assert_trains_as_one_device, batches, plan_of, start

import jdp
from jdp.base import notices


def of_matrices(init_one, update_one, rate):
    """An optimizer of a function of one matrix; layers by `jax.vmap`."""

    def init(params):
        by_layer = jax.tree.map(lambda p: (jax.vmap(init_one) if p.ndim > 2 else init_one)(p), params)
        return {"count": jnp.zeros((), jnp.int32), "own": by_layer}

    def update(grads, state, params=None):
        count, tree = state["count"] + 1, jax.tree.structure(grads)
        one = functools.partial(update_one, count)
        own = zip(tree.flatten_up_to(grads), tree.flatten_up_to(state["own"]), strict=True)
        made = [(jax.vmap(one) if g.ndim > 2 else one)(g, s) for g, s in own]
        updates, states = (tree.unflatten(each) for each in zip(*made, strict=True))
        return jax.tree.map(lambda x: -rate * x, updates), {"count": count, "own": states}

    return optax.GradientTransformation(init, update)


def shampoo():
    def root(x):
        sizes, basis = jnp.linalg.eigh(x)
        return (basis * jnp.maximum(sizes, 1e-4) ** -0.25) @ basis.T

    def init(p):
        return {"m": jnp.zeros_like(p), "left": 1e-4 * jnp.eye(p.shape[0]), "right": 1e-4 * jnp.eye(p.shape[1])}

    def update(count, g, s):
        m = 0.9 * s["m"] + 0.1 * g
        left, right = 0.95 * s["left"] + 0.05 * m @ m.T, 0.95 * s["right"] + 0.05 * m.T @ m
        return root(left) @ m @ root(right), {"m": m, "left": left, "right": right}

    return of_matrices(init, update, 1e-2)


def soap():
    def init(p):
        sides = {"L": jnp.eye(p.shape[0]), "R": jnp.eye(p.shape[1])}
        return {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p), **sides, **{f"Q{k}": x for k, x in sides.items()}}

    def update(count, g, s):
        m = 0.9 * s["m"] + 0.1 * g
        turned, mean = (s["QL"].T @ x @ s["QR"] for x in (g, m))
        v = 0.95 * s["v"] + 0.05 * turned**2
        change = s["QL"] @ (mean / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)) @ s["QR"].T
        left, right = 0.95 * s["L"] + 0.05 * g @ g.T, 0.95 * s["R"] + 0.05 * g.T @ g
        fresh = lambda: (jnp.linalg.qr(left @ s["QL"])[0], jnp.linalg.qr(right @ s["QR"])[0])  # noqa: E731
        ql, qr = jax.lax.cond(count % 2 == 0, fresh, lambda: (s["QL"], s["QR"]))
        return change, {"m": m, "v": v, "L": left, "R": right, "QL": ql, "QR": qr}

    return of_matrices(init, update, 1e-3)


def naive_muon(*names):
    numbers = dict.fromkeys(names or ("u", "one", "two", "odd"), LAST)
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)


@pytest.mark.parametrize(
    ("make", "strategy", "devices"),
    [
        (shampoo, "zero1", 8),
        (soap, "zero3", 8),
        (shampoo, "zero2", 3),
        (shampoo, "ddp", 8),
        (naive_muon, "zero3", 8),
        (lambda: optax.MultiSteps(naive_muon(), 2), "zero1", 8),
    ],
    ids=["shampoo-zero1", "soap-zero3", "shampoo-zero2", "shampoo-ddp", "muon-zero3", "MultiSteps-zero1"],
)
def test_an_optimizer_of_matrices_trains_as_on_one_device(make, strategy, devices):
    shapes, tx = {"u": (6, 16, 24), "one": (32, 24), "two": (32, 24), "odd": (11, 13)}, make()
    assert_trains_as_one_device(shapes, tx, plan_of(strategy, devices), state_bound=5e-5)  # squares up to 20


def test_its_cost_is_reported_once_with_the_leaf_and_the_bytes(caplog, monkeypatch):
    """Of the sharded leaves alone; and nothing of `jdp.muon`, of norms and factors, or under ddp."""
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    shapes = {"u": (6, 16, 24), "one": (32, 24), "odd": (11, 13), "bias": (4, 4)}
    is_matrix = lambda params: jax.tree.map(lambda x: LAST if x.ndim > 2 else None, params)  # noqa: E731
    for tx in (
        jdp.muon(1e-2),
        jdp.muon(1e-2, muon_weight_dimension_numbers=is_matrix),
        optax.adafactor(),
        optax.lamb(1),
    ):
        start(plan_of("zero3"), shapes, tx)
    start(plan_of("ddp"), shapes, optax.contrib.muon(1e-2))
    assert not [line for line in caplog.messages if "products of" in line]
    for _ in range(2):
        start(plan_of("zero3"), shapes, shampoo())
    [said] = [line for line in caplog.messages if "products of" in line]
    assert said == (
        "the optimizer's update takes matrix or inner products of u [6, 16, 24] and 1 more, 12 KiB that zero3 shards: "
        "XLA gathers them or sums partial products, beside what zero3 promises; jdp.verify counts it"
    )


def test_verify_counts_what_it_sends():
    plan = plan_of("zero1")
    state, step = start(plan, {"u": (6, 16, 24), "one": (32, 24)}, naive_muon("u", "one"))
    report = judged(step, state, batches(1)[0])
    assert not report.kept
    assert any("the optimizer's update computes with complete arrays" in breach for breach in report.breaches)
