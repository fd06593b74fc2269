"""BatchNorm over many devices: the parameters and the running statistics of one device, in both partitionings.

A residual net in small: a convolution, `nnx.BatchNorm`, a shortcut. Statistics are taken over the rows of all devices:
under "auto" because arrays are whole, under "manual" because jdp hands the norms the mesh's axes. float32 sums in
another order part by 1e-7 of their terms; a norm divides by a deviation, and four steps of momentum add up: hence 1e-4.
Statistics of a device's own two rows would be off by tens of percent.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

ROWS, SIZE, CHANNELS, CLASSES = 16, 4, 8, 3
TX = optax.sgd(0.05, momentum=0.9)


class Residual(nnx.Module):
    def __init__(self, *, rngs):
        self.stem = nnx.Conv(2, CHANNELS, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(CHANNELS, momentum=0.8, rngs=rngs)
        self.linear = nnx.Linear(CHANNELS, CHANNELS, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(CHANNELS, momentum=0.8, rngs=rngs)])
        self.head = nnx.Linear(CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.stem(x)))
        x = nnx.relu(x + self.norms[0](self.linear(x)))
        return self.head(x.mean((1, 2)))


def init(rng):
    return Residual(rngs=nnx.Rngs(rng))


def loss_fn(model, batch, rng):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return jdp.Loss(nll.sum(), jnp.float32(nll.shape[0]))


def batches(steps=4):
    """The rows drift, so that devices and microbatches see different statistics."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        x = random.normal(size=(ROWS, SIZE, SIZE, 2)) + np.linspace(-2, 2, ROWS)[:, None, None, None]
        yield {"x": x.astype(np.float32), "y": random.integers(0, CLASSES, ROWS)}


@dataclasses.dataclass(frozen=True)
class Run:
    first: dict  # of the first step: the loss, and the first norm's statistics after it
    last: tuple  # parameters, statistics and loss of the last one
    state: jdp.TrainState
    step: jdp.Step


@functools.cache
def initial():
    """The initial state on one device; it is the same on any mesh (`test_init`), so each plan lays out this one."""
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1]), "ddp")
    return jdp.init_state(init, TX, plan, rng=jax.random.key(0))


@functools.cache
def train(strategy, partitioning, devices=8, accumulate=1, axes=(("data", -1),)):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices], **dict(axes)), strategy, min_shard_size=64)
    state = jdp.place(initial(), plan)
    # `initial` shares its memory
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, accumulate=accumulate, donate=False)
    seen = []
    for batch in batches():
        state, metrics = step(state, batch)
        seen.append(jax.device_get((state.params, state.model_state, metrics["loss"])))
    return Run({**seen[0][1]["norm1"], "loss": seen[0][2]}, seen[-1], state, step)


def assert_same(got, wanted):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


WAYS = [("zero3", "auto"), ("ddp", "manual"), ("zero2", "manual"), ("zero3", "manual")]


@pytest.mark.parametrize(("strategy", "partitioning"), WAYS)
def test_weights_and_running_statistics_are_those_of_one_device(strategy, partitioning):
    """zero1, below: under manual with replicas, and in both with microbatches. Under auto a norm sees whole arrays
    whatever the strategy is."""
    assert_same(train(strategy, partitioning).last, train("ddp", "auto", devices=1).last)


def test_statistics_are_taken_over_replicas_too():
    got = train("zero1", "manual", axes=(("replica", 2), ("data", 4)))
    assert_same(got.last, train("ddp", "auto", devices=1).last)


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_with_microbatches_the_statistics_are_each_microbatchs(partitioning):
    """The same as on one device with as many microbatches, and not as with one."""
    chosen = None if partitioning == "manual" else partitioning  # jdp's own choice, below
    got, alone = train("zero1", chosen, accumulate=2), train("ddp", "auto", devices=1, accumulate=2)
    assert_same(got.last, alone.last)
    assert abs(got.first["loss"] - train("ddp", "auto", devices=1).first["loss"]) > 1e-3


def test_an_evaluation_uses_the_running_averages_in_both_partitionings():
    run = train("zero3", "auto")
    state, plan = run.state, run.step.plan
    losses = [
        float(jdp.make_eval_step(loss_fn, plan, partitioning=view)(state, next(batches()))["loss"])
        for view in ("auto", "manual")
    ]
    model = state.model
    logits = jax.jit(lambda x: model(x))(next(batches())["x"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, next(batches())["y"])
    np.testing.assert_allclose(losses, float(nll.mean()), rtol=1e-5)
