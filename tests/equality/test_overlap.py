"""Layer loops that send while they compute: the results of one device, and the same bytes as without a loop."""

import functools
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from described_gpus import WITHOUT_TRITON
from flax import nnx
from plain_layers import init_layers, layers_loss, tokens_of
from trainings import abstract_step, assert_close, plan_of, train

import jdp
from jdp.core import layers
from jdp.core.gradients.accumulate import hides_collectives
from jdp.core.lookup import look_up
from jdp.core.reading import every_eqn
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import report
from jdp.models import next_token_loss

DROPOUT, SGD = 0.1, optax.sgd(0.1)


class Counting(nnx.Module):
    """A layer with batch statistics, a counter, and noise of its own."""

    def __init__(self, rngs):
        self.norm, self.linear = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.noise = nnx.Dropout(DROPOUT, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.noise(jnp.tanh(self.linear(self.norm(x))))


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


def slope_loss(params, batch, rng, by_row=True):
    """A loss with a gradient inside. A row's gradient of a layer must not be sent by itself."""
    layer = lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"] + each["bias"]  # noqa: E731
    total = lambda x: jnp.sum(jnp.tanh(jdp.scan_layers(layer, params["layers"], x)))  # noqa: E731
    slope = jax.value_and_grad(lambda x: total(x) + 1e-3 * jnp.sum(jnp.square(jax.grad(total)(x))))
    values, slopes = (jax.vmap(slope) if by_row else slope)(batch["x"])
    return jdp.Loss(jnp.sum(values) + jnp.sum(jnp.square(slopes)), jnp.float32(batch["x"].shape[0]))


def tangent_loss(params, batch, rng):
    """Forward mode, of a jitted function and by `jax.linearize`, also through what the layers close over."""

    def total(shift):
        layer = lambda each, x: x + jnp.tanh((x + shift) @ each["up"]) @ each["down"]  # noqa: E731
        return jdp.scan_layers(layer, params["layers"], batch["x"])

    (x, tangent), (y, along) = jax.jvp(jax.jit(total), (0.1,), (1.0,)), jax.linearize(total, 0.1)
    return jdp.Loss(jnp.sum(jnp.square(x + tangent)) + jnp.sum(y * along(2.0)), jnp.float32(len(x)))


ROWS = {"x": np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)}
SLOPE = partial(slope_loss, by_row=False)
PLAIN, FULL, DOTS = (partial(layers_loss, dropout=DROPOUT, remat=remat) for remat in (None, "full", "dots"))
MODELS = {
    "layers": (init_layers, PLAIN, tokens_of(16)),
    "by row": (partial(init_layers, width=16), slope_loss, ROWS),
    "nested": (lambda rng: Nested(nnx.Rngs(rng)), nested_loss, ROWS),
    "forward": (partial(init_layers, width=16), tangent_loss, ROWS),
}
CASES = {
    "zero3": ("layers", PLAIN, "zero3", {}, False),
    "zero3 dots, 2": ("layers", DOTS, "zero3", {"accumulate": 2}, True),
    "zero2, 4, replicas": ("layers", FULL, "zero2", {"accumulate": 4, "replica": 2}, True),
    "ddp, 2": ("layers", FULL, "ddp", {"accumulate": 2, "clip_norm": 0.1}, False),
    "zero3 slope": ("by row", SLOPE, "zero3", {}, False),
    "zero3 nested": ("nested", nested_loss, "zero3", {}, False),
    "zero1 forward": ("forward", tangent_loss, "zero1", {}, False),
    "zero3 forward, 2": ("forward", tangent_loss, "zero3", {"accumulate": 2}, True),
}
"""name -> model, loss, strategy, settings, and whether the loop is unrolled as on GPUs."""


