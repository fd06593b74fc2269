"""What zero3 gathers, at the top or by layer, in programs that XLA compiled for H100s.

x [rows, 128] -> 4 layers x + tanh(x w + b) v -> head [128, 16].
"""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from described_gpus import WITHOUT_TRITON
from flax import nnx
from judged import judged, source_line
from trainings import abstract_step, plan_of

import jdp
from jdp.core.reading import every_run
from jdp.experiment.losses import text_loss
from jdp.foresight.targets.resolve import target
from jdp.models import GPT, GPTConfig, build

LAYERS, WIDTH, HEAD = 4, 128, 16
MATRIX = WIDTH * WIDTH


def init(rng):
    a, b, c = jax.random.split(rng, 3)
    layers = {
        "w": jax.random.normal(a, (LAYERS, WIDTH, WIDTH)),
        "v": jax.random.normal(b, (LAYERS, WIDTH, WIDTH)),
        "b": jnp.zeros((LAYERS, WIDTH)),
    }
    return {"layers": layers, "head": jax.random.normal(c, (WIDTH, HEAD))}


def block(layer, x):
    return x + jnp.tanh(x @ layer["w"] + layer["b"]) @ layer["v"]


def scanned(layers, x):
    return jdp.scan_layers(block, layers, x, remat="full")


def one_by_one(layers, x):
    for i in range(LAYERS):
        x = block({name: leaf[i] for name, leaf in layers.items()}, x)
    return x


def gathers_a_few_columns(layers, x):
    x = scanned(layers, x)
    everyone = jax.lax.stop_gradient(jax.lax.all_gather(x[:, :4], "data", tiled=True))
    return x - everyone.mean()


def made(loop, strategy="zero3", *, mesh=None, **settings):
    plan = jdp.Plan(mesh or jdp.make_mesh(), strategy, min_shard_size=64)

    def loss_fn(params, batch, rng):
        y = loop(params["layers"], batch["x"].astype(params["head"].dtype)) @ params["head"]
        return jdp.Loss(jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(y.shape[0]))

    batch = {"x": jax.ShapeDtypeStruct((512, WIDTH), "float32")}
    return *abstract_step(loss_fn, init, optax.sgd(0.1), plan, **settings), batch


def test_steps_without_layer_loops_are_reported_once(reported):
    for loop, strategy, count in (
        (scanned, "zero3", 0),
        (one_by_one, "zero2", 0),
        (one_by_one, "zero3", 1),
        (one_by_one, "zero3", 1),
    ):
        step, state, batch = made(loop, strategy, partitioning="manual")
        jax.eval_shape(step, state, batch)
        said = [line for line in reported() if line.startswith("zero3 gathers its weights")]
        assert len(said) == count
    assert " (head and 3 more) at the top of the step and gathers them again in the backward pass" in said[0]
    assert "jdp.scan_layers gathers one layer at a time" in said[0]


@functools.cache
def verified(loop, **settings):
    mesh = jdp.make_mesh(devices=target("h100:1x8").devices)
    chosen = {"partitioning": "manual", "precision": "bf16", "compiler": WITHOUT_TRITON, **settings}
    return judged(*made(loop, mesh=mesh, **chosen))


# A layer's weights: forward and again backward. A bias is small: under auto it is gathered as the weights are, because
# the backward pass of tanh needs it; in a loop that sends, once for all layers. The head: once, and kept. The last
# layer's weights stay from the forward to the backward pass in a loop that sends.


@pytest.mark.aot
@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_layers_are_gathered_forward_and_backward(partitioning):
    report = verified(scanned, partitioning=partitioning, accumulate=2)
    [row] = [row for row in report.rows if row.kind == "all-gather"]
    layers, biases = (2 * LAYERS - 1, LAYERS) if partitioning == "manual" else (2 * LAYERS, 2 * LAYERS)
    expected = 2 * 2 * (layers * 2 * MATRIX + biases * WIDTH + WIDTH * HEAD)
    assert (row.expected_bytes, row.found_bytes) == (expected, expected)
    assert report.kept, report
    assert report.theory.most_gathered_bytes == 2 * 2 * 2 * report.theory.parameters > expected
    assert report.like_zero2 == ""


@pytest.mark.aot
def test_a_small_stray_is_named_and_kept():
    report = verified(gathers_a_few_columns)
    assert report.kept, report
    [stray] = report.strays
    line = source_line(gathers_a_few_columns, "all_gather")
    assert stray.startswith(f"all-gather of 4 KiB bf16, at {line}: no parameter")
    assert report.breaches == ()
    assert f"Sent besides:\n- {stray}" in str(report)
    assert json.loads(json.dumps(report.to_json()))["strays"] == [stray]


