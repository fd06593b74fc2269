"""Products with weights in float8: what is rounded, which products are, and that a model learns as in bfloat16."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.base import notices
from jdp.core.flax_nnx.fp8 import fp8_product
from jdp.core.gradients.fp8 import with_fp8_products
from jdp.core.tracing.jaxprs import every_eqn
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets import target
from jdp.foresight.verify import report
from jdp.models import GPT, GPTConfig
from jdp.models.modules import Linear, mapped

BF16, DIMS = jnp.bfloat16, (((1,), (0,)), ((), ()))
X, W = jnp.ones((4, 32), BF16), jnp.ones((32, 48), BF16)
CONFIG = GPTConfig(vocab_size=64, context=32, layers=2, width=64, heads=2)


def rounded(x, dtype):
    """Round to float8 by another library, with the least power of two as scale."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype(np.float64) * scale


def spread(shape, seed):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=shape) * 10.0 ** random.uniform(-3, 1, shape), BF16)


def products_in_fp8(loss, weights, batch):
    """Count the products whose weight is rounded to float8 in the trace of a loss."""

    def narrow(weights, batch):
        return with_fp8_products(lambda w, _, b, __: loss(w, b), weights, (), batch, None)

    dtypes = [var.aval.dtype for eqn in every_eqn(jax.make_jaxpr(narrow)(weights, batch).jaxpr) for var in eqn.outvars]
    return dtypes.count(jnp.uint8) // 2  # the bits of two operands


@pytest.mark.parametrize("native", [True, False])
def test_a_product_and_its_gradients_are_those_of_rounded_operands(native):
    x, w, g = spread((24, 32), 0), spread((32, 48), 1), spread((24, 48), 2)

    @jax.jit
    def results(x, w, g):
        y, backward = jax.vjp(lambda x, w: fp8_product(x, w, DIMS, native), x, w)
        return y, *backward(g)

    if native:  # XLA:CPU multiplies float8 in float16, where these overflow: only traced
        jax.eval_shape(results, x, w, g)
        return
    x8, w8 = rounded(x, ml_dtypes.float8_e4m3fn), rounded(w, ml_dtypes.float8_e4m3fn)
    g8 = rounded(g, ml_dtypes.float8_e5m2)
    for found, left, right in zip(results(x, w, g), (x8, g8, x8.T), (w8, w8.T, g8), strict=True):
        # one rounding to bfloat16 of the result, and float32 sums
        np.testing.assert_allclose(
            np.asarray(found, np.float64), left @ right, rtol=2**-8, atol=1e-5 * (abs(left) @ abs(right)).max()
        )


def test_numbers_that_are_zero_large_small_or_not_finite():
    ones, product = np.asarray(X), jax.jit(lambda x: fp8_product(x, W, DIMS, False))
    assert not np.asarray(product(0 * ones)).any()
    for size in (2.0**100, 2.0**-50):
        np.testing.assert_array_equal(np.asarray(product(ones * BF16(size)), np.float64), 32 * size)
    for bad in (np.inf, np.nan):
        broken = ones.copy()
        broken[0, 0] = bad
        assert np.isnan(np.asarray(product(broken), np.float32)[0]).all()


def scanned(weights, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, weights)[0]


@pytest.mark.parametrize(
    ("loss", "weights", "count"),
    [
        (lambda w, x: x @ w, W, 1),
        (lambda w, x: (w.T @ x.T).T, W, 1),
        (lambda w, x: x @ w.astype(BF16), W.astype(jnp.float32), 1),
        (lambda w, x: jax.jit(lambda w: x @ w)(w), W, 1),
        (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ -w), W, 2),
        (scanned, jnp.ones((3, 32, 32), BF16), 1),
        (lambda w, x: x @ x.T, W, 0),  # no weight
        (lambda w, x: x + jnp.sum(w @ w.T), W, 0),  # no activations
        (lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32), W, 0),
        (lambda w, x: jnp.dot(x, w, precision="highest"), W, 0),
        (lambda w, x: x.astype(jnp.float32) @ w, W, 0),
        (lambda w, x: x @ w[:, :40], W, 0),  # 40 does not divide by 16
        (lambda w, x: jnp.einsum("rk,rkn->rn", x, w), jnp.ones((4, 32, 48), BF16), 0),  # one weight a row
    ],
)
def test_which_products_are_in_float8(loss, weights, count):
    assert products_in_fp8(loss, weights, X) == count


def test_each_map_of_one_input_has_its_own_scale_on_cpus_too():
    maps = [Linear(32, 16 * n, std=1.0, bias=False, rngs=nnx.Rngs(n)) for n in (1, 2)]
    graph, weights = nnx.split(nnx.List(maps))
    weights = jax.tree.map(lambda w: w.astype(BF16), weights)
    assert products_in_fp8(lambda w, x: mapped(x, *nnx.merge(graph, w)), weights, jnp.ones((1, 64, 32), BF16)) == 2