def run(model, loss, strategy, replica=1, devices=4, **settings):
    init, _, batch = MODELS[model]
    axes = {"replica": replica} if replica > 1 else {}
    plan = plan_of(strategy, devices, min_shard_size=64, **axes, data=-1)
    step, state, [metrics] = train(loss, init, SGD, plan, [batch], partitioning="manual", **settings)
    traced = step.jitted.trace(state, batch).jaxpr.jaxpr
    return jax.device_get((state.params, state.model_state, metrics)), traced


@functools.cache
def on_one_device(model, clip_norm):
    return run(model, MODELS[model][1], "ddp", devices=1, clip_norm=clip_norm)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.default_ids("zero3", "zero3 slope")
def test_results_are_those_of_one_device(case, monkeypatch):
    model, loss, strategy, settings, unrolls = CASES[case]
    monkeypatch.setattr(layers._Body, "unrolls", unrolls)
    ahead, traced = run(model, loss, strategy, **settings)
    assert any(eqn.primitive.name == "scan" for eqn in every_eqn(traced)), "its layers are one by one"
    assert_close(ahead, on_one_device(model, settings.get("clip_norm")), rtol=2e-5, atol=2e-6)


def compiled(strategy, rows, axes, **settings):
    """A program of six layers for eight H100s, and its report; a layer computes for longer than it takes to send."""
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:1x8").devices, **axes), strategy, min_shard_size=64)
    init, loss = partial(init_layers, layers=6, width=512, hidden=1024), partial(layers_loss, remat="full")
    step, state = abstract_step(loss, init, SGD, plan, precision="bf16", **settings)
    batch = {name: jax.ShapeDtypeStruct((rows, 1024), x.dtype) for name, x in tokens_of(1).items()}
    program = compile_step(step.lower(state, batch))
    made = report(step, state, program, "h100:1x8")
    assert made.kept and made.ratio <= 1.001
    return program, made


@pytest.mark.rest
@pytest.mark.aot
@pytest.mark.parametrize(("strategy", "axes"), [("ddp", {"data": 8}), ("zero2", {"replica": 2, "data": 4})])
def test_microbatches_reduce_layers_one_by_one(strategy, axes):
    _, made = compiled(strategy, 3 * 64, axes, accumulate=3, compiler=WITHOUT_TRITON)
    looped = {"reduce-scatter"} if strategy == "zero2" else set()
    sent = [each for each in made.collectives if each.collective.payload_bytes > 1000]
    assert {each.collective.kind for each in sent if each.in_accumulation_loop} == looped
    counts = Counter[str]()
    for each in sent:
        counts[each.collective.kind] += each.collective.count
    assert strategy == "zero2" or counts["all-reduce"] >= 6  # one for each layer
    assert strategy == "ddp" or counts["reduce-scatter"] >= 6 * 3  # and for each microbatch


@pytest.mark.aot
@pytest.mark.parametrize(("unrolled", "replica"), [(True, 1), (False, 1), (True, 2)])
@pytest.mark.default_ids("True-2")
def test_products_overlap_gathers_and_reductions(unrolled, replica, monkeypatch):
    monkeypatch.setattr(layers._Body, "unrolls", unrolled)
    program, _ = compiled("zero3", 64, {"replica": replica, "data": -1}, compiler="overlap")
    bodies = [text for text in program.text.split("\n\n") if re.search(r"(gather|scatter)-start\(", text)]
    if unrolled:
        [entry] = bodies
        hidden = multiplied_meanwhile(entry.splitlines())
        kinds = 2 + replica  # gathered twice and reduced; over the replicas too
        assert len(hidden) >= 6 * kinds and sum(hidden) >= len(hidden) - 2 - 2 * replica  # but both ends of the step
        return
    forward, backward = (text.splitlines() for text in bodies if not text.lstrip().startswith("ENTRY"))
    assert all(multiplied_meanwhile(forward)) and len(multiplied_meanwhile(forward)) == 2  # a gather for each layer
    assert sum(multiplied_meanwhile(backward)) > len(multiplied_meanwhile(backward)) / 2  # XLA found some as short


