"""Parameters below `Plan.min_shard_size`: all-reduced whole by plan, which a ZeRO contract counts and allows."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import report as written

pytestmark = pytest.mark.aot


# 12 kernels [24, 24] and as many biases, 7,200 parameters, and a kernel that is sharded.

LAYERS, SIDE = 12, 24


@functools.cache
def small_leaves(strategy, **settings):
    """The report of a model most of whose leaves are below min_shard_size."""
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:1x8").devices), strategy)

    def init(rng):
        layers = {f"layer{i}": {"w": jnp.eye(SIDE), "b": jnp.zeros(SIDE)} for i in range(LAYERS)}
        return layers | {"last": jnp.zeros((SIDE, 64))}

    def loss(params, batch, rng):
        x = batch["x"]
        for i in range(LAYERS):
            x = jnp.tanh(x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"])
        y = x @ params["last"]
        return jdp.Loss(jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(y.shape[0]))

    state = jdp.abstract_state(init, optax.sgd(0.1, momentum=0.9), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss, plan, **settings, check_loss=False)
    compiled = compile_step(step.lower(state, {"x": jax.ShapeDtypeStruct((96, SIDE), "float32")}))
    return written(step, state, compiled, "h100:1x8")


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_leaves_below_min_shard_size_are_all_reduced(strategy):
    report = small_leaves(strategy, partitioning="manual")
    payload = 4 * LAYERS * (SIDE * SIDE + SIDE)
    assert report.theory.unsharded.payload_bytes == payload
    assert report.kept and report.breaches == (), report
    assert report.ratio == pytest.approx(1, abs=0.01)  # the rest are scalars
    assert report.theory.parameters == payload // 4 + 24 * 64  # of all
    [note] = [note for note in report.notes if "all-reduced whole" in note]
    assert note.startswith(
        "24 parameters of fewer than 1024 elements are all-reduced whole: 28.1 KiB a step, as planned"
    )


def test_planned_all_reduces_stay_within_the_total():
    """In bf16 a gather takes half of what an all-reduce's second half takes: so small a model is better off in ddp."""
    report = small_leaves("zero1", partitioning="manual", precision="bf16")
    assert not report.kept and report.ratio > 1.02
    [breach] = report.breaches
    assert "are all-reduced whole by plan: 49.2 KiB" in breach  # 7/4 of the payload
    assert "ddp" in breach