def test_a_loss_without_such_a_product_is_told(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    products_in_fp8(lambda w, x: (x.astype(jnp.float32) @ w).sum(), W, X)
    assert 'precision="fp8": no product of the loss is in float8' in capsys.readouterr().err


def make_batch(index):
    """Tokens and, seven times as large, what follows them: learnt in few steps."""
    tokens = np.random.default_rng(index).integers(0, 64, (16, 32))
    return {"x": tokens, "y": 7 * tokens % 64, "weight": np.ones((16, 32), np.float32)}


def init(rng):
    keys = jax.random.split(rng, 4)
    draw = lambda key, *shape: shape[-2] ** -0.5 * jax.random.normal(key, shape)  # noqa: E731
    layers = {"up": draw(keys[0], 2, 64, 128), "down": draw(keys[1], 2, 128, 64)}
    return {"embed": jax.random.normal(keys[2], (64, 64)), "layers": layers, "head": draw(keys[3], 64, 64)}


def layers_loss(params, batch, rng):
    layer = lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"]  # noqa: E731
    x = jdp.scan_layers(layer, params["layers"], params["embed"][batch["x"]])
    return jdp.Loss(*jdp.models.next_token_loss(x @ params["head"], batch["y"], batch["weight"]))


def trained(precision, strategy="ddp", steps=60):
    plan = jdp.Plan(jdp.make_mesh(data=2, devices=jax.devices()[:2]), strategy)
    state = jdp.init_state(init, optax.adamw(3e-3), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(layers_loss, plan, precision=precision)
    losses = []
    for index in range(steps):
        state, metrics = step(state, make_batch(index))
        losses.append(float(metrics["loss"]))
    evaluated = jdp.make_eval_step(layers_loss, plan, precision=precision)(state, make_batch(steps))
    return state, np.array(losses), float(evaluated["loss"])


@pytest.fixture(scope="module")
def runs():
    return {precision: trained(precision) for precision in ("bf16", "fp8")}


def test_a_model_learns_as_in_bf16(runs):
    (_, wide, wide_eval), (_, narrow, narrow_eval) = runs["bf16"], runs["fp8"]
    assert wide[-1] < 0.5 * wide[0]
    assert not np.array_equal(wide, narrow)
    # e4m3 rounds by at most 2^-4 of a number, to either side: over the sums of a layer that leaves little of the loss.
    assert np.abs(narrow - wide).max() < 0.05 * wide[0]
    assert abs(narrow_eval - wide_eval) < 0.05 * wide[0]


def test_the_state_is_that_of_bf16(runs):
    """So checkpoints of the one are checkpoints of the other."""
    wide, narrow = (jax.tree.leaves_with_path(state) for state, *_ in runs.values())
    assert [(path, x.shape, x.dtype) for path, x in wide] == [(path, x.shape, x.dtype) for path, x in narrow]


def test_zero3_rounds_the_same_numbers(runs):
    """Also under rematerialisation, through which float8 must go as bits."""
    _, losses, _ = trained("fp8", "zero3", steps=5)
    np.testing.assert_allclose(losses, runs["fp8"][1][:5], rtol=5e-3)


def made_for(kind):
    plan = jdp.Plan(jdp.make_mesh(data=8, devices=target(kind).devices), "zero3")
    state = jdp.abstract_state(init, optax.sgd(3e-3), plan, rng=jax.random.key(0))
    return jdp.make_train_step(layers_loss, plan, precision="fp8"), state, make_batch(0)


def test_on_an_h100_products_take_float8_and_the_contract_is_kept():
    step, state, batch = made_for("h100:1x8")
    compiled = compile_step(step.lower(state, batch))
    of_operands = re.compile(r"parameter_0[.\d]*: (f8\w+)\[[\d,]*\], parameter_1[.\d]*: (f8\w+)\[")
    found = {pair for line in compiled.text.splitlines() if "gemm_fusion" in line for pair in of_operands.findall(line)}
    assert {("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn")} <= found
    assert report(step, state, compiled, "h100:1x8").kept


def test_without_float8_units_it_is_said(capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    step, state, batch = made_for("a100:1x8")
    step.lower(state, batch)
    assert "NVIDIA A100-SXM4-80GB has no float8 units" in capsys.readouterr().err


def test_every_gradient_is_close_to_that_of_bf16():
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0))))
    start = jax.jit(lambda: jax.tree.map(lambda p: p.astype(BF16), nnx.state(GPT(CONFIG, rngs=nnx.Rngs(0)))))
    params, batch = start(), make_batch(0)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch["x"])
        return jdp.models.next_token_loss(logits, batch["y"], batch["weight"])[0]

    def narrow(params, batch):
        return with_fp8_products(lambda p, _, b, __: loss(p, b), params, (), batch, None)

    pairs = [jax.tree.leaves_with_path(jax.jit(jax.grad(each))(params, batch)) for each in (loss, narrow)]
    for (path, wide), (_, close) in zip(*pairs, strict=True):
        wide, close = np.asarray(wide, np.float32), np.asarray(close, np.float32)
        # Roundings of 2^-3 (e5m2) and 2^-4, uniform, independent, through two layers; a wrong scale is 0.5 or more.
        assert np.linalg.norm(close - wide) < 0.2 * np.linalg.norm(wide), path
