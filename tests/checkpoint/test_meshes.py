"""A run goes on with the same losses, bit for bit, on another number of devices than it was saved on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.checkpoint import check

pytestmark = pytest.mark.faults

ROWS, STEPS = 12, 4  # rows go over 1, 2, 3 and 4 devices
TX = optax.sgd(2**-6, momentum=0.5)


def small_integers(seed, *shape):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def batch(step):
    """Small integers and powers of two: every sum is exact, in whichever order the devices add."""
    weights = np.array([1] * 8 + [2] * 4, np.float32)  # 16 in all
    return {"x": small_integers(step, ROWS, 12), "weights": weights}


def init(rng):
    return {"w": jnp.asarray(small_integers(50, 12, 12)), "v": jnp.asarray(small_integers(51, 12))}


def loss_fn(params, batch, rng):
    rows = (batch["x"] @ params["w"] + params["v"]).sum(axis=-1)  # linear: squares would need more bits than there are
    return jdp.Loss((rows * batch["weights"]).sum(), batch["weights"].sum())


@functools.cache
def made(strategy, count):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:count], data=count), strategy, min_shard_size=1)
    return plan, jdp.make_train_step(loss_fn, plan, check_loss=False)


def train(state, step, begin, end):
    losses = []
    for i in range(begin, end):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_the_losses_go_on_where_they_were(strategy, tmp_path):
    """ZeRO-1, 2, 3, saved on 4 or 2 devices, restored onto 2, 3, 4 or 1."""
    _, want = train(state_on(strategy, 1), made(strategy, 1)[1], 0, STEPS)
    assert len(set(want)) == STEPS and all(np.isfinite(want))
    for before, after in ((4, 2), (2, 4), (4, 3), (4, 1)):
        _, step = made(strategy, before)
        state, losses = train(state_on(strategy, before), step, 0, STEPS // 2)
        with jdp.Checkpoints(tmp_path / f"{before} to {after}") as checkpoints:
            checkpoints.save(state)
            plan, step = made(strategy, after)
            state, _ = checkpoints.restore(jdp.abstract_state(init, TX, plan, rng=jax.random.key(0)))
        _, rest = train(state, step, STEPS // 2, STEPS)
        assert losses + rest == want, (before, after)
        assert [found.status for found in check(tmp_path / f"{before} to {after}")] == ["whole"]


def state_on(strategy, count):
    return jdp.init_state(init, TX, made(strategy, count)[0], rng=jax.random.key(0))
