"""What zero3 gathers, at the top or by layer.

By the step's own trace, counted by hand, and in programs that XLA compiled for H100s.

x [rows, 128] -> 4 layers x + tanh(x w + b) v -> head [128, 16].
"""

import functools
import inspect
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from judged import judged

import jdp
from jdp.base import notices
from jdp.foresight.targets.resolve import target

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


def cast_before(layers, x):
    return scanned(jax.tree.map(lambda w: w * 1.0, layers), x)


def gathers_activations(layers, x):
    x = one_by_one(layers, x)
    everyone = jax.lax.all_gather(jax.lax.stop_gradient(x), "data", tiled=True)
    return x - everyone.mean(0)


def gathers_a_few_columns(layers, x):
    x = scanned(layers, x)
    everyone = jax.lax.stop_gradient(jax.lax.all_gather(x[:, :4], "data", tiled=True))
    return x - everyone.mean()


def made(loop, strategy="zero3", *, mesh=None, rows=512, wrt=None, rules=(), make=init, **settings):
    plan = jdp.Plan(mesh or jdp.make_mesh(), strategy, rules=rules, min_shard_size=64)

    def loss_fn(params, batch, rng):
        y = loop(params["layers"], batch["x"].astype(params["head"].dtype)) @ params["head"]
        return jdp.Loss(jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(y.shape[0]))

    state = jdp.abstract_state(make, optax.sgd(0.1), plan, rng=jax.random.key(0), wrt=wrt)
    batch = {"x": jax.ShapeDtypeStruct((rows, WIDTH), "float32")}
    return jdp.make_train_step(loss_fn, plan, **settings), state, batch


