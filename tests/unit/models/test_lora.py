"""Low-rank updates: their initial values, and their sum with the kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdp.models import GPT, GPTConfig

BASE = GPTConfig(vocab_size=19, context=8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, bias=True)
TOKENS = jax.random.randint(jax.random.key(7), (2, 8), 0, 19)
forward = jax.jit(lambda model: model(TOKENS))


@functools.cache
def make(scan=True, rank=None):
    return GPT(dataclasses.replace(BASE, scan=scan, lora_rank=rank, lora_alpha=6.0), rngs=nnx.Rngs(0))


def leaves(model, kind=nnx.Param):
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, kind))}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_only_kernels_of_layers_have_updates(scan):
    """And they change nothing at the start."""
    model, base = make(scan, 3), make(scan)
    updates, rest, every = leaves(model, nnx.LoRAParam), leaves(base), leaves(model)
    assert every.keys() == updates.keys() | rest.keys()
    for path, leaf in rest.items():
        np.testing.assert_array_equal(every[path], leaf, err_msg=path)
    np.testing.assert_array_equal(forward(model), forward(base))
    kernels = [path.removesuffix("kernel") for path in rest if path.startswith("layers") and path.endswith("kernel")]
    assert updates.keys() == {f"{path}lora_{part}" for path in kernels for part in "ab"}
    assert len(kernels) == 7 * (1 if scan else 2)
    for path in kernels:
        down, up, kernel = updates[f"{path}lora_a"], updates[f"{path}lora_b"], rest[f"{path}kernel"]
        assert (down.shape[-2:], up.shape[-2:]) == ((kernel.shape[-2], 3), (3, kernel.shape[-1]))
        assert not jnp.any(up)
        # 48 to 72 draws each: their standard deviation is within a third of the true one, four sigmas wide.
        assert float(down.std()) == pytest.approx((3 * kernel.shape[-2]) ** -0.5, rel=0.34), path


def test_the_update_is_scaled_by_alpha_over_rank():
    model, merged = nnx.clone(make(rank=3)), nnx.clone(make())
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            leaf[...] = jax.random.normal(jax.random.key(len(str(path))), leaf.shape)
    updates = leaves(model, nnx.LoRAParam)
    for path, leaf in nnx.to_flat_state(nnx.state(merged)):
        name = "/".join(map(str, path)).removesuffix("kernel")
        if f"{name}lora_a" in updates:
            leaf[...] = leaf[...] + 6.0 / 3 * updates[f"{name}lora_a"] @ updates[f"{name}lora_b"]
    logits = forward(model)
    np.testing.assert_allclose(logits, forward(merged), rtol=1e-4, atol=1e-5)
    assert jnp.any(jnp.abs(logits - forward(make())) > 0.01)
