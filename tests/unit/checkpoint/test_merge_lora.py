"""Low-rank updates that are added to their kernels: a plain model that computes the same."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.checkpoint import CheckpointError
from jdp.export import export_hf, gpt_config_from_hf, hf_names, import_safetensors, merge_lora
from jdp.models import GPT, GPTConfig

CONFIG = GPTConfig(
    vocab_size=40, context=32, layers=2, width=32, heads=2, kv_heads=1, mlp_width=48,
    lora_rank=4, lora_alpha=6.0, lora_targets=("query", "value", "down"),
)  # fmt: skip
PLAN = jdp.Plan(jdp.make_mesh(data=8), "zero3", min_shard_size=16)
TOKENS = np.random.default_rng(0).integers(0, 40, (1, 32))


@functools.cache
def tuned(scan, devices=8):
    """A sharded state whose updates are not zero, and its configuration."""
    config = replace(CONFIG, scan=scan)
    plan = replace(PLAN, mesh=jdp.make_mesh(devices=jax.devices()[:devices]))
    state = jdp.init_state(
        lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(0.1), plan, rng=jax.random.key(0), wrt="*/lora_*"
    )
    moved = jax.tree.map_with_path(
        lambda path, x: x + 0.1 if "lora_b" in jax.tree_util.keystr(path) else x, state.params
    )
    return replace(state, params=moved), config


logits = jax.jit(lambda model: model(jnp.asarray(TOKENS)))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.default_ids("scanned")
def test_a_merged_model_has_the_same_logits(scan, tmp_path):
    state, config = tuned(scan)
    params, plain = merge_lora(state, config)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    assert plain.lora_rank is None and paths and not any("lora" in path for path in paths)
    shardings = {path: leaf.sharding for path, leaf in jax.tree.leaves_with_path(state.params)}
    assert all(leaf.sharding == shardings[path] for path, leaf in jax.tree.leaves_with_path(params))
    export_hf(tmp_path, params, plain)
    assert gpt_config_from_hf(tmp_path).lora_rank is None
    fresh = lambda rng: GPT(plain, rngs=nnx.Rngs(rng))  # noqa: E731
    again = jdp.abstract_state(fresh, optax.sgd(0.1), PLAN, rng=jax.random.key(1))
    again = import_safetensors(tmp_path, again, names=hf_names(plain))
    np.testing.assert_allclose(logits(again.model), logits(state.model), rtol=0, atol=2e-5)
    host, _ = merge_lora(jax.device_get(state.params), config)
    for one, other in zip(*map(jax.tree.leaves, (host, params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_cannot_be_merged_is_one_clear_error(tmp_path):
    state, config = tuned(True)
    params, plain = merge_lora(state, config)
    with pytest.raises(ValueError, match=r"given lora_rank=None\. Export the model unmerged"):
        merge_lora(params, plain)
    with pytest.raises(ValueError, match=r"given parameters without updates\. Pass"):
        merge_lora(params, config)
    with pytest.raises(ValueError, match=r"as nested dicts; given a GPT"):
        merge_lora(state.model, config)
    with pytest.raises(CheckpointError, match=r"abstract|no values"):
        merge_lora(jax.eval_shape(lambda: state), config)
    with pytest.raises(CheckpointError, match=r"without LoRA updates; given lora_rank=4\. Add them to"):
        export_hf(tmp_path, state, config)
