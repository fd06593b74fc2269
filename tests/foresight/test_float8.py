"""Products that are asked for in float8: counted in the program of an H100, and reported with their line if wider."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.foresight.foresee import foresee
from jdp.foresight.program.module import parse
from jdp.foresight.targets import target
from jdp.foresight.timing.float8 import float8_products

E4M3 = jnp.float8_e4m3fn


def one_scale_a_column(x, weight):
    """Multiply by weights with a scale for each column, for which cuBLASLt has no float8 kernel."""
    scale = jnp.max(jnp.abs(weight), 0) / 448
    rounded = (weight / scale).astype(E4M3).astype(x.dtype) * scale
    return jnp.dot(x.astype(E4M3).astype(x.dtype), rounded, preferred_element_type=jnp.float32)


def init(rng):
    draw = lambda *shape: shape[-2] ** -0.5 * jax.random.normal(rng, shape)  # noqa: E731
    return {"layers": {"up": draw(2, 64, 48), "down": draw(2, 48, 64)}, "wide": draw(64, 80), "own": draw(80, 96)}


def loss(params, batch, rng):
    layer = lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"]  # noqa: E731
    x = jdp.scan_layers(layer, params["layers"], batch["x"].astype(jnp.bfloat16)) @ params["wide"]
    return jnp.mean(one_scale_a_column(x, jax.lax.stop_gradient(params["own"])) ** 2)


@functools.cache
def planned(on, precision="fp8", strategy="zero3"):
    plan = jdp.Plan(jdp.make_mesh(data=8, devices=target(on).devices), strategy)
    state = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss, plan, precision=precision)
    return foresee(step, state, {"x": np.ones((128, 64), np.float32)}, on, strategies=[strategy], cache=False)


@pytest.fixture(scope="module")
def plan():
    return planned("h100:1x8")


def test_products_in_float8_are_counted(plan):
    """Layers and `wide` are, forward and backward: cuBLASLt's kernels take them with any scan or layout."""
    found = plan.estimates[0].report
    assert (found.float8.run, found.float8.asked) == (found.float8.asked - 1, found.float8.asked)
    assert found.float8.run >= 9 and found.kept
    assert f"\n\nfp8 products: {found.float8.run} of {found.float8.asked}.\n\nSymptoms:\n" in str(found)
    assert found.to_json()["fp8_products"] == found.float8.to_json()
    assert plan.to_json()["strategies"][0]["fp8_products"] == found.float8.to_json()
    assert f"Note: {found.float8} (zero3)" in str(plan)


def test_a_product_in_a_wider_type_is_reported_with_its_line(plan):
    source, first = inspect.getsourcelines(one_scale_a_column)
    line = first + next(number for number, text in enumerate(source) if "jnp.dot" in text)
    [symptom] = plan.estimates[0].report.symptoms
    count = f"fp8: 1 of {plan.estimates[0].report.float8.asked} products"
    assert symptom.startswith(f"{count} runs in bf16 ({__file__}:{line}): XLA knows no float8 kernel")
    assert symptom in plan.notes


TRITON = """
%kernel (a: f8e4m3fn[128,64], b: f8e5m2[64,128]) -> bf16[128,128] {
  %a = f8e4m3fn[128,64]{1,0} parameter(0)
  %b = f8e5m2[64,128]{1,0} parameter(1)
  ROOT %dot = bf16[128,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f8e4m3fn[128,64], w: f8e5m2[64,128]) -> bf16[128,128] {
  %x = f8e4m3fn[128,64]{1,0} parameter(0)
  %w = f8e5m2[64,128]{1,0} parameter(1)
  ROOT %y = bf16[128,128]{1,0} fusion(%x, %w), kind=kCustom, calls=%kernel, backend_config={"fusion_backend_config":\
{"block_level_fusion_config":{"num_warps":"WARPS","output_tiles":[{"sizes":["ROWS","128"]}]}}}
}
"""


@pytest.mark.parametrize(("rows", "warps", "wider"), [(128, 8, []), (64, 4, []), (32, 4, ["f16"]), (64, 2, ["f16"])])
def test_triton_multiplies_float8_only_in_large_tiles(rows, warps, wider):
    found = float8_products(parse(TRITON.replace("ROWS", str(rows)).replace("WARPS", str(warps))))
    assert (found.asked, [each.dtype for each in found.wider]) == (1, wider)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_devices_without_float8_units_are_named_if_it_is_asked_for(precision):
    found = planned("cpu:8", precision).estimates[0].report
    noted = [note for note in found.notes if note.startswith("fp8 products: a CPU runs none")]
    assert (len(noted), found.symptoms, found.float8) == (precision == "fp8", (), None)
    assert "fp8_products" not in found.to_json()