@pytest.mark.aot
@pytest.mark.parametrize(
    ("devices", "axes", "tokens", "by_layer"),
    [
        ("h100:1x8", {}, 2048, True),
        ("h100:8x8", {}, 16384, True),
        ("h100:64x8", {}, 16384, False),
        ("h100:64x8", {"replica": 64}, 2048, False),
        ("h100:64x8", {"replica": 64}, 16384, True),
    ],
)
def test_short_layers_share_their_collectives(devices, axes, tokens, by_layer):
    """As compiled and simulated under zero1, also with hosts as replicas."""
    layer = 12 * 768**2  # of GPT-2 124M
    mesh = jdp.make_mesh(**axes, data=-1, devices=target(devices).devices)
    assert hides_collectives(6 * layer * tokens, layer, 2, mesh, is_sharded=True) == by_layer
    assert hides_collectives(1.0, layer, 2, jdp.make_mesh(), is_sharded=True)  # on unknown devices


@pytest.mark.rest
def test_a_gradient_inside_may_be_evaluated_and_sent_in_few_bytes():
    """Nothing is reduced for the inner gradient. bf16 rounds the outer one twice, by 2⁻⁷ at most."""
    (params, _, metrics), (init, _, batch) = on_one_device("by row", None), MODELS["by row"]
    (sent, *_), _ = run("by row", SLOPE, "zero3", accumulate=2, replica=2, wire="bf16")
    plan = plan_of("zero3", 4, min_shard_size=64, data=-1)
    state = jdp.init_state(init, SGD, plan, rng=jax.random.key(0))
    evaluated = jdp.make_eval_step(SLOPE, plan, partitioning="manual")(state, batch)
    np.testing.assert_allclose(evaluated["loss"], metrics["loss"], rtol=2e-5)
    start = jax.device_get(state.params)
    change = lambda params: jax.tree.map(lambda new, old: new - old, params, start)  # noqa: E731
    for got, expected in zip(*map(jax.tree.leaves, map(change, (sent, params))), strict=True):
        np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_gradient_or_an_evaluation_may_be_differentiated(strategy):
    """By the weights, through the gathers of the loop, and by a frozen model, whose loop and table have no slots.

    The inner gradient is by the slots. The derivatives are up to 40.
    """
    init, _, batch = MODELS["by row"]
    models = [init(jax.random.key(seed)) for seed in range(2)]

    def features(params, batch):
        x = batch["x"] + 0.1 * look_up(params["embed"], batch["token"])
        return jdp.scan_layers(lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"], params["layers"], x)

    def loss(params, frozen, batch, rng):
        total = jnp.sum(jnp.tanh(features(params, batch)) * jnp.cos(features(frozen, batch)))
        return jdp.Loss(total, jnp.float32(len(batch["x"])))

    batch = batch | {"token": np.arange(len(batch["x"])) % 9}

    def derivatives(plan):
        gradient = jdp.value_and_grad(loss, plan, partitioning="manual")
        evaluate = jdp.make_eval_step(lambda params, *rest: loss(params, params, *rest), plan, partitioning="manual")
        state = jdp.init_state(init, SGD, plan, rng=jax.random.key(0))

        def total(params, frozen):
            metrics, grads = gradient(params, frozen, batch, jax.random.key(1))
            evaluated = evaluate(replace(state, params=params), batch)["loss"]
            return metrics["loss"] + 2 * evaluated + sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads))

        placed, kept = jdp.place(models, plan), jax.jit(total)
        kept(*placed)  # this trace is kept, and does not know of a derivative
        along = lambda *models: jax.jvp(total, models, models)[1]  # noqa: E731
        return jax.device_get(jax.jit(lambda *given: (jax.grad(kept, (0, 1))(*given), along(*given)))(*placed))

    assert_close(derivatives(plan_of(strategy, 4, min_shard_size=64)), derivatives(plan_of("ddp", 1)), atol=1e-4)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_branch_that_a_device_may_not_take_gathers_nothing(strategy):
    init, _, batch = MODELS["by row"]
    layer = lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"]  # noqa: E731

    def loss(params, batch, rng):
        through = partial(jdp.scan_layers, layer, params["layers"])
        x = jax.lax.cond(batch["x"][0, 0] > 0, through, lambda x: x, batch["x"])
        return jdp.Loss(jnp.sum(jnp.square(x)), jnp.float32(len(x)))

    plan = plan_of(strategy, 4, min_shard_size=64)
    with pytest.raises(ValueError, match="would hang; given a branch") if strategy == "zero3" else nullcontext():
        train(loss, init, SGD, plan, [batch], partitioning="manual")


