"""Generate text with a cache of keys and values; prompt and text fit into the model's context.

`prefill` runs the prompt, and `step` one token. Shapes are constant, so each is compiled once. Their logits equal those
of a call of the model on all tokens so far. `stream` yields the tokens; `generate` and `continued` return them from one
program. A prompt may be padded at its end, because a position is written before a query sees it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from jdp.models.configs import require
from jdp.models.gpt import GPT
from jdp.models.transformer import Attention, Layer


@dataclass(frozen=True)
class Draw:
    """How a token is drawn."""

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token
    top_k: int | None = None  # draw among the k likeliest tokens; None: among all
    # draw among the likeliest of these with this total probability (arXiv:1904.09751, section 3.1); None: among all
    top_p: float | None = None

    @staticmethod
    def checked(vocabulary: int, temperature: float, top_k: int | None, top_p: float | None = None) -> Draw:
        """Return a draw among `vocabulary` tokens. Raises ValueError for a number out of range."""
        fits = 0 <= temperature < math.inf
        require(fits, "temperature is 0 or more", f"{temperature}", "0 takes the likeliest token")
        fits = top_k is None or 1 <= top_k <= vocabulary
        require(fits, f"top_k is between 1 and vocab_size({vocabulary})", f"{top_k}", "Without it all tokens are drawn")
        fits = top_p is None or 0 < top_p <= 1
        require(fits, "top_p is a probability above 0", f"{top_p}", "Without it all tokens are drawn")
        return Draw(float(temperature), top_k, top_p)

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Draw one token a row: [batch, vocab_size] float32 -> [batch] integers."""
        if self.temperature == 0.0:
            return jnp.argmax(logits, axis=-1)
        if self.top_k is None and self.top_p is None:
            return jax.random.categorical(key, logits / self.temperature, axis=-1)
        best, tokens = jax.lax.top_k(logits, self.top_k or logits.shape[-1])
        best = best / self.temperature
        if self.top_p is not None:
            share = jax.nn.softmax(best, axis=-1)
            best = jnp.where(jnp.cumsum(share, axis=-1) - share < self.top_p, best, -jnp.inf)  # the first always is
        choice = jax.random.categorical(key, best, axis=-1)
        return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0]


class KeyValues(NamedTuple):
    """Rotated keys and values of a layer: [batch, capacity, kv_heads, D], or stacked over layers."""

    key: jax.Array
    value: jax.Array


Cache = KeyValues | list[KeyValues]
"""One stack for a scanned model, else a list with an entry for each layer."""
Block = Callable[[Layer, jax.Array, KeyValues | None], tuple[jax.Array, KeyValues]]
"""The computation of a layer: layer, activations, its cache -> activations, its cache."""


def prefill(model: GPT, tokens: jax.Array, last: jax.Array, capacity: int) -> tuple[jax.Array, Cache]:
    """Return the logits after position `last`, [batch, vocab_size] float32, and a cache of `capacity` positions.

    The tokens [batch, length] are padded with any tokens after the prompt's last, at position `last` [].
    """

    def block(layer: Layer, x: jax.Array, _: KeyValues | None) -> tuple[jax.Array, KeyValues]:
        query, key, value = layer.attention.heads(layer.attention_norm(x), None)
        mixed = layer.attention.mix(query, key, value, None)
        room = ((0, 0), (0, capacity - x.shape[1]), (0, 0), (0, 0))
        return layer.after_attention(x, mixed, None), KeyValues(jnp.pad(key, room), jnp.pad(value, room))

    x, cache = _through_layers(block, model, model.embed(tokens), None)
    newest = jax.lax.dynamic_index_in_dim(model.final_norm(x), last, axis=1, keepdims=False)
    return model.logits(newest), cache


