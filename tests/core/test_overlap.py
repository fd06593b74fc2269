"""Steps whose layer loops send while they compute: the same results, and the same bytes, as without."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.core.gradients.jaxprs import every_eqn
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import report
from jdp.models import GPTConfig, build, next_token_loss

GPT = GPTConfig(vocab_size=64, context=8, layers=5, width=32, heads=2, dropout=0.1)


def gpt_loss(model, batch, rng):
    return jdp.Loss(*next_token_loss(model(batch["tokens"], rng=rng), batch["targets"], batch["weights"]))


def gpt_batch(rows):
    tokens = np.random.default_rng(0).integers(0, 64, (2, rows, 8), dtype=np.int32)
    return {"tokens": tokens[0], "targets": tokens[1], "weights": np.ones((rows, 8), np.float32)}


class Counting(nnx.Module):
    """A layer with batch statistics, a counter, and noise of its own."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.noise = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.noise(self.down(jnp.tanh(self.up(self.norm(x)))))


class Nested(nnx.Module):
    """2 × 3 layers in nested loops, which close over a bias, and a head that is no layer."""

    def __init__(self, rngs):
        make = jax.vmap(jax.vmap(lambda key: Counting(nnx.Rngs(key))))
        self.layers = make(jax.random.split(rngs.params(), (2, 3)))
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        bias = jnp.mean(x, axis=-1, keepdims=True)
        inner = partial(jdp.scan_layers, lambda layer, x: layer(x) + 0.1 * bias)
        return self.head(jdp.scan_layers(inner, self.layers, x, remat="full"))


def nested_loss(model, batch, rng):
    return jdp.Loss(jnp.sum(jnp.square(model(batch["x"]))), jnp.float32(batch["x"].shape[0]))


def twice_loss(model, batch, rng):
    """A loss that runs the same layers twice, so that each round would reduce twice."""
    x = jdp.scan_layers(lambda layer, x: layer(x), model.layers, batch["x"])
    return jdp.Loss(jnp.sum(jnp.square(jdp.scan_layers(lambda layer, x: layer(x), model.layers, x))), jnp.float32(16))


class Stack(nnx.Module):
    """Three layers, some of whose parameters are too small to shard."""

    def __init__(self, rngs):
        self.layers = jax.vmap(lambda key: Counting(nnx.Rngs(key)))(jax.random.split(rngs.params(), 3))


def run(init, loss, batch, strategy, overlap, *, mesh=None, **settings):
    plan = jdp.Plan(mesh or jdp.make_mesh(data=8), strategy, min_shard_size=64)
    state = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss, plan, partitioning="manual", overlap=overlap, check_loss=False, **settings)
    scans = sum(eqn.primitive.name == "scan" for eqn in every_eqn(step.jitted.trace(state, batch).jaxpr.jaxpr))
    state, metrics = step(state, batch)
    return jax.device_get((state.params, state.model_state, metrics)), scans


def init_gpt(rng, **changes):
    return build(dataclasses.replace(GPT, **changes), rngs=nnx.Rngs(rng))


CASES = {
    "zero3": (partial(init_gpt, remat=None), gpt_loss, gpt_batch(8), "zero3", {}),
    "zero3 dots": (partial(init_gpt, remat="dots"), gpt_loss, gpt_batch(16), "zero3", {"accumulate": 2}),
    "zero1": (partial(init_gpt, remat="full", tied=True), gpt_loss, gpt_batch(16), "zero1", {"clip_norm": 0.1}),
    "zero1, 4": (partial(init_gpt, remat="dots", tied=True), gpt_loss, gpt_batch(32), "zero1", {"accumulate": 4}),
    "zero2, 2": (partial(init_gpt, remat="full"), gpt_loss, gpt_batch(16), "zero2", {"accumulate": 2}),
    "ddp, 2": (partial(init_gpt, remat="full"), gpt_loss, gpt_batch(16), "ddp", {"accumulate": 2, "clip_norm": 0.1}),
    "zero1, 2, layers used twice": (
        *(lambda rng: Stack(nnx.Rngs(rng)), twice_loss),
        *({"x": np.ones((32, 16), np.float32)}, "zero1", {"accumulate": 2}),
    ),
    "ddp": (partial(init_gpt, remat=None), gpt_loss, gpt_batch(8), "ddp", {}),
    "zero2 nested": (lambda rng: Nested(nnx.Rngs(rng)), nested_loss, {"x": np.ones((16, 16), np.float32)}, "zero2", {}),
    "zero3 nested": (lambda rng: Nested(nnx.Rngs(rng)), nested_loss, {"x": np.ones((16, 16), np.float32)}, "zero3", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_without(case):
    init, loss, batch, strategy, settings = CASES[case]
    (plain, _), (ahead, scans) = (run(init, loss, batch, strategy, overlap, **settings) for overlap in (False, True))
    assert scans
    for one, other in zip(*map(jax.tree.leaves, (plain, ahead)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_with_several_microbatches_layers_are_reduced_one_by_one_and_what_is_sent_stays(strategy):
    devices, rows = target("h100:1x8").devices, 3 * 64
    plan = jdp.Plan(jdp.make_mesh(devices=devices, data=8), strategy, min_shard_size=64)
    init = partial(init_gpt, layers=6, width=64, remat="full", tied=True, dropout=0.0)
    state = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(gpt_loss, plan, precision="bf16", accumulate=3)
    compiled = compile_step(step.lower(state, gpt_batch(rows)))
    made = report(step, state, compiled, "h100:1x8")
    assert made.kept and made.ratio <= 1.001
    rounds = {each.collective.count for each in made.collectives if "reduce" in each.collective.kind}
    assert any(count >= (2 if strategy == "ddp" else 6) for count in rounds)  # in a loop over pairs of layers


def test_matrices_are_multiplied_while_a_layer_is_gathered_and_reduced():
    config = dataclasses.replace(GPT, vocab_size=512, context=256, layers=6, width=512, heads=8, remat="full")
    init = partial(build, config)
    devices = target("h100:1x8").devices
    plan = jdp.Plan(jdp.make_mesh(devices=devices, data=8), "zero3")
    state = jdp.abstract_state(lambda rng: init(rngs=nnx.Rngs(rng)), optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(gpt_loss, plan, precision="bf16", compiler="overlap")
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((64, 256), dtype) for name, dtype in dtypes.items()}
    compiled = compile_step(step.lower(state, batch))
    made = report(step, state, compiled, "h100:1x8")
    assert made.kept and made.ratio <= 1.001
    bodies = [text for text in compiled.text.split("\n\n") if re.search(r"(gather|scatter)-start\(", text)]
    forward, backward = (text.splitlines() for text in bodies if not text.lstrip().startswith("ENTRY"))
    assert all(multiplied_meanwhile(forward)) and len(multiplied_meanwhile(forward)) == 2  # a gather for each layer
    assert sum(multiplied_meanwhile(backward)) > len(multiplied_meanwhile(backward)) / 2  # XLA found some as short


def multiplied_meanwhile(lines):
    """For each collective of a schedule, whether a matrix product stands between its start and its done."""
    ends = {found[1]: i for i, line in enumerate(lines) if (found := re.search(r"-done\(%?([\w.-]+)\)", line))}
    begins = {found[1]: i for i, line in enumerate(lines) if (found := re.search(r"%?([\w.-]+-start[\w.]*) = ", line))}
    return [any("gemm" in line for line in lines[i : ends[name]]) for name, i in begins.items()]
