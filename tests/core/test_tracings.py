"""How often the first step calls the user's Python: to see what it returns and draws, and to compile it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

ROWS = 64
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def init(_):
    return {"layers": {"w": jnp.ones((2, 16, 16)) / 16, "b": jnp.zeros((2, 16))}, "head": jnp.ones((16, 8))}


def counted():
    """A loss of a model with a layer loop and dropout, and the numbers of rows that it was called with."""
    calls = []

    def loss(params, batch, rng):
        calls.append(batch["x"].shape[0])
        x = jdp.scan_layers(lambda layer, x: jnp.tanh(x @ layer["w"] + layer["b"]), params["layers"], batch["x"])
        if rng is not None:
            x *= jax.random.bernoulli(rng, 0.9, x.shape)
        error = (x @ params["head"] - batch["y"]).astype(jnp.float32) ** 2
        return jdp.Loss(error.sum(), error.shape[0], {"worst": (error.sum(), 1.0)})

    return loss, calls


def batch():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, 16)).astype("f"), "y": random.normal(size=(ROWS, 8)).astype("f")}


@pytest.mark.parametrize("partitioning", [None, "auto", "manual"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_first_step_calls_the_loss_a_few_times(strategy, accumulate, partitioning):
    """For its form on all rows; under manual on a device's rows, and on twice as many for its draws; to see what layer
    loops send; and to compile it, a scan of microbatches twice, once for what it carries."""
    plan = jdp.Plan(jdp.make_mesh(data=8), strategy, min_shard_size=1)
    state = jdp.abstract_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
    loss, calls = counted()
    step = jdp.make_train_step(loss, plan, accumulate=accumulate, partitioning=partitioning)
    step.lower(state, shapes_of(batch()))
    rows = ROWS // accumulate // (8 if step.partitioning == "manual" else 1)
    assert {*calls} <= {ROWS // accumulate, rows, 2 * rows} and len(calls) <= 4 + 2 * accumulate


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_step_calls_the_loss_twice(accumulate):
    plan = jdp.Plan(jdp.make_mesh(data=8), "zero3", min_shard_size=1)
    state = jdp.abstract_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
    loss, calls = counted()
    jdp.make_eval_step(loss, plan, accumulate=accumulate).lower(state, shapes_of(batch()))
    assert calls == [ROWS // accumulate] * 2
