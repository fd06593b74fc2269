"""Optimizer state in host memory: the same bits, in the memory where the plan has them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_states import assert_same_bits

import jdp
from jdp.core.sharding.host_memory import PINNED

LAYERS, WIDTH = 2, 32
MESH = jdp.make_mesh(data=4, devices=jax.devices()[:4])


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rng):
        self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(rng, LAYERS))
        self.head = nnx.Linear(WIDTH, 64, rngs=nnx.Rngs(rng))

    def __call__(self, x):
        return self.head(jdp.scan_layers(lambda layer, x: layer(x), self.layers, x))


def loss(model, batch, rng):
    logits = model(batch["x"].astype(model.head.kernel.dtype)).astype(jnp.float32)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jdp.Loss(nll.sum(), jnp.float32(nll.shape[0]))


def batches():
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=(16, WIDTH)).astype("float32"), "y": random.integers(0, 64, 16)} for _ in range(3)]


def make(strategy, offload, tx=None):
    plan = jdp.Plan(MESH, strategy, offload=offload)
    state = jdp.init_state(Model, tx or optax.adamw(1e-2), plan, rng=jax.random.key(0))
    return state, jdp.make_train_step(loss, plan, precision="bf16", clip_norm=1.0, check_loss=False)


def kinds(tree) -> dict[str, str]:
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in jax.tree.leaves_with_path(tree)}


def test_same_bits_through_steps_and_checkpoints(tmp_path):
    """Three steps with and without; saved after two, and restored onto the other plan."""
    state, step = make("zero3", None)
    off, off_step = make("zero3", "optimizer")
    before = kinds(off)
    first, second, third = batches()
    for batch in (first, second):
        state, metrics = step(state, batch)
        off, off_metrics = off_step(off, batch)
        assert float(metrics["loss"]) == float(off_metrics["loss"])
    assert kinds(off) == before
    assert before[".params['head']['kernel']"] == before[".step"] == "device"
    assert all(kind == PINNED for path, kind in before.items() if ".mu" in path and "kernel" in path)
    assert_same_bits(state, off)

    jdp.save(tmp_path / "device", state)
    jdp.save(tmp_path / "host", off)
    onto_host = jdp.restore(tmp_path / "device", off)
    onto_device = jdp.restore(tmp_path / "host", state)
    assert kinds(onto_host) == before and set(kinds(onto_device).values()) == {"device"}
    assert_same_bits(onto_host, onto_device)
    state, metrics = step(onto_device, third)
    off, off_metrics = off_step(onto_host, third)
    assert float(metrics["loss"]) == float(off_metrics["loss"])
    assert_same_bits(state, off)
    assert_same_bits(nnx.state(state.model), nnx.state(off.model))
    assert set(kinds(nnx.state(off.model)).values()) == {"device"}
    evaluate, off_evaluate = (jdp.make_eval_step(loss, of.plan, check_loss=False) for of in (step, off_step))
    assert float(evaluate(state, third)["loss"]) == float(off_evaluate(off, third)["loss"])


@pytest.mark.rest
def test_an_optimizer_that_mixes_leaves_and_parameters():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2))
    ends = [step(state, batches()[0])[0] for state, step in (make("zero1", off, tx) for off in (None, "optimizer"))]
    assert_same_bits(*ends)


def test_plan_says_what_rests_on_the_host():
    state, step = make("zero1", "optimizer")
    placements = {p.path: p for p in step.plan.placements(state)}
    head = placements["opt_state/0/mu/head/kernel"]
    assert head.on_host and head.reason.endswith("in host memory") and head.bytes_per_device == 4 * WIDTH * 64 // 4
    assert placements["params/head/kernel"].memory == placements["opt_state/0/mu/head/bias"].memory == "device"
    assert str(step.plan).endswith("gathered once a step; optimizer state in host memory")
    assert not any(p.on_host for p in replace(step.plan, offload=None).placements(state))
