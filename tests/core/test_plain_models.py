"""zero3 for a loss without layer loops: the backward pass gathers its weights again, and computes little else again."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_layers import init_layers, tokens_of

import jdp
from jdp.core.reading.jaxprs import every_eqn
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.models import next_token_loss


def init(rng, layers=4, **sizes):
    params = init_layers(rng, layers, **sizes)
    stacked = params.pop("layers")
    return params | {"layers": [jax.tree.map(lambda x: x[i], stacked) for i in range(layers)]}  # noqa: B023


def loss_fn(params, batch, rng):
    x = params["embed"][batch["tokens"]]
    for layer in params["layers"]:
        x += jax.nn.silu(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return jdp.Loss(*next_token_loss((x * params["scale"]) @ params["embed"].T, batch["targets"], batch["weights"]))


def step_of(loss, strategy, devices, init=init, **settings):
    plan = jdp.Plan(jdp.make_mesh(data=len(devices), devices=devices), strategy, min_shard_size=64)
    state = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss, plan, check_loss=False, **settings), plan, state


def trained(strategy, devices, **settings):
    step, plan, _ = step_of(loss_fn, strategy, devices, **settings)
    state = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    state, metrics = step(state, tokens_of(16))
    return jax.device_get((state.params, metrics))


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_trains_as_one_device(partitioning, accumulate):
    one = trained("ddp", jax.devices()[:1])
    several = trained("zero3", jax.devices()[:4], partitioning=partitioning, accumulate=accumulate)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), several, one)


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_it_holds_less_than_zero2(partitioning):
    wide = partial(init, layers=8, width=1024, hidden=4096)
    settings = {"precision": "bf16", "partitioning": partitioning, "compiler": {"xla_gpu_enable_triton_gemm": False}}
    batch = {name: jax.ShapeDtypeStruct((64, 256), x.dtype) for name, x in tokens_of(1).items()}
    held = {}
    for strategy in ("zero2", "zero3"):
        step, _, state = step_of(loss_fn, strategy, target("h100:1x8").devices, wide, **settings)
        held[strategy] = compile_step(step.lower(state, batch)).temp_bytes
    assert held["zero3"] < 0.85 * held["zero2"], held


@jax.custom_vjp
def doubled(x):
    return 2 * jnp.sort(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def costly_loss(params, batch, rng):
    """Has a convolution, a derivative of its own, a statistic of all devices, and the rows of all."""
    x = jax.lax.conv(batch["x"] @ params["w"], params["conv"], (1,), "SAME")
    x = jnp.tanh(doubled(x) - jax.lax.pmean(jnp.tanh(x).mean(), "data"))
    rows, _ = jdp.gather_rows(x.mean((1, 2)))
    return jdp.Loss(jnp.sum(x**2) + jnp.sum(jnp.tanh(rows) * rows), jnp.float32(len(x)))


def test_what_is_costly_is_computed_once():
    init = lambda _: {"w": jnp.ones((16, 16)), "conv": jnp.ones((4, 4, 3))}  # noqa: E731
    batch = {"x": jax.ShapeDtypeStruct((16, 4, 16), jnp.float32)}
    counts = {}
    for strategy in ("zero2", "zero3"):
        step, _, state = step_of(costly_loss, strategy, jax.devices()[:4], init, partitioning="manual")
        traced = step.jitted.trace(state, batch).jaxpr.jaxpr
        live, _ = jax.interpreters.partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        counts[strategy] = Counter(eqn.primitive.name for eqn in every_eqn(live))
    for name in ("conv_general_dilated", "sort", "psum", "dot_general"):
        assert 0 < counts["zero3"][name] <= counts["zero2"][name]
    assert counts["zero3"]["all_gather"] == counts["zero2"]["all_gather"]


def test_what_a_loss_prints_is_printed_once(capfd):
    def prints(params, batch, rng):
        jax.debug.print("once {}", params["scale"].sum())
        return loss_fn(params, batch, rng)

    devices = jax.devices()[:2]
    step, plan, _ = step_of(prints, "zero3", devices, partitioning="manual")
    state = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step(state, tokens_of(16))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == len(devices)
