"""The models against themselves in other forms, and their text with a cache.

Their logits are held against those of Hugging Face's models in `test_hugging_face.py`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp.models.gpt as gpt
from jdp.models import GPT, MLP, GPTConfig, MLPConfig, build, generate, next_token_loss
from jdp.models.decode import Draw, prefill, step, stream
from jdp.models.modules import dropout

LLAMA = GPTConfig(vocab_size=19, context=8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24)
GPT2 = dataclasses.replace(
    LLAMA, kv_heads=None, mlp_width=None, positions="learned", activation="gelu", norm="layer", tied=True, bias=True
)
QWEN = dataclasses.replace(LLAMA, head_dim=6, tied=True, qkv_bias=True, qk_norm=True, window=3)  # of Qwen2 and Qwen3
STYLES = pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN], ids=["llama", "gpt2", "qwen"])
TOKENS = jax.random.randint(jax.random.key(7), (2, 8), 0, 19)
KEY = jax.random.key(3)


# These programs run once: LLVM's optimisations would take longer than they save.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward = jit(lambda model, tokens, rng=None: model(tokens, rng=rng))


def make(config, **changes):
    """A model far from its start: matrices ten times their initial size, biases and scales off zero and one."""
    config = dataclasses.replace(config, **changes)
    model = jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, values(dataclasses.replace(config, dropout=0.0, remat=None)))
    return model


@functools.cache
def values(config):
    state = nnx.state(jit(lambda: GPT(config, rngs=nnx.Rngs(0)))())
    for path, leaf in nnx.to_flat_state(state):  # alike for a layer's slice of a stack and for the layer alone
        vector, value = path[-1] in ("bias", "scale"), np.asarray(leaf[...])
        changed = value + np.cos(np.arange(leaf.shape[-1])) / 20 if vector else 10 * value
        leaf[...] = jax.device_put(changed.astype(value.dtype))  # by NumPy: each operation would be a program
    return state


def leaves(model):
    """Parameters by path, the layers of an unrolled model stacked as a scanned model has them."""
    flat = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    names = {path.split("/", 2)[2] for path in flat if path.startswith("layers/0/")}
    stacked = {
        f"layers/{name}": np.stack([flat[f"layers/{i}/{name}"] for i in range(model.config.layers)]) for name in names
    }
    return stacked | {path: leaf for path, leaf in flat.items() if not (names and path.startswith("layers/"))}


def loss(model, rng=None):
    total, weight = next_token_loss(model(TOKENS[:, :-1], rng=rng), TOKENS[:, 1:], jnp.ones((2, 7)))
    return total / weight


def test_the_loss_is_weighted_cross_entropies():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32) + np.float32(1000)
    targets, weights = np.array([[0, 1, 2], [3, 4, -1]]), np.array([[1, 1, 0.5], [2, 0, 0]])
    probability = np.exp(logits.astype(np.float64) - 1000)
    probability /= probability.sum(-1, keepdims=True)
    expected = -sum(weights[b, t] * np.log(probability[b, t, targets[b, t]]) for b in range(2) for t in range(3))
    (total, weight), gradient = jit(jax.value_and_grad(next_token_loss, has_aux=True))(logits, targets, weights)
    assert (total.dtype, weight.dtype, total.shape, float(weight)) == (jnp.float32, jnp.float32, (), 4.5)
    assert float(total) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(gradient, weights[..., None] * (probability - np.eye(5)[targets]), atol=1e-4)


@STYLES
@pytest.mark.default_ids("llama")
def test_scanned_and_unrolled_start_from_the_same_bits(config):
    scanned, unrolled = (leaves(make(config, scan=scan)) for scan in (True, False))
    assert scanned.keys() == unrolled.keys()
    for path, leaf in scanned.items():
        np.testing.assert_array_equal(leaf, unrolled[path], err_msg=path)
    assert not np.any(np.equal(*scanned["layers/attention/query/kernel"]))


@functools.cache
def loss_and_gradients(scan, remat):
    model = make(LLAMA, dropout=0.25, scan=scan, remat=remat)
    value, gradients = jit(jax.value_and_grad(loss))(model, KEY)
    return float(value), leaves(gradients)


@pytest.mark.parametrize(
    ("scan", "remat"), [(False, None), (False, "full"), (True, "full"), (True, "dots"), (True, "dots_except_mlp")]
)
@pytest.mark.default_ids("True-dots")
def test_layer_loops_agree_in_loss_and_gradients(scan, remat):
    """Of one configuration: the loop does not know what is in a layer."""
    value, gradients = loss_and_gradients(True, None)
    other, others = loss_and_gradients(scan, remat)
    assert other == pytest.approx(value, rel=1e-5)
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    assert others.keys() == gradients.keys()
    for path, gradient in gradients.items():
        assert np.any(gradient != 0), path
        np.testing.assert_allclose(others[path], gradient, rtol=1e-3, atol=1e-5 * largest, err_msg=path)


@jit
def half(model):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)


@STYLES
@pytest.mark.default_ids("llama")
def test_sixteen_bit_parameters_give_float32_logits(config):
    model = half(make(config))
    features, logits = jax.eval_shape(lambda: (model.features(TOKENS), model(TOKENS)))
    assert (features.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    step = jit(jax.value_and_grad(loss))
    value, gradients = step(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    total, weight = jit(next_token_loss)(forward(make(config), TOKENS)[:, :-1], TOKENS[:, 1:], jnp.ones((2, 7)))
    assert float(value) == pytest.approx(float(total / weight), rel=0.05)
    program = step.lower(model).as_text().splitlines()
    products = [line for line in program if "dot_general " in line]
    sums = [line for line in program if "stablehlo.reduce(" in line and "stablehlo.add" in line]
    assert len(products) > 10 and len(sums) > 5
    for line in products:  # operands in bf16, or an algorithm that takes them so
        operands = line.split(" : ")[-1].split(" -> ")[0]
        assert "f32" not in operands.replace("bf16", "") or "lhs_precision_type = bf16" in line, line
    assert not [line for line in sums if "bf16" in line]  # on a GPU they would also be added up in bf16


def test_embedding_gradients_survive_sixteen_bits():
    """In bfloat16 256 + 1 is 256: a running sum of ones would stop there."""
    tokens = jnp.full((8, 500), 5)
    embed = half(jit(lambda: gpt.Embedding(dataclasses.replace(GPT2, context=500), rngs=nnx.Rngs(0)))())
    packed = jnp.full((8, 500), 3)
    gradient = jit(jax.grad(lambda embed: embed(tokens, packed).astype(jnp.float32).sum()))(embed)
    for table, row in ((gradient.tokens, 5), (gradient.positions, 3)):
        rows = np.asarray(table[...]).astype(np.float32)
        assert np.all(rows[row] == 4000) and np.all(rows[4] == 0)


def test_dropout_zeroes_the_rate_and_keeps_the_mean():
    drop = jit(lambda x: [dropout(x, 0.25, KEY, site=i) for i in (0, 1)])
    dropped, other = map(np.asarray, drop(np.ones((400, 100))))
    assert set(np.unique(dropped).tolist()) == {0.0, float(np.float32(1 / 0.75))}
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert np.any(dropped[0] != dropped[1]) and np.any(dropped != other)


@pytest.mark.parametrize("kind", [GPT, MLP])
def test_dropout_follows_its_key_and_is_off_without(kind):
    config, x = (LLAMA, TOKENS) if kind is GPT else (MLPConfig(8, (32,), 4), jnp.ones((2, 8)))
    configs = [dataclasses.replace(config, dropout=rate) for rate in (0.0, 0.5)]
    sure, model = jit(lambda: [build(config, rngs=nnx.Rngs(0)) for config in configs])()
    plain, first, again, other = forward(sure, x), *(forward(model, x, key) for key in (KEY, KEY, jax.random.key(4)))
    np.testing.assert_array_equal(first, again)
    assert jnp.any(first != other) and jnp.any(first != plain)
    np.testing.assert_array_equal(forward(model, x), plain)
    np.testing.assert_array_equal(forward(sure, x, KEY), plain)


@pytest.mark.parametrize("config", [LLAMA, dataclasses.replace(GPT2, tied=False)], ids=["llama", "gpt2"])
@pytest.mark.default_ids("llama")
def test_greedy_sampling_takes_the_likeliest_token(config):
    model, prompt = make(config), 3
    given = jax.random.randint(KEY, (2, prompt), 0, 19)
    tokens = jax.jit(lambda model: generate(model, given, length=5, temperature=0, rng=KEY))(model)
    assert (tokens.shape, tokens.dtype) == ((2, prompt + 5), given.dtype)
    np.testing.assert_array_equal(tokens[:, :prompt], given)
    np.testing.assert_array_equal(tokens[:, prompt:], forward(model, tokens)[:, prompt - 1 : -1].argmax(-1))
    assert len(np.unique(tokens[:, prompt:])) > 2


def test_initial_values_are_gpt2s():
    config = dataclasses.replace(GPT2, layers=4, width=256, vocab_size=512, context=64)
    model = jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()
    stds = {path: float(leaf.std()) for path, leaf in leaves(model).items()}
    residual = 0.02 / math.sqrt(2 * 4)
    for path, std in stds.items():
        expected = residual if path.endswith(("output/kernel", "down/kernel")) else 0.02
        expected = 0.01 if path == "embed/positions" else 0.0 if path.endswith(("bias", "scale")) else expected
        assert std == pytest.approx(expected, rel=0.05), path
    assert float(jit(loss)(model)) == pytest.approx(math.log(512), abs=0.2)


def streamed(prompt, length):
    return next(stream(make(LLAMA), prompt, length=length, draw=Draw(temperature=0.0), rng=KEY))


def packed(segments, **changes):
    config = dataclasses.replace(LLAMA, **changes)
    return jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))(TOKENS, segments=segments))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"heads": 3}, r"heads must divide width; given width\(16\) % heads\(3\) = 1\. Make width .* 18"),
        ({"kv_heads": 3}, r"kv_heads must divide heads; given heads\(4\) % kv_heads\(3\) = 1\. .*\[1, 2, 4\]"),
        ({"heads": 16, "kv_heads": 1}, r"must be even; given width\(16\) / heads\(16\) = 1"),
        ({"kv_heads": 0}, r"kv_heads is a positive integer; given 0"),
        ({"dropout": 1.0}, r"dropout is a rate in \[0, 1\); given 1\.0"),
        ({"remat": "some"}, r"given 'some'\. Choose one of \('dots', 'dots_except_mlp', 'full', None\)"),
        (
            {"rope_factor": 8.0, "rope_high_freq_factor": 1.0},
            r"rope_low_freq_factor is less than rope_high_freq_factor; given 1\.0 and 1\.0",
        ),
        ({"rope_factor": 8.0, "positions": "learned"}, r"rope_factor scales rotary positions; given positions = \"lea"),
        ({"norm_eps": -1.0}, r"norm_eps is positive; given -1\.0\. Raise it; the default is 1e-05"),
        (lambda: MLPConfig(4, (0,), 2), r"hidden is a tuple of positive integers; given \(0,\)"),
        (lambda: MLP(MLPConfig(4, (8,), 2), rngs=nnx.Rngs(0))(jnp.ones((1, 5))), r"features_in\(4\)\]; given \[1, 5\]"),
        (lambda: make(LLAMA)(jnp.zeros((1, 9), int)), r"at most context\(8\) tokens; given int32\[1, 9\]"),
        (lambda: make(LLAMA)(jnp.zeros((1, 8))), r"tokens are integers \[batch, length\]; given float32\[1, 8\]"),
        (lambda: generate(make(LLAMA), TOKENS, length=1, top_k=20, rng=KEY), r"vocab_size\(19\); given 20"),
        (lambda: generate(make(LLAMA), TOKENS[:, :0], length=1, rng=KEY), r"at least 1 token\]; given \[2, 0\]"),
        (lambda: streamed([], 1), "a prompt has 1 token at least; given 0"),
        (lambda: streamed([1, 2, 3], 6), r"context\(8\) tokens; given 3 \+ 6"),
        (lambda: generate(make(LLAMA), TOKENS[:, :3], length=6, rng=KEY), r"context\(8\) tokens; given 3 \+ 6"),
        (lambda: packed(jnp.ones((2, 7), int)), r"segments are integers \[2, 8\], as .* given int32\[2, 7\]"),
        (lambda: packed(jnp.ones((2, 8), int), attention="cudnn"), r"takes no segments; given segments\. Set attent"),
    ],
)
def test_broken_rules_are_refused_with_the_fix(wrong, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(LLAMA, **wrong) if isinstance(wrong, dict) else wrong()


def test_mlp_is_its_formula():
    model = jit(lambda: MLP(MLPConfig(3, (5,), 2, activation="tanh"), rngs=nnx.Rngs(0)))()
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    p = {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    first, last = ([p["layers", i, name] for name in ("kernel", "bias")] for i in (0, 1))
    expected = np.tanh(x @ first[0] + first[1]) @ last[0] + last[1]
    np.testing.assert_allclose(forward(model, x), expected, rtol=1e-5, atol=1e-6)
    assert jax.eval_shape(forward, half(model), x).dtype == jnp.float32


CONFIGS = {
    "gpt2": GPT2,
    "llama": dataclasses.replace(LLAMA, rope_factor=8.0, rope_original_context=4),
    "mistral": dataclasses.replace(LLAMA, window=3),
    "qwen": dataclasses.replace(QWEN, lora_rank=2),
    "qwen, unrolled": dataclasses.replace(QWEN, scan=False),
    "qwen, longer": dataclasses.replace(QWEN, context=160, window=20),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.default_ids("llama")
def test_cached_logits_equal_the_forward_pass(name):
    """Bound: float32 sums in another order, for logits of size one to ten."""
    model = make(CONFIGS[name])
    context, first = model.config.context, model.config.context - 3
    tokens = jax.random.randint(KEY, (2, context), 0, 19)
    padded = tokens.at[:, first:].set(5)  # what is after the prompt does not matter
    begin, go_on = jit(functools.partial(prefill, capacity=context)), jit(step)
    logits, cache = begin(model, padded, first - 1)
    found = [logits]
    for at in range(first, context):
        logits, cache = go_on(model, tokens[:, at], at, cache)
        found.append(logits)
    whole = forward(model, tokens)
    assert float(jnp.std(whole)) > 0.1
    np.testing.assert_allclose(np.stack(found, 1), whole[:, first - 1 :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("draw", [Draw(0.5), Draw(50.0, top_k=3)], ids=["plain", "top_k"])
@pytest.mark.default_ids("top_k")
def test_the_draws_are_those_of_generate(draw):
    """Also if a longer prompt shares the programs."""
    model, prompt = make(LLAMA), jnp.asarray([[3, 1]])
    given = generate(model, prompt, length=4, temperature=draw.temperature, top_k=draw.top_k, rng=KEY)
    for longest in (None, 4):
        assert [*stream(model, prompt[0], length=4, draw=draw, rng=KEY, longest=longest)] == given[0, 2:].tolist()


def test_draws_are_among_the_likeliest():
    """Of 0.5, 0.3, 0.15, 0.05: with top_p = 0.7 the first two, with 0.4 and less the first alone."""
    logits = jnp.log(jnp.tile(jnp.array([[0.15, 0.5, 0.05, 0.3]]), (200, 1)))
    nucleus = {1.0: {0, 1, 2, 3}, 0.9: {0, 1, 3}, 0.7: {1, 3}, 0.4: {1}, 1e-6: {1}}
    cases = {Draw(1.0, top_p=top_p): tokens for top_p, tokens in nucleus.items()}
    cases |= {Draw(50.0, top_k=k): tokens for k, tokens in ((None, {0, 1, 2, 3}), (3, {0, 1, 3}), (1, {1}))}  # uniform
    draw = jit(lambda key: [case(logits, key) for case in cases])
    drawn, other = (np.asarray(draw(key)) for key in (KEY, jax.random.key(4)))
    assert [{*tokens.tolist()} for tokens in drawn] == [*cases.values()]
    assert 0.5 < (drawn[2] == 1).mean() < 0.75  # 0.5 / 0.8, give or take three standard deviations
    assert np.any(drawn[2] != other[2])