def step(model: GPT, tokens: jax.Array, at: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Return the logits after one more token of each row, [batch, vocab_size] float32, and the cache with it.

    The tokens [batch] have the position `at` []; the cache has all earlier positions.
    """
    position = jnp.broadcast_to(at, (tokens.shape[0], 1))

    def block(layer: Layer, x: jax.Array, cached: KeyValues | None) -> tuple[jax.Array, KeyValues]:
        assert cached is not None
        query, key, value = layer.attention.heads(layer.attention_norm(x), position)
        places = (0, at, 0, 0)
        key = jax.lax.dynamic_update_slice(cached.key, key.astype(cached.key.dtype), places)
        value = jax.lax.dynamic_update_slice(cached.value, value.astype(cached.value.dtype), places)
        mixed = _attend_to_cache(layer.attention, query, key, value, at)
        return layer.after_attention(x, mixed, None), KeyValues(key, value)

    x, cache = _through_layers(block, model, model.embed(tokens[:, None], position), cache)
    return model.logits(model.final_norm(x)[:, 0]), cache


def _attend_to_cache(
    attention: Attention, query: jax.Array, key: jax.Array, value: jax.Array, at: jax.Array
) -> jax.Array:
    """Return attention of one query in each row to the keys up to its position, in the window: [batch, 1, width]."""
    index, window = jnp.arange(key.shape[1], dtype=jnp.int32), attention.config.window
    seen = index <= at
    if window is not None:
        seen &= at - index < window
    mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None, None], implementation="xla")
    return attention.output(mixed.reshape(*mixed.shape[:2], -1))


def _through_layers(block: Block, model: GPT, x: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
    """Run a block through the layers, each with its part of the cache; return activations and the new cache."""
    layers = model.layers
    if isinstance(layers, nnx.List):
        assert not isinstance(cache, KeyValues)
        made: list[KeyValues] = []
        for i, layer in enumerate(layers):
            x, each = block(layer, x, None if cache is None else cache[i])
            made.append(each)
        return x, made
    assert not isinstance(cache, list)
    return jax.lax.scan(lambda x, each: block(each[0], x, each[1]), x, (layers, cache))


@functools.partial(jax.jit, static_argnames=("capacity", "draw"))
def _first(
    model: GPT, tokens: jax.Array, last: jax.Array, rng: jax.Array, *, capacity: int, draw: Draw
) -> tuple[jax.Array, Cache]:
    logits, cache = prefill(model, tokens, last, capacity)
    return draw(logits, jax.random.fold_in(rng, 0)), cache


@functools.partial(jax.jit, static_argnames=("draw",), donate_argnames=("cache",))
def _next(
    model: GPT, token: jax.Array, at: jax.Array, number: jax.Array, rng: jax.Array, cache: Cache, *, draw: Draw
) -> tuple[jax.Array, Cache]:
    logits, cache = step(model, token, at, cache)
    return draw(logits, jax.random.fold_in(rng, number)), cache


def stream(
    model: GPT, prompt: ArrayLike, *, length: int, draw: Draw, rng: jax.Array, longest: int | None = None
) -> Iterator[int]:
    """Yield up to `length` tokens after a prompt [prompt], as soon as they are drawn; token i with `fold_in(rng, i)`.

    `longest` is the length of the longest prompt, if several share the compiled programs; None: of this prompt.

    Raises:
        ValueError: an empty prompt, or more tokens than the context holds.
    """
    tokens = np.asarray(prompt, np.int32)
    longest = max(longest or 0, tokens.size)
    require(tokens.ndim == 1 and tokens.size > 0, "a prompt has 1 token at least", f"{tokens.size}", "Begin with some")
    _check_fits(model, longest, length)
    padded = np.pad(tokens, (0, longest - tokens.size))[None]
    token, cache = _first(model, padded, jnp.int32(tokens.size - 1), rng, capacity=longest + length, draw=draw)
    for i in range(1, length + 1):
        yield int(token[0])
        if i < length:
            at = jnp.int32(tokens.size + i - 1)
            token, cache = _next(model, token, at, jnp.int32(i), rng, cache, draw=draw)


def continued(model: GPT, tokens: jax.Array, last: jax.Array, rng: jax.Array, *, length: int, draw: Draw) -> jax.Array:
    """Return the tokens after each prompt, [batch, length] int32, as `stream` does, but inside `jax.jit`.

    The model may be sharded; prompt and text fit into its `context`. The tokens [batch, prompt] are padded after
    position `last` [] with any tokens; `length` is at least 1.
    """
    logits, cache = prefill(model, tokens, last, tokens.shape[1] + length)

    def go_on(i: jax.Array, carried: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        text, kept = carried
        newest = jax.lax.dynamic_index_in_dim(text, i - 1, axis=1, keepdims=False)
        logits, kept = step(model, newest, last + i, kept)
        drawn = draw(logits, jax.random.fold_in(rng, i)).astype(text.dtype)
        return jax.lax.dynamic_update_index_in_dim(text, drawn, i, axis=1), kept

    text = jnp.zeros((tokens.shape[0], length), jnp.int32)
    text = text.at[:, 0].set(draw(logits, jax.random.fold_in(rng, 0)).astype(jnp.int32))
    return jax.lax.fori_loop(1, length, go_on, (text, cache))[0]


_jitted = jax.jit(continued, static_argnames=("length", "draw"))


def generate(
    model: GPT, prompt: jax.Array, *, length: int, temperature: float = 1.0, top_k: int | None = None, rng: jax.Array
) -> jax.Array:
    """Continue each row of the prompt by `length` tokens: [batch, prompt + length] in the prompt's dtype.

    Works inside `jax.jit` as well; `length`, `temperature` and `top_k` must then be static.

    Args:
        model: a GPT.
        prompt: [batch, prompt] integers, at least one token.
        length: tokens to add, at least 1; with the prompt they fit into the model's `context`.
        temperature: divides the logits before drawing; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens; None: among all.
        rng: typed key. Step i draws with `fold_in(rng, i)`.

    Raises:
        ValueError: an empty prompt, or a number out of range.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from jdp.models import GPTConfig
    >>> config, key = GPTConfig(vocab_size=16, context=8, layers=1, width=8, heads=2), jax.random.key(0)
    >>> jax.eval_shape(lambda: generate(GPT(config, rngs=nnx.Rngs(0)), jnp.zeros((1, 3), int), length=5, rng=key)).shape
    (1, 8)
    """
    draw = Draw.checked(model.config.vocab_size, temperature, top_k)
    shape_fits = prompt.ndim == 2 and prompt.shape[1] > 0
    require(shape_fits, "a prompt is [batch, at least 1 token]", f"{list(prompt.shape)}", "Begin with some token")
    require(length >= 1, "length is the number of tokens to add", f"{length}", "Make it 1 or more")
    _check_fits(model, prompt.shape[1], length)
    text = _jitted(model, prompt, jnp.int32(prompt.shape[1] - 1), rng, length=length, draw=draw)
    return jnp.concatenate([prompt, text.astype(prompt.dtype)], axis=1)


def _check_fits(model: GPT, prompt: int, length: int) -> None:
    context = model.config.context
    rule = f"prompt and text have at most context({context}) tokens"
    require(prompt + length <= context, rule, f"{prompt} + {length}", "Ask for fewer")
