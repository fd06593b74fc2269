"""Larger models of the table of losses: a GPT's block, a Llama in a scan over its layers, a convolutional net."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from loss_entries import weights_of

WORDS, WIDTH, LENGTH = 11, 8, 6


class Block(nnx.Module):
    """One layer of a GPT, with dropout."""

    def __init__(self, rngs):
        self.embed, self.position = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.before, self.after = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        q, k, v = (part.reshape(*part.shape[:2], 2, -1) for part in jnp.split(self.qkv(self.before(x)), 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.reshape(x.shape)))
        return self.embed.attend(self.after(x))


def init_block(rng):
    return Block(nnx.Rngs(rng))


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x):
    """RoPE (arXiv:2104.09864)."""
    angles = jnp.arange(x.shape[1])[:, None] / 10 ** jnp.arange(x.shape[-1] // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


@jax.checkpoint
def llama_layer(x, layer):
    h = rms_norm(x, layer["scale"])
    q, k, v = (h @ layer[name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", rotate(q), rotate(k)) / np.sqrt(WIDTH)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    return x + jax.nn.silu(weights @ v @ layer["up"]) @ layer["down"], None


STACKED = dict.fromkeys("qkv", (2, WIDTH, WIDTH)) | {"scale": (2, WIDTH)}
LLAMA = weights_of(embed=(WORDS, WIDTH), up=(2, WIDTH, WIDTH), down=(2, WIDTH, WIDTH), **STACKED)


def llama(params, tokens):
    """The logits of each next token."""
    layers = {name: leaf for name, leaf in params.items() if name != "embed"}
    x, _ = jax.lax.scan(llama_layer, params["embed"][tokens], layers)
    return jnp.einsum("btd,vd->btv", x, params["embed"]).astype(jnp.float32)


class ConvNet(nnx.Module):
    """Two convolutions with GroupNorm; logits of the pixels."""

    def __init__(self, rngs):
        self.first = nnx.Conv(2, WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.last = nnx.Conv(WIDTH, 4, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def init_conv(rng):
    return ConvNet(nnx.Rngs(rng))
