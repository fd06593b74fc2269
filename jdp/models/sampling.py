"""Generate text, one token at a time, in arrays of constant shape.

The sequence so far is at the start of a [batch, prompt + length] array. Each step reads a window of at most `context`
tokens that ends with the newest, computes its logits, draws a token and appends it. At first the window also covers
unwritten positions, which do not matter because the model is causal. There is no cache of keys and values, because the
window moves: a step costs a whole forward pass. `decode` has the cache, for text that fits into the context.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jdp.models.checks import require
from jdp.models.gpt import GPT


@dataclass(frozen=True)
class Draw:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens; None: among all.
        top_p: draw among the likeliest of these with this total probability (arXiv:1904.09751, section 3.1); None:
            among all.
    """

    temperature: float = 1.0
    top_k: int | None = None
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


def generate(
    model: GPT,
    prompt: jax.Array,
    *,
    length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    rng: jax.Array,
) -> jax.Array:
    """Continue each row of the prompt by `length` tokens: [batch, prompt + length] in the prompt's dtype.

    Works inside `jax.jit` as well; `length`, `temperature` and `top_k` must then be static.

    Args:
        model: a GPT; it reads the last `context` tokens of a longer sequence.
        prompt: [batch, prompt] integers, at least one token.
        length: tokens to add.
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
    require(length >= 0, "length is the number of tokens to add", f"{length}", "Make it 0 or more")
    return _generate(model, prompt, rng, length, draw)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _generate(model: GPT, prompt: jax.Array, rng: jax.Array, length: int, draw: Draw) -> jax.Array:
    total = prompt.shape[1] + length
    window = min(model.config.context, total)

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        end = prompt.shape[1] + i
        start = jnp.maximum(end - window, 0)
        features = model.features(jax.lax.dynamic_slice_in_dim(tokens, start, window, axis=1))
        newest = jax.lax.dynamic_index_in_dim(features, end - 1 - start, axis=1, keepdims=False)
        drawn = draw(model.logits(newest), jax.random.fold_in(rng, i))
        return jax.lax.dynamic_update_index_in_dim(tokens, drawn.astype(tokens.dtype), end, axis=1)

    return jax.lax.fori_loop(0, length, step, jnp.pad(prompt, ((0, 0), (0, length))))
