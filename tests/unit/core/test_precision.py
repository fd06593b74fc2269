"""Three dtypes: what weights rest in, what the model computes in and gathers, what gradients are reduced in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import abstract_step, plan_of, train

import jdp
from jdp.core.reading import every_eqn

FEATURES, ROWS = 16, 16
BF16 = jnp.bfloat16
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, FEATURES), jnp.float32)}


def init(rng):
    return {"w": jax.random.normal(rng, (FEATURES, 32)), "small": jnp.ones(32)}


def loss_fn(params, batch, rng):
    y = batch["x"].astype(params["w"].dtype) @ params["w"] * params["small"]
    return jdp.Loss((y**2).sum(), y.shape[0])


def test_weights_must_rest_as_the_precision_says():
    """Those that are trained: frozen ones may be narrower."""

    def trace(wrt):
        narrow = lambda rng: init(rng) | {"small": jnp.ones(32, BF16)}  # noqa: E731
        step, state = abstract_step(loss_fn, narrow, optax.adamw(0.1), plan_of("zero3"), precision="bf16", wrt=wrt)
        return jax.eval_shape(step, state, BATCH)[0].params["small"].dtype

    message = "Precision.params is fp32, but small is bfloat16. Initialise it in fp32, or pass precision="
    with pytest.raises(ValueError, match=re.escape(message)):
        trace(None)
    assert trace("w") == BF16
    double = {"b": jax.ShapeDtypeStruct((8,), np.float64)}
    with pytest.raises(ValueError, match=r"b is float64. Initialise it in fp32, or unset JAX_ENABLE_X64 "):
        jdp.Precision().check_params(double)


@pytest.mark.parametrize(("strategy", "partitioning"), [("ddp", "auto"), ("zero3", "manual")])
def test_only_the_loss_sees_the_compute_dtype(strategy, partitioning):
    """In training and in an evaluation."""
    seen = []

    def spying(params, batch, rng):
        seen.append({name: leaf.dtype for name, leaf in params.items()} | {"x": batch["x"].dtype})
        return loss_fn(params, batch, rng)

    plan, settings = plan_of(strategy, min_shard_size=64), {"precision": "bf16", "partitioning": partitioning}
    step, state = abstract_step(spying, init, optax.adamw(0.1), plan, **settings)
    after, metrics = jax.eval_shape(step, state, BATCH)
    evaluated = jax.eval_shape(jdp.make_eval_step(spying, plan, check_loss=False, **settings), state, BATCH)
    assert seen == [{"w": BF16, "small": BF16, "x": jnp.float32}] * len(seen) != []
    assert {each[name].dtype for each in (metrics, evaluated) for name in ("loss", "weight")} == {jnp.dtype("float32")}
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert after.params["w"].dtype == after.opt_state[0].mu["w"].dtype == jnp.float32


def moved(jaxpr):
    """name -> dtypes of the arrays that collectives of `jaxpr` take, scalars left out."""
    found: dict[str, set] = {}
    for eqn in every_eqn(jaxpr):
        arrays = [var.aval for var in eqn.invars if getattr(var.aval, "shape", ())]
        if arrays and eqn.primitive.name.startswith(("psum", "all_gather", "reduce_scatter")):
            name = {"psum_invariant": "psum", "psum2": "psum"}.get(eqn.primitive.name, eqn.primitive.name)
            found.setdefault(name, set()).update(str(aval.dtype) for aval in arrays)
    return found


BOTH, REDUCE = jdp.Precision(compute="bf16", reduce="bf16"), jdp.Precision(reduce="bf16")


@pytest.mark.parametrize(
    ("strategy", "accumulate", "precision", "gathered", "reduced"),
    [
        ("ddp", 1, "bf16", "bfloat16", "float32"),
        ("ddp", 2, BOTH, "bfloat16", "bfloat16"),
        ("zero1", 2, "bf16", "bfloat16", "float32"),
        ("zero2", 2, "fp32", "float32", "float32"),
        ("zero2", 1, REDUCE, "float32", "bfloat16"),
        ("zero3", 1, BOTH, "bfloat16", "bfloat16"),
        ("zero3", 2, "bf16", "bfloat16", "float32"),
    ],
)
def test_manual_gathers_and_reduces_in_their_dtypes(strategy, accumulate, precision, gathered, reduced):
    plan, settings = plan_of(strategy, min_shard_size=64), {"precision": precision, "accumulate": accumulate}
    step, state = abstract_step(loss_fn, init, optax.adamw(0.1), plan, partitioning="manual", **settings)
    found = moved(jax.make_jaxpr(step.jitted)(state, BATCH).jaxpr)
    expected = {"psum": {reduced}}  # ddp: all; else: the leaf too small to shard
    if strategy != "ddp":
        expected |= {"all_gather": {gathered}, "reduce_scatter": {reduced}}
    assert found == expected


def test_totals_are_summed_in_float32():
    """Sums of microbatches that bf16 cannot hold: 256 + 1 is 256 there."""

    def whole(params, batch, rng):
        return jdp.Loss(params["w"].sum() * 0 + jnp.bfloat16(256), jnp.int32(1), {"ones": (jnp.bfloat16(1), 1)})

    make, batch = lambda rng: {"w": jnp.ones(8)}, {"x": np.zeros((300, FEATURES), np.float32)}
    *_, [metrics] = train(whole, make, optax.sgd(0.1), plan_of("ddp", 1), [batch], precision="bf16", accumulate=300)
    assert (float(metrics["loss"]), float(metrics["weight"]), float(metrics["ones"])) == (256.0, 300.0, 1.0)


def test_bf16_weights_get_exact_mean_gradients():
    """771 / 257 is 3; divided by a weight that was rounded to bf16 first, 256, it is not."""

    def weighted(params, batch, rng):
        return jdp.Loss((params["w"] * batch["x"]).sum(), batch["weight"].sum())

    make, precision = lambda rng: {"w": jnp.zeros(1, BF16)}, jdp.Precision(params="bf16")
    batch = {"x": np.float32([[700], [71]]), "weight": np.float32([200, 57])}
    _, state, _ = train(weighted, make, optax.sgd(1.0), plan_of("ddp", 1), [batch], precision=precision)
    assert state.params["w"].dtype == BF16
    assert float(state.params["w"][0]) == -3.0
