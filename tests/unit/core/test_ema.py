"""The moving average of the parameters: the recursion itself, laid like the parameters, kept by the guard."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import assert_close, plan_of
from trainings import train as train_on

import jdp

DECAY, STEPS = 0.9, 4
PLAN = plan_of("zero1", min_shard_size=64)


def init(rng):
    return {"w": jax.random.normal(rng, (32, 8)), "b": jnp.ones(8)}


def loss_fn(params, batch, rng):
    return jdp.Loss(((batch["x"] @ params["w"] + params["b"]) ** 2).sum(), jnp.float32(16))


def batch(seed):
    return {"x": np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)}


def train(tx, steps=STEPS, wrt=None):
    """The parameters before the first step and after each, and the last state."""
    state = jdp.init_state(init, tx, PLAN, rng=jax.random.key(0), wrt=wrt)
    step = jdp.make_train_step(loss_fn, PLAN, check_loss=False)
    seen = [jax.device_get(state.params)]
    for seed in range(steps):
        state, _ = step(state, batch(seed))
        seen.append(jax.device_get(state.params))
    return seen, state


@pytest.mark.parametrize("debias", [False, True])
def test_the_average_follows_the_recursion(debias):
    seen, state = train(jdp.with_ema(optax.adam(1e-2), DECAY, debias=debias))
    average = jax.tree.map(np.zeros_like if debias else np.copy, seen[0])
    for params in seen[1:]:
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
    scale = 1 - DECAY**STEPS if debias else 1.0
    found = jdp.ema_params(state)
    assert_close(found.params, jax.tree.map(lambda value: value / scale, average))
    places = {p.path: p for p in PLAN.placements(state)}
    assert places["opt_state/average/w"].rest == places["params/w"].rest != jax.sharding.PartitionSpec()
    assert state.opt_state.average["w"].sharding == state.params["w"].sharding == found.params["w"].sharding
    evaluate = jdp.make_eval_step(loss_fn, PLAN, check_loss=False)
    assert float(evaluate(found, batch(9))["loss"]) != float(evaluate(state, batch(9))["loss"])


def test_only_what_is_trained_is_averaged():
    seen, state = train(jdp.with_ema(optax.sgd(1e-3), DECAY), steps=2, wrt="b")
    assert len(jax.tree.leaves(state.opt_state.average)) == 1
    found = jax.device_get(jdp.ema_params(state).params)
    np.testing.assert_array_equal(found["w"], seen[0]["w"])
    wanted = DECAY * (DECAY * seen[0]["b"] + (1 - DECAY) * seen[1]["b"]) + (1 - DECAY) * seen[2]["b"]
    np.testing.assert_allclose(found["b"], wanted, rtol=1e-6)


def test_the_average_is_float32_whatever_the_parameters_are():
    """In bf16 a decay of 0.999 would not move at all: 2**-8 is the last bit."""
    narrow = lambda rng: jax.tree.map(lambda p: p.astype(jnp.bfloat16), init(rng))  # noqa: E731
    tx, precision = jdp.with_ema(optax.sgd(1e-3), 0.999), jdp.Precision("bf16", "bf16", "bf16")
    _, state, _ = train_on(loss_fn, narrow, tx, PLAN, [batch(0)], precision=precision)
    assert state.opt_state.average["w"].dtype == jnp.float32
    assert jdp.ema_params(state).params["w"].dtype == jnp.bfloat16
