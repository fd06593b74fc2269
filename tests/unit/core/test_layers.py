"""The layer loop: what its backward pass computes again, and what of layers and plans it refuses or reports."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from trainings import abstract_step, assert_close, plan_of

import jdp
from jdp.core.reading import every_eqn

LAYERS, WIDTH = 3, 16


def block(layer, x):
    return x + jnp.tanh(x @ layer["w"] + layer["b"])


def stacked(rng=None, layers=LAYERS):
    rng = jax.random.key(0) if rng is None else rng
    return {"w": jax.random.normal(rng, (layers, WIDTH, WIDTH)) / 4, "b": jnp.full((layers, WIDTH), 0.1)}


def unstacked(layers):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(LAYERS)]


# What the backward pass keeps.


def marking(layer, x):
    """A block of attention's kind, which is marked, and an MLP."""
    x = x + checkpoint_name(x @ layer["w"], "attention")
    return x + jnp.tanh(x @ layer["w"]) @ layer["w"]


@pytest.mark.parametrize(
    ("remat", "products", "tanhs"),
    [
        (None, 9, 1),  # forward 3, and two of each in the backward pass
        (jax.checkpoint_policies.everything_saveable, 9, 1),
        ("dots", 9, 2),  # only cheap values are computed again
        ("dots_except_mlp", 10, 2),
        ("full", 11, 2),
    ],
)
@pytest.mark.parametrize("scanned", [True, False])
def test_remat_decides_which_values_are_computed_again(remat, products, tanhs, scanned):
    def loss(layers, x, remat=remat):
        return jdp.scan_layers(marking, layers, x, remat=remat).sum()

    layers, x = stacked() if scanned else [jax.tree.map(lambda leaf: leaf[0], stacked())], jnp.ones((4, WIDTH))
    gradients = jax.grad(loss, argnums=(0, 1))
    counts = Counter(eqn.primitive.name for eqn in every_eqn(jax.make_jaxpr(gradients)(layers, x).jaxpr))
    assert (counts["dot_general"], counts["tanh"]) == (products, tanhs)
    assert_close(gradients(layers, x), gradients(layers, x, None), atol=1e-5)  # of values up to 36


X, LINEAR = jnp.ones((4, WIDTH)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
UNMARKED = r"checkpoint_name\(x, \"attention\"\); given a block without a mark"
POLICIES = 'remat is None, "dots", "dots_except_mlp", "full" or a checkpoint policy; given \'all\''
REFUSED = {
    "a policy": (lambda: jdp.scan_layers(block, stacked(), X, remat="all"), POLICIES),
    "no mark": (lambda: jdp.scan_layers(block, stacked(), X, remat="dots_except_mlp"), UNMARKED),
    "no mark in a list": (lambda: jdp.scan_layers(block, unstacked(stacked()), X, remat="dots_except_mlp"), UNMARKED),
    "other numbers of layers": (
        lambda: jdp.scan_layers(block, (jnp.ones((3, 4)), jnp.arange(2)), X),
        r"given 0 is \[3, 4\], 1 is \[2\]\. Stack",
    ),
    "no layers": (lambda: jdp.scan_layers(block, {}, X), "given a dict without arrays. Stack the layers"),
    "one layer of equal sizes, like a stack": (
        lambda: jdp.scan_layers(lambda layer, x: layer(x), LINEAR, jnp.ones((4, 8))),
        r"given float32\[4, 8\], it returned float32\[4\]\. .*\(bias/value \[8\], kernel/value \[8, 8\]\) are one",
    ),
    "another dtype": (
        lambda: jdp.scan_layers(lambda layer, x: x.astype(jnp.bfloat16), stacked(), X),
        r"given float32\[4, 16\], it returned bfloat16\[4, 16\]\. Cast or reshape",
    ),
    "exchanged": (lambda: jdp.scan_layers(nnx.List([LINEAR]), lambda layer, x: x, X), "given a List as the block"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_do_not_fit_are_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


# Under a plan.

ROWS = 16
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}


def loss_with(loop):
    def loss_fn(params, batch, rng):
        return jdp.Loss((loop(params["layers"], batch["x"]) ** 2).sum(), jnp.float32(batch["x"].shape[0]))

    return loss_fn


zero3 = functools.partial(plan_of, "zero3", min_shard_size=64)


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_weights_changed_outside_the_block_are_reported(partitioning, reported):
    def loop(layers, x):
        return jdp.scan_layers(block, layers | {"w": layers["w"] * 2, "rate": np.ones(LAYERS, "float32")}, x)

    plan = zero3()
    step = jdp.make_eval_step(loss_with(loop), plan, partitioning=partitioning, check_loss=False)
    state = jdp.init_state(lambda rng: {"layers": stacked(rng)}, optax.sgd(0.1), plan, rng=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    metrics = step(state, {"x": x})
    step.lower(state, {"x": x})
    expected = loop(jax.device_get(state.params)["layers"], x)
    np.testing.assert_allclose(metrics["loss"], (expected**2).sum() / ROWS, rtol=1e-5)
    [notice] = [line for line in reported() if "gathered for the whole step" in line]
    assert notice.startswith(f"scan_layers: ['w'] {(LAYERS, WIDTH, WIDTH)} is not a parameter itself")
    assert "cast or reshape it inside the block" in notice


def test_weights_sharded_over_layers_name_a_rule(reported):
    layers = 8

    def wide(rng):
        return {"layers": {"w": jnp.zeros((layers, WIDTH, WIDTH)), "b": jnp.zeros((layers, WIDTH))}}

    def trace(rules):
        loss_fn = loss_with(functools.partial(jdp.scan_layers, block))
        step, state = abstract_step(loss_fn, wide, optax.sgd(0.1), zero3(rules=rules), partitioning="manual")
        jax.eval_shape(step, state, BATCH)

    trace([("layers/b", P(None, "data"))])
    assert not any("gathered for the whole step" in line for line in reported())
    trace([("layers/b", P(None, "data")), ("layers/w", P("data"))])
    [notice] = [line for line in reported() if "gathered for the whole step" in line]
    assert notice.startswith("layers/w [8, 16, 16] is sharded over its layer dimension")
    assert "Plan(..., rules=[('layers/w', PartitionSpec(None, 'data'))])" in notice
