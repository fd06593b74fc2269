"""Optimizers of a user's own that mix elements: preconditioners of each side, in the basis of eigenvectors or by it."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from matrix_runs import assert_kept, assert_trains_as_one_device, plan_of, start


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


@pytest.mark.parametrize(
    ("make", "strategy", "devices"),
    [(shampoo, "zero1", 8), (soap, "zero3", 8), (soap, "zero1", 3), (shampoo, "zero2", 3), (shampoo, "ddp", 8)],
)
def test_preconditioners_of_a_users_own(make, strategy, devices):
    shapes = {"u": (6, 16, 24), "one": (32, 24), "two": (32, 24), "odd": (11, 13)}
    plan, tx = plan_of(strategy, devices), make()
    assert_kept(*start(plan, shapes, tx))
    whole = {*shapes} - ({"odd"} if strategy == "ddp" else set())
    assert_trains_as_one_device(shapes, tx, plan, whole, state_bound=5e-5)  # squares up to 20, of which 1e-6 is 2e-5