def traced(*args, **settings):
    """path -> (at the top, elements a step), and the dtypes' sizes."""
    step, state, batch = made(*args, **settings)
    step.lower(state, batch)
    assert len({(each.path, each.at_top) for each in step.sends.gathered}) == len(step.sends.gathered)
    sizes = {each.payload_bytes // each.elements for each in step.sends.gathered}
    return {each.path: (each.at_top, each.elements) for each in step.sends.gathered}, sizes


# The trace. A layer's weights: forward and again backward. A bias is small: under auto it is gathered as the weights
# are, as the backward pass of tanh needs it; in a loop that sends, once for all layers. The head: once, and kept. The
# last layer's weights stay from the forward to the backward pass, in a loop that sends.


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
@pytest.mark.parametrize("k", [1, 4])
def test_layers_are_gathered_forward_and_backward_and_the_rest_once(partitioning, k):
    gathered, sizes = traced(scanned, partitioning=partitioning, accumulate=k, precision="bf16")
    assert sizes == {2}
    times = 2 * LAYERS - (partitioning == "manual")
    assert gathered == {
        "head": (True, k * WIDTH * HEAD),
        "layers/w": (False, k * times * MATRIX),
        "layers/v": (False, k * times * MATRIX),
        "layers/b": (True, k * LAYERS * WIDTH) if partitioning == "manual" else (False, 2 * k * LAYERS * WIDTH),
    }


@pytest.mark.parametrize("loop", [one_by_one, cast_before])
def test_without_a_layer_loop_weights_are_gathered_at_the_top_and_again_backward(loop):
    gathered, _ = traced(loop, partitioning="manual", accumulate=2)
    assert gathered["layers/w"] == (True, 2 * 2 * LAYERS * MATRIX)
    assert all(top for top, _ in gathered.values())


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_a_device_gathers_its_own_part_along_the_models_axes(partitioning):
    mesh, rules = jdp.make_mesh(data=4, model=2), [("layers/w", P(None, None, "model"))]
    gathered, _ = traced(scanned, mesh=mesh, rules=rules, partitioning=partitioning)
    times = 2 * LAYERS - (partitioning == "manual")
    assert gathered["layers/w"] == (False, times * MATRIX // 2)
    assert gathered["layers/v"] == (False, times * MATRIX)


# The step reports it


@pytest.fixture
def top_notices(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    return lambda: [line for line in caplog.messages if line.startswith("zero3 gathers its weights")]


def test_a_step_reports_once_that_no_layer_is_gathered_by_itself(top_notices):
    for loop, strategy, count in (
        (scanned, "zero3", 0),
        (one_by_one, "zero2", 0),
        (one_by_one, "zero3", 1),
        (one_by_one, "zero3", 1),
    ):
        step, state, batch = made(loop, strategy, partitioning="manual")
        jax.eval_shape(step, state, batch)
        assert len(top_notices()) == count
    assert top_notices()[0].startswith(
        "zero3 gathers its weights (head and 3 more) at the top of the step and gathers them again in the backward pass"
    )
    assert "jdp.scan_layers gathers one layer at a time" in top_notices()[0]


# Compiled


@functools.cache
def verified(loop, strategy="zero3", **settings):
    mesh = jdp.make_mesh(devices=target("h100:1x8").devices)
    chosen = {"partitioning": "manual", "precision": "bf16", **settings}
    chosen["compiler"] = {"xla_gpu_enable_triton_gemm": False}  # what is sent does not depend on it
    return judged(*made(loop, strategy, mesh=mesh, **chosen))


def source_line(function, text):
    """ "this file:line" of the line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_the_compiled_program_gathers_what_the_trace_has(partitioning):
    report = verified(scanned, partitioning=partitioning, accumulate=2)
    [row] = [row for row in report.rows if row.kind == "all-gather"]
    layers, biases = (2 * LAYERS - 1, LAYERS) if partitioning == "manual" else (2 * LAYERS, 2 * LAYERS)
    expected = 2 * 2 * (layers * 2 * MATRIX + biases * WIDTH + WIDTH * HEAD)
    assert (row.expected_bytes, row.found_bytes) == (expected, expected)
    assert report.kept, report
    assert report.theory.most_gathered_bytes == 2 * 2 * 2 * report.theory.parameters > expected
    assert report.like_zero2 == ""


def test_a_stray_gather_breaks_what_was_below_the_upper_bound():
    report = verified(gathers_activations)
    assert not report.kept
    expected = source_line(gathers_activations, "all_gather")
    gather, *_ = [breach for breach in report.breaches if breach.startswith("all-gather")]
    assert gather.startswith("all-gather of 128 KiB bf16, at " + expected)
    assert "no parameter has this shape" in gather
    assert report.strays == ()


def test_a_small_stray_is_named_and_kept():
    report = verified(gathers_a_few_columns)
    assert report.kept, report
    [stray] = report.strays
    assert stray.startswith(
        f"all-gather of 4 KiB bf16, at {source_line(gathers_a_few_columns, 'all_gather')}: no parameter"
    )
    assert report.breaches == ()
    assert f"Sent besides:\n- {stray}" in str(report)
    assert json.loads(json.dumps(report.to_json()))["strays"] == [stray]


def half_scanned(layers, x):
    return scanned(layers | {"v": layers["v"] * 1.0}, x)


def test_a_zero3_that_is_a_zero2_is_reported():
    assert verified(one_by_one).like_zero2 == ""
    report = verified(half_scanned)
    assert report.kept
    assert report.ratio == pytest.approx(1, abs=0.002)
    [first] = [line for line in str(report).splitlines() if line.startswith("This zero3")]
    assert first == report.like_zero2 == report.to_json()["like_zero2"]
    assert "holds its weights like zero2: 133 KiB of 261 KiB gathered weights a device (51 %)" in first
    assert "(layers/v, head, layers/b)" in first
    assert "only what goes through jdp.scan_layers as it stands" in first
    gathers = {each["parameter"]: each for each in report.to_json()["gathers"]}
    assert gathers["layers/v"] == {
        "parameter": "layers/v",
        "where": "top",
        "times_a_microbatch": 1.0,
        "payload_bytes": 2 * LAYERS * MATRIX,
    }
