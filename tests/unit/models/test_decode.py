"""Text with a cache of keys and values: its logits and tokens are those of the whole forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import GPT2, KEY, LLAMA, QWEN, forward, make

from jdp.models import generate
from jdp.models.decode import Draw, prefill, step, stream

CONFIGS = {
    "gpt2": GPT2,
    "llama": dataclasses.replace(LLAMA, rope_factor=8.0, rope_original_context=4),
    "mistral": dataclasses.replace(LLAMA, window=3),
    "qwen": dataclasses.replace(QWEN, lora_rank=2),
    "qwen, unrolled": dataclasses.replace(QWEN, scan=False),
    "qwen, longer": dataclasses.replace(QWEN, context=160, window=20),
}
GREEDY = Draw(temperature=0.0)
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


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


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_unequal_prompts_continue_as_alone(name):
    """Each token is the likeliest of the whole forward pass on the tokens before it."""
    model = make(CONFIGS[name])
    for size in (1, 3, 5):
        prompt = [*range(size)]
        text = [*stream(model, prompt, length=3, draw=GREEDY, rng=KEY, longest=5)]
        logits = forward(model, jnp.asarray([[*prompt, *text, *[0] * (5 - size)]]))[0]
        assert text == logits[size - 1 : size + 2].argmax(-1).tolist()


@pytest.mark.parametrize("draw", [Draw(0.5), Draw(50.0, top_k=3)], ids=["plain", "top_k"])
@pytest.mark.default_ids("top_k")
def test_the_draws_are_those_of_generate(draw):
    model, prompt = make(LLAMA), jnp.asarray([[3, 1]])
    given = generate(model, prompt, length=6, temperature=draw.temperature, top_k=draw.top_k, rng=KEY)
    assert [*stream(model, prompt[0], length=6, draw=draw, rng=KEY)] == given[0, 2:].tolist()


@pytest.mark.rest
def test_top_p_draws_among_the_likeliest():
    """0.5, 0.3, 0.15, 0.05: of 0.7 the first two, of 0.4 and less the first alone."""
    logits = jnp.log(jnp.tile(jnp.array([[0.15, 0.5, 0.05, 0.3]]), (200, 1)))
    for top_p, tokens in ((1.0, {0, 1, 2, 3}), (0.9, {0, 1, 3}), (0.7, {1, 3}), (0.4, {1}), (1e-6, {1})):
        assert {*Draw(1.0, top_p=top_p)(logits, KEY).tolist()} == tokens
    drawn = Draw(1.0, top_p=0.7)(logits, KEY)
    assert 0.5 < float(jnp.mean(drawn == 1)) < 0.75  # 0.5 / 0.8, give or take three standard deviations
    assert {*Draw(1.0, top_k=1, top_p=1.0)(logits, KEY).tolist()} == {1}
