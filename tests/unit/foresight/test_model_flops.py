"""Model FLOPs, counted in the loss's jaxpr, against counts by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from trainings import abstract_step

import jdp
from jdp.core.reading import count_flops
from jdp.experiment.losses import text_loss
from jdp.foresight.timing.model_flops import model_flops
from jdp.models import GPTConfig, build, linear_next_token_loss
from jdp.models.construction import parameter_shapes


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Floating point operations to train on one token: 6 N + 12 L H Q T.

    PaLM (arXiv:2204.02311), appendix B: 6 per parameter, and for attention L layers, H heads of size Q, T tokens of
    context, the causal half not deducted. N leaves out tables that are only looked up (positions, and the token table
    unless it also makes the logits): a lookup multiplies nothing.
    """
    sizes = {path: math.prod(shape) for path, shape in parameter_shapes(config).items()}
    looked_up = {"embed/positions"} if config.tied else {"embed/positions", "embed/tokens"}
    multiplied = sum(size for path, size in sizes.items() if path not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.heads * config.head_width * length


def counted(f, *shapes):
    return count_flops(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr)


def test_products_and_convolutions():
    assert counted(lambda a, b: a @ b, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (2, 2), "SAME")  # noqa: E731
    # Output [2, 16, 4, 4]; each element sums 8 channels of 3 x 3.
    assert counted(convolve, (2, 8, 8, 8), (16, 8, 3, 3)) == 2 * (2 * 16 * 4 * 4) * 8 * 3 * 3
    grouped = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=8)  # noqa: E731
    assert counted(grouped, (2, 8, 4, 4), (8, 1, 3, 3)) == 2 * (2 * 8 * 4 * 4) * 3 * 3


def test_cudnn_attention_counts_as_its_products(monkeypatch):
    """All scores, masked or not: what the products of unfused attention count."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91200)
    q, kv = (jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16) for length, heads in ((256, 6), (512, 3)))
    fused = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    assert count_flops(jax.make_jaxpr(fused)(q, kv, kv).jaxpr) == 2 * 2 * 2 * 6 * 256 * 512 * 64


def test_loops_branches_and_wrappers():
    square = lambda x: x @ x  # noqa: E731
    one = 2 * 4**3
    assert counted(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0], (4, 4)) == 6 * one
    branches = (square, lambda x: x @ x @ x, lambda x: x)
    assert counted(lambda x: jax.lax.switch(jnp.int32(x[0, 0]), branches, x), (4, 4)) == 2 * one
    assert counted(jax.checkpoint(square), (4, 4)) == one
    assert counted(jax.jit(square), (4, 4)) == one
    derived = jax.custom_vjp(square)
    derived.defvjp(lambda x: (x @ x @ x, x), lambda x, g: (g @ x,))
    assert counted(derived, (4, 4)) == one, "the function itself, not its derivative"
    mesh = jdp.make_mesh(data=8)
    spec = jax.sharding.PartitionSpec("data")
    local = jax.shard_map(lambda x: x @ jnp.ones((4, 4)), mesh=mesh, in_specs=spec, out_specs=spec)
    assert counted(local, (16, 4)) == 2 * 16 * 4 * 4, "all devices together"


def test_chunked_logits_count_once():
    """The gradients, which are computed with them, belong to the backward pass."""
    weights, targets = jnp.ones((2, 64)), jnp.zeros((2, 64), int)
    loss = lambda x, head: linear_next_token_loss(x, head, targets, weights, chunk_bytes=2**12)[0]  # noqa: E731
    assert counted(loss, (2, 64, 8), (8, 128)) == 2 * (2 * 64) * 8 * 128


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("scan", [True, False])
def test_a_gpt_agrees_with_the_textbook_formula(scan, remat):
    """6 N + 12 L H Q T counts the norms' scales and biases too, as if they multiplied matrices: 1 % at this width."""
    config = GPTConfig(vocab_size=512, context=64, layers=2, width=128, heads=4, scan=scan, remat=remat)
    plan = jdp.Plan(jdp.make_mesh(data=-1), "zero3")
    init = lambda rng: build(config, rngs=nnx.Rngs(rng))  # noqa: E731
    step, state = abstract_step(text_loss, init, optax.adamw(1e-3), plan, accumulate=2)
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 64), jnp.int32))
    batch |= {"weights": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    assert model_flops(step, state, batch) == pytest.approx(16 * 64 * flops_per_token(config, 64), rel=0.01)


@pytest.mark.parametrize(("wrt", "share"), [(None, 1), ("a", 0.25), ("b", 0.75)])
def test_frozen_parameters_have_no_gradient(wrt, share):
    """One count for all: what `jdp plan` foresees and `jdp train` reports are ratios of the same number."""
    init = lambda rng: {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 24))}  # noqa: E731
    loss = lambda params, batch, rng: jnp.mean(batch["x"] @ params["a"] @ params["b"])  # noqa: E731
    plan = jdp.Plan(jdp.make_mesh(data=8))
    step, state = abstract_step(loss, init, optax.sgd(1e-3), plan, wrt=wrt)
    forward = 2 * 16 * 8 * (8 + 24)
    assert model_flops(step, state, {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}) == forward * (2 + share)