@pytest.mark.rest
def test_under_vmap_gradients_are_summed_before_sending():
    after, traced = run("by row", slope_loss, "zero3")
    assert_close(after, on_one_device("by row", None), rtol=2e-5, atol=2e-6)
    sent = [eqn.invars[0].aval.size for eqn in every_eqn(traced) if eqn.primitive.name == "reduce_scatter"]
    assert sent and max(sent) <= 5 * 16 * 64  # all layers of a matrix


def multiplied_meanwhile(lines):
    """For each collective of a schedule, whether a matrix product stands between its start and its done."""
    ends = {found[1]: i for i, line in enumerate(lines) if (found := re.search(r"-done\(%?([\w.-]+)\)", line))}
    begins = {found[1]: i for i, line in enumerate(lines) if (found := re.search(r"%?([\w.-]+-start[\w.]*) = ", line))}
    return [any("gemm" in line for line in lines[i : ends[name]]) for name, i in begins.items()]


# zero3 for a loss without layer loops: the backward pass gathers its weights again.


def init_list(rng, layers=4, **sizes):
    params = init_layers(rng, layers, **sizes)
    stacked = params.pop("layers")
    return params | {"layers": [jax.tree.map(lambda x: x[i], stacked) for i in range(layers)]}  # noqa: B023


def list_loss(params, batch, rng):
    x = params["embed"][batch["tokens"]]
    for layer in params["layers"]:
        x += jax.nn.silu(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return jdp.Loss(*next_token_loss((x * params["scale"]) @ params["embed"].T, batch["targets"], batch["weights"]))


def test_a_list_of_layers_equals_one_device():
    ends, several = [], {"partitioning": "manual", "accumulate": 4}
    for plan, settings in ((plan_of("zero3", 4, min_shard_size=64), several), (plan_of("ddp", 1), {})):
        _, state, measured = train(list_loss, init_list, SGD, plan, [tokens_of(16)], **settings)
        ends.append((state.params, measured))
    assert_close(*ends)


@pytest.mark.rest
@pytest.mark.aot
def test_a_list_of_layers_holds_less_than_zero2():
    wide = partial(init_list, layers=5, width=1024, hidden=4096)
    settings = {"precision": "bf16", "partitioning": "manual", "compiler": {"xla_gpu_enable_triton_gemm": False}}
    batch = {name: jax.ShapeDtypeStruct((64, 256), x.dtype) for name, x in tokens_of(1).items()}
    held = {}
    for strategy in ("zero2", "zero3"):
        plan = jdp.Plan(jdp.make_mesh(devices=target("h100:1x8").devices), strategy, min_shard_size=64)
        step, state = abstract_step(list_loss, wide, SGD, plan, **settings)
        held[strategy] = compile_step(step.lower(state, batch)).temp_bytes
    assert held["zero3"] < 0.85 * held["zero2"], held


def test_what_a_loss_prints_is_printed_once(capfd):
    def prints(params, batch, rng):
        jax.debug.print("once {}", params["scale"].sum())
        return list_loss(params, batch, rng)

    plan = plan_of("zero3", 2, min_shard_size=64)
    train(prints, init_list, SGD, plan, [tokens_of(16)], partitioning="manual")
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 2
