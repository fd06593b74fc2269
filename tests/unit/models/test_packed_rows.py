"""Documents packed into one row: each has the logits and gradients that it has alone.

Attention block by block gives what the whole [length, length] gives, which is never held.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_models as models
from described_gpus import assert_alike, compiled_step
from flax import nnx
from test_models import make

import jdp
from jdp.core.sharding.mesh import tracing_on
from jdp.foresight.targets.relocate import answered_for
from jdp.foresight.targets.resolve import target
from jdp.models import GPTConfig, build, next_token_loss
from jdp.models.attention import Sight, attend, attend_in_documents, block_size

CONFIG = GPTConfig(
    vocab_size=64, context=2048, layers=2, width=32, heads=4, kv_heads=2, activation="gelu", tied=True, remat="dots"
)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 40)])
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)])
@pytest.mark.default_ids("float32-*-True-40", "float32-*-False-None", "bfloat16-*-True-None")
def test_blocks_equal_the_whole_forward_and_backward(dtype, bound, causal, window):
    ends = np.random.default_rng(0).integers(0, 6, (2, 150))  # documents end anywhere in a block
    run = jnp.asarray(np.sort(ends, axis=1), jnp.int32)
    in_blocks = functools.partial(attend_in_documents, run=run, sight=Sight(causal, window, 64))
    whole = functools.partial(attend, run=run, causal=causal, by="xla", window=window)
    assert_alike((in_blocks, whole), 150, dtype, bound)


def test_block_sizes_follow_their_scores():
    assert [block_size(4, length, 32) for length in (300, 512, 513, 1000, 2048)] == [320, 512, 320, 512, 512]
    assert [block_size(rows, 8192, 32) for rows in (1, 4, 64)] == [1024, 512, 256]


def gradient(length, remat):
    """The jaxpr of a packed GPT's loss and gradients as it is traced for an H100, and its arguments."""
    config = dataclasses.replace(CONFIG, context=length, layers=1, remat=remat)
    model = nnx.jit(lambda: build(config, rngs=nnx.Rngs(0)))()
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, 64)
    run = jnp.arange(length)[None] // 300

    def loss(model):
        logits = model(tokens, segments=run)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    device = target("h100:1x1").devices[0]
    with tracing_on(jdp.make_mesh(devices=[device])), answered_for(device):
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(model)
    return traced, jax.jit(jax.value_and_grad(loss)), model


@pytest.mark.rest
@pytest.mark.aot
def test_traced_for_gpus_equals_traced_for_cpus():
    traced, plain, model = gradient(1100, "full")
    assert "1100,1100]" not in str(traced)
    ours = jax.jit(jax.extend.core.jaxpr_as_fun(traced))(*jax.tree.leaves(model))
    for mine, other in zip(ours, jax.tree.leaves(plain(model)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.aot
@pytest.mark.parametrize(("remat", "exponentials"), [("dots", 4), ("full", 6)])
@pytest.mark.default_ids("dots-4")
def test_dots_runs_attention_forward_once(remat, exponentials):
    traced, _, _ = gradient(1100, remat)
    assert str(traced).count("= exp ") == exponentials  # two in a pair forward, one backward; the loss' one


@pytest.mark.rest
@pytest.mark.aot
@pytest.mark.parametrize(("strategy", "partitioning"), [("zero3", None), ("ddp", "auto")])
def test_compiled_for_h100s_nothing_is_quadratic(strategy, partitioning):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1]), strategy)
    compiled, verdict = compiled_step("h100:1x8", CONFIG, plan, "segments", partitioning=partitioning)
    assert "2048,2048]" not in compiled.text
    stacks = set(re.findall(r"\[[\d,]*1024,1024\]", compiled.text))
    assert stacks == {"[1024,1024]", "[2,1024,1024]", "[2,2,2,1024,1024]"}  # of one pair: [rows, heads, shared, ...]
    assert verdict.kept, verdict.breaches


LLAMA = dataclasses.replace(models.LLAMA, context=12, scan=False)
GPT2 = dataclasses.replace(models.GPT2, context=12)
TOKENS = np.array(jax.random.randint(jax.random.key(7), (2, 12), 0, 19))
PACKED = np.array([[1] * 5 + [2] * 4 + [0] * 3, [7] * 3 + [8] * 9])  # two documents and padding; two that fill a row
DOCUMENTS = [(0, 0, 5), (0, 5, 9), (1, 0, 3), (1, 3, 12)]
WINDOW = dataclasses.replace(LLAMA, scan=True, window=3)
STYLES = pytest.mark.parametrize("config", [LLAMA, GPT2, WINDOW], ids=["llama", "gpt2", "window"])
forward = jax.jit(lambda model, tokens, segments=None: model(tokens, segments=segments))


def padded(row, start, end):
    return np.pad(TOKENS[row, start:end], (0, 12 - end + start))


@STYLES
@pytest.mark.default_ids("llama", "window")
def test_packed_documents_have_their_own_logits(config):
    model = make(config)
    packed, plain = np.asarray(forward(model, TOKENS, PACKED)), np.asarray(forward(model, TOKENS))
    assert np.any(np.abs(packed - plain)[:, 5:] > 0.1)  # what the segments shut out mattered
    for row, start, end in DOCUMENTS:
        alone = np.asarray(forward(model, np.stack([padded(row, start, end)] * 2)))  # two rows: the program of `plain`
        # Softmax over the row adds exact zeros for what is masked, but sums in another order.
        np.testing.assert_allclose(packed[row, start:end], alone[0, : end - start], rtol=1e-4, atol=1e-4)


def test_packed_batches_have_their_documents_gradients():
    model = make(GPT2)

    def total(model, tokens, segments, weights):
        return next_token_loss(model(tokens[:, :-1], segments=segments[:, :-1]), tokens[:, 1:], weights)[0]

    gradient = jax.jit(jax.grad(total))
    inside = (PACKED[:, 1:] == PACKED[:, :-1]) & (PACKED[:, 1:] > 0)
    twice = (np.concatenate([array, array]) for array in (TOKENS, PACKED))
    packed = gradient(model, *twice, np.concatenate([inside, np.zeros_like(inside)]))  # of as many rows as `apart`
    rows = [padded(*document) for document in DOCUMENTS]
    lengths = np.array([end - start for _, start, end in DOCUMENTS])
    weights = np.arange(1, 12) < lengths[:, None]
    apart = gradient(model, np.stack(rows), np.ones((4, 12), np.int32), weights)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(apart))
    for (path, mine), other in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5 * largest, err_msg=jax.tree_util.keystr(path))


def test_without_segments_no_mask_enters_the_program():
    model = make(LLAMA)
    trace = jax.make_jaxpr(lambda segments: model(TOKENS, segments=segments))
    plain, packed = str(trace(None)), str(trace(PACKED))
    assert "cumsum" in packed and "bool[2,1,12,12]" in packed
    assert "cumsum" not in plain and "bool[2,1,12,12]" not in plain