@pytest.mark.rest
@pytest.mark.aot
def test_a_zero3_that_is_a_zero2_is_reported():
    assert verified(one_by_one).like_zero2 == ""
    report = verified(lambda layers, x: scanned(layers | {"v": layers["v"] * 1.0}, x))
    assert report.kept
    assert report.ratio == pytest.approx(1, abs=0.002)
    [first] = [line for line in str(report).splitlines() if line.startswith("This zero3")]
    assert first == report.like_zero2 == report.to_json()["like_zero2"]
    assert "holds its weights like zero2: 133 KiB of 261 KiB gathered weights a device (51 %)" in first
    assert "(layers/v, head, layers/b)" in first
    assert "only parameters that reach jdp.scan_layers unchanged" in first


@pytest.mark.parametrize("length", [4, 16])
def test_an_untied_embedding_exchanges_its_rows(length):
    """2 rows a device and microbatch, of a table of 16 × 8: with 32 tokens a device gathers it."""
    config = GPTConfig(vocab_size=16, context=16, layers=3, width=8, heads=2, tied=False)
    plan, init = plan_of("zero3", replica=2, data=4), lambda rng: build(config, rngs=nnx.Rngs(rng))
    step, state = abstract_step(text_loss, init, optax.sgd(0.1), plan, precision="bf16", accumulate=2)
    leaf = jax.ShapeDtypeStruct((32, length), "int32")
    traced = step.lower(state, {"tokens": leaf, "targets": leaf, "weights": leaf}) and step.sends
    at_top = {each.path: each.elements for each in traced.gathered if each.at_top}
    assert at_top["head/kernel"] == 2 * 8 * 16
    if length == 16:
        assert at_top["embed/tokens"] == 2 * 16 * 8 and not traced.looked_up
        return
    assert traced.looked_up == {"embed/tokens"} and "embed/tokens" not in at_top
    rows, shard = 2 * 4 * 8, 16 * 8 // 4
    assert traced.exchanged == {"all-gather": 2 * 4 * 2 * 4 * 4, "all-to-all": 2 * (2 * 2 * rows + (2 + 4) * shard)}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_branch_exchanges_no_rows(strategy):
    """Devices that take the other branch would not take part."""

    def loss(model, batch, rng):
        tokens = batch["tokens"]
        x = jax.lax.cond(jnp.all(tokens > 0), model.embed, lambda tokens: 2 * model.embed(tokens), tokens)
        x = jdp.scan_layers(lambda layer, x: layer(x, None, None), model.layers, x)
        return jdp.Loss(jnp.sum(x), jnp.float32(1))

    config = GPTConfig(vocab_size=16, context=4, layers=3, width=32, heads=2, tied=False)
    plan, init = plan_of(strategy, min_shard_size=64), lambda rng: build(config, rngs=nnx.Rngs(rng))
    step, state = abstract_step(loss, init, optax.sgd(0.1), plan, partitioning="manual")
    step.lower(state, {"tokens": jax.ShapeDtypeStruct((8, 4), "int32")})
    assert not step.sends.looked_up


def logits_of(model, tokens):
    return model.logits(model.features(tokens))


@pytest.mark.parametrize("logits", [GPT.__call__, logits_of])
def test_a_heads_gradient_is_reduced_beside_the_last_layer(logits):
    """The gather and the reduction of all other weights at the top are first and last in a trace."""

    def loss(model, batch, rng):
        return jdp.Loss(jnp.sum(logits(model, batch["tokens"]) ** 2), jnp.float32(1))

    config = GPTConfig(vocab_size=16, context=16, layers=3, width=32, heads=2, tied=False)
    plan, init = plan_of("zero1", min_shard_size=64), lambda rng: build(config, rngs=nnx.Rngs(rng))
    step, state = abstract_step(loss, init, optax.sgd(0.1), plan, partitioning="manual")
    jaxpr = step.jitted.trace(state, {"tokens": jax.ShapeDtypeStruct((16, 16), "int32")}).jaxpr.jaxpr
    sends = {"all_gather": [], "reduce_scatter": []}
    for eqn, _, scope in every_run(jaxpr):
        if eqn.primitive.name in sends:
            sends[eqn.primitive.name].append("head/kernel" in scope)
    is_beside = logits is GPT.__call__  # `features` alone does not use the head
    assert (sends["all_gather"][-1], sends["reduce_scatter"][0]) == (is_beside, is_beside)
    assert sum(sends["reduce_scatter"]) == 1 and len(sends["reduce_scatter"]) > 3 * 7


def test_no_table_takes_the_blame_for_another_parameter():
    """A table whose rows are exchanged may not be reduced: not in place of a head of its shape, used twice."""

    def loss(model, batch, rng):
        tokens = batch["tokens"]
        return jdp.Loss(jnp.sum(model(tokens) ** 2) + jnp.sum(model(tokens + 1)), jnp.float32(1))

    config = GPTConfig(vocab_size=512, context=4, layers=2, width=32, heads=2, tied=False)
    plan, init = plan_of("zero3", min_shard_size=64), lambda rng: build(config, rngs=nnx.Rngs(rng))
    step, state = abstract_step(loss, init, optax.sgd(0.1), plan, partitioning="manual")
    report = judged(step, state, {"tokens": jax.ShapeDtypeStruct((16, 4), "int32")})
    assert not report.kept and "head/kernel" in report.breaches[0]
