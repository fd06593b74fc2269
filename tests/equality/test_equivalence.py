"""Every strategy, both partitionings, one microbatch or four: a GPT and an MLP end as on one device.

The reference is one device, `ddp`, one microbatch. Dropout is on and the token weights are uneven, with whole rows of
zero: a mean of means, a mask that depends on the shard, or a gradient synchronised twice would show at once.

Bounds. float32 sums over devices and microbatches run in another order, so a gradient differs by some 1e-7 of the
largest term. AdamW divides by the gradient's own size, which makes that a relative error of each *update*: the noise of
an element whose gradient is `s` times smaller than the terms it cancelled from is 1e-7 / s. With eps = 1e-6 and
learning rate 3e-3 the largest seen over all cases is 1e-6 in a loss of 4 (two units in the last place) and 6e-6 in a
weight. The bounds leave a factor of five for other compilers; a mask or a weight that is off shows at 1e-2.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from trainings import plan_of

import jdp
from jdp.models import GPTConfig, MLPConfig, build

ROWS, LENGTH, STEPS = 32, 8, 6
LOSS_BOUND, WEIGHT_BOUND = 5e-6, 3e-5
# Untied, with more words than a device has tokens: the embedding's rows are exchanged (`jdp.core.lookup`).
GPT = GPTConfig(vocab_size=64, context=LENGTH, layers=3, width=32, heads=4, kv_heads=2, tied=False, dropout=0.1)
MODELS = {
    "gpt-scanned": GPT,
    "qwen": dataclasses.replace(
        GPT, scan=False, layers=2, tied=True, head_dim=6, qkv_bias=True, qk_norm=True, window=3
    ),
    "mlp": MLPConfig(features_in=16, hidden=(64,), features_out=8, dropout=0.1),
}
CASES = (
    *(("mlp", "ddp", "auto", 1), ("mlp", "ddp", "manual", 4), ("mlp", "zero1", "auto", 4)),
    *(("mlp", "zero1", "manual", 1), ("mlp", "zero2", "auto", 1), ("mlp", "zero2", "manual", 4)),
    *(("mlp", "zero3", "auto", 4), ("mlp", "zero3", "manual", 1)),
    *(("gpt-scanned", "zero2", "auto", 4), ("gpt-scanned", "zero3", "manual", 4), ("qwen", "zero3", "manual", 1)),
)
"""`test_training_properties` draws the other products of settings."""


def gpt_loss(model, batch, rng):
    return jdp.Loss(*model.loss(batch["x"], batch["y"], batch["weight"], rng=rng))


def mlp_loss(model, batch, rng):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], rng=rng), batch["y"])
    return jdp.Loss((nll * batch["weight"]).sum(), batch["weight"].sum())


def batches(name):
    """Six batches; a row's weights are zero with probability 1/4, else random."""
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        if name == "mlp":
            x, y = random.normal(size=(ROWS, 16)).astype(np.float32), random.integers(0, 8, ROWS)
            weight = random.random(ROWS)
        else:
            x, y = random.integers(0, 64, (2, ROWS, LENGTH))
            weight = random.random((ROWS, LENGTH))
        weight[random.random(ROWS) < 0.25] = 0
        yield {"x": x, "y": y, "weight": weight.astype(np.float32)}


@functools.cache
def initial(name):
    """The initial state on one device; it is the same on any mesh (`test_init`), so each plan lays out this one."""
    init, tx = lambda rng: build(MODELS[name], rngs=nnx.Rngs(rng)), optax.adamw(3e-3, eps=1e-6)
    return jdp.init_state(init, tx, plan_of("ddp", 1), rng=jax.random.key(7))


def train(name, strategy, partitioning, accumulate, devices, precision="fp32"):
    plan = plan_of(strategy, devices, min_shard_size=64)
    state = jdp.place(initial(name), plan)
    settings = {"accumulate": accumulate, "partitioning": partitioning, "precision": precision, "clip_norm": 1.0}
    settings["donate"] = False  # the first step's state shares memory with `initial`
    step = jdp.make_train_step(mlp_loss if name == "mlp" else gpt_loss, plan, **settings, check_loss=False)
    losses = []
    for batch in batches(name):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    return np.array(losses), jax.device_get(state.params)


@functools.cache
def reference(name):
    return train(name, "ddp", "auto", 1, devices=1)


@pytest.mark.parametrize(("name", "strategy", "partitioning", "accumulate"), CASES)
@pytest.mark.default_ids("mlp-*", "gpt-scanned-zero3-manual-4")
def test_equals_one_device(name, strategy, partitioning, accumulate):
    losses, params = train(name, strategy, partitioning, accumulate, devices=8)
    expected_losses, expected_params = reference(name)
    assert np.abs(losses - expected_losses).max() <= LOSS_BOUND
    for (path, got), want in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected_params), strict=True):
        assert np.abs(got - want).max() <= WEIGHT_BOUND, jax.tree_util.keystr(path)


def test_bf16_stays_close():
    """bf16 compute over fp32 master weights: losses within bf16's rounding (2**-8) of the fp32 run's, relatively."""
    losses, _ = train("mlp", "zero3", "manual", 1, devices=8, precision="bf16")
    expected, _ = reference("mlp")
    np.testing.assert_allclose(losses, expected, rtol=2**-8)
    assert np.abs(losses - expected).max() > LOSS_BOUND  # it did compute in bf16
