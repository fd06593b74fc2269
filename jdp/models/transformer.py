"""The transformer layers that GPT and ViT are made of, and the loop over them.

The layers are alike, so a scanned model stacks them: `layers/attention/query/kernel` is [layers, width, width] and one
compiled block serves all. An unrolled model (`scan=False`) holds `layers/0/...`, `layers/1/...`; for the same seed
these are the slices of the stack, bit for bit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdp.core.layers import scan_layers
from jdp.core.traced_device import traced_device
from jdp.models.attention import attend
from jdp.models.configs.choices import Activation, Attend, NormKind, Remat
from jdp.models.modules import Linear, LoRA, Norm, dropout


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for a longer context, as Llama 3.1 has them (meta-llama/llama-models, `apply_scaling`).

    Fields:
        factor: the lowest frequencies are divided by it.
        low_freq_factor, high_freq_factor: a frequency that turns less often than the first in `original_context` is
            divided, one that turns more often than the second is kept; between the two, linearly more of it is kept.
        original_context: tokens of the context before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the scaled frequencies, in radians per position; input and result are float64."""
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LayerConfig:
    """Shape and choices of one layer, with every default resolved. A model's configuration builds and checks it.

    Fields:
        width, heads, kv_heads, hidden: as `GPTConfig` has them; `hidden` is the feed-forward's.
        std, residual_std: of kernels, and of the two that write to the residual stream; None: Glorot's, by shape.
        causal: a position sees itself and those before it; else all.
        rope_theta: base of the rotary wavelengths; None: queries and keys are not turned.
        rope_scaling: of the rotary frequencies; None: they stay.
    """

    width: int
    heads: int
    kv_heads: int
    hidden: int
    activation: Activation
    norm: NormKind
    norm_eps: float
    bias: bool
    dropout: float
    attention: Attend
    causal: bool
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    std: float | None = None
    residual_std: float | None = None
    lora: LoRA | None = None

    def make_norm(self) -> Norm:
        """Return a new norm of the residual stream."""
        centered = self.norm == "layer"
        return Norm(self.width, center=centered, bias=self.bias and centered, eps=self.norm_eps)

    def linear(self, features_in: int, features_out: int, *, residual: bool = False, rngs: nnx.Rngs) -> Linear:
        """Return a new linear map; with `residual`, one that writes to the residual stream."""
        std = self.residual_std if residual else self.std
        return Linear(features_in, features_out, std=std, bias=self.bias, lora=self.lora, rngs=rngs)


class Segments(NamedTuple):
    """The document of each token of packed rows, and its position in it: both int32 [batch, length].

    Fields:
        run: number of the document in its row, counted from zero.
        position: of a token in its document, from zero.
    """

    run: jax.Array
    position: jax.Array

    @classmethod
    def of(cls, segments: jax.Array) -> "Segments":
        """Build from integers [batch, length] that are constant inside a document and differ between neighbours."""
        changed = segments[:, 1:] != segments[:, :-1]
        begins = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
        index = jnp.arange(segments.shape[1], dtype=jnp.int32)
        start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
        return cls(jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1, index - start)


class Layer(nnx.Module):
    """Pre-norm transformer layer: [batch, length, width] -> [batch, length, width]."""

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = config.make_norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = config.make_norm()
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x: jax.Array, key: jax.Array | None, segments: Segments | None = None) -> jax.Array:
        x = x + dropout(self.attention(self.attention_norm(x), segments), self.dropout, key, site=0)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, key, site=1)


class Attention(nnx.Module):
    """Self-attention (arXiv:1706.03762) with grouped key and value heads, on [batch, length, width]."""

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs) -> None:
        width, shared = config.width, config.kv_heads * (config.width // config.heads)
        self.config = config
        self.query = config.linear(width, width, rngs=rngs)
        self.key = config.linear(width, shared, rngs=rngs)
        self.value = config.linear(width, shared, rngs=rngs)
        self.output = config.linear(width, width, residual=True, rngs=rngs)

    def __call__(self, x: jax.Array, segments: Segments | None = None) -> jax.Array:
        config = self.config
        query, key, value = (
            project(x).reshape(*x.shape[:-1], -1, config.width // config.heads)
            for project in (self.query, self.key, self.value)
        )
        if config.rope_theta is not None:
            position = None if segments is None else segments.position
            query, key = (rotate(x, config.rope_theta, position, config.rope_scaling) for x in (query, key))
        run = None if segments is None else segments.run
        mixed = attend(query, key, value, causal=config.causal, run=run, by=config.attention)
        return self.output(mixed.reshape(x.shape))


class FeedForward(nnx.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` for swiglu, on [batch, length, width].

    gelu is the tanh form, as GPT-2 has it, or with `gelu_exact` that with the error function (arXiv:1606.08415).
    """

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs) -> None:
        self.up = config.linear(config.width, config.hidden, rngs=rngs)
        gated = config.activation == "swiglu"
        self.gate = config.linear(config.width, config.hidden, rngs=rngs) if gated else None
        self.down = config.linear(config.hidden, config.width, residual=True, rngs=rngs)
        self.approximate = config.activation != "gelu_exact"

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=self.approximate))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotate(
    x: jax.Array, theta: float, position: jax.Array | None = None, scaling: RopeScaling | None = None
) -> jax.Array:
    """Rotate each pair (x[i], x[i + D/2]) of a head by position * theta^(-2i/D) radians (arXiv:2104.09864, eq. 34).

    The pairing is that of GPT-NeoX and of Llama in Hugging Face's layout; Meta's files pair neighbours instead, which
    is the same model with the columns of the query and key kernels permuted.

    Args:
        x: [batch, length, heads, D], D even. Angles and products are float32; the result has x's dtype.
        theta: base of the wavelengths.
        position: [batch, length] integers; None: 0, 1, 2, ... in every row.
        scaling: of the frequencies theta^(-2i/D); None: they stay.
    """
    size = x.shape[-1]
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    frequencies = np.float32(frequencies if scaling is None else scaling.scaled(frequencies))
    if position is None and traced_device().platform == "cpu":
        # constants: XLA:CPU computes the cosine and sine of an angle for every row and head that it turns
        angles = np.arange(x.shape[1], dtype=np.float32)[:, None, None] * frequencies
        cos, sin = np.cos(angles), np.sin(angles)
    else:
        position = jnp.arange(x.shape[1], dtype=jnp.float32) if position is None else position.astype(jnp.float32)
        angles = position[..., None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def make_layers(config: LayerConfig, count: int, key: jax.Array, *, scan: bool) -> Layer | nnx.List[Layer]:
    """Return all layers, stacked or as a list. Layer i's values depend on (key, i) only, so both have equal values."""

    def make(key: jax.Array) -> Layer:
        return Layer(config, rngs=nnx.Rngs(key))

    keys = fold_range(key, count)
    return jax.vmap(make)(keys) if scan else nnx.List([make(keys[i]) for i in range(count)])


def run_layers(
    layers: Layer | nnx.List[Layer],
    x: jax.Array,
    keys: jax.Array | None,
    *,
    remat: Remat | None,
    segments: Segments | None = None,
) -> jax.Array:
    """Apply all layers to x.

    Args:
        layers: as `make_layers` returns them.
        x: [batch, length, width], as is the result.
        keys: [layers] typed keys for dropout; None: no dropout.
        remat: as for `scan_layers`.
        segments: documents of packed rows, which do not attend to each other; None: a row is one document.
    """
    # The parameters are passed as the module's own arrays: a sharding plan recognises them by identity, and gathers a
    # layer's when the loop reaches it. `scan_layers` unrolls a list, and scans a tuple as one tree.
    stacked = (layers, keys)
    if isinstance(layers, nnx.List):
        stacked = [(layer, None if keys is None else keys[i]) for i, layer in enumerate(layers)]

    def block(layer_and_key: tuple[Layer, jax.Array | None], x: jax.Array) -> jax.Array:
        layer, key = layer_and_key
        return layer(x, key, segments)

    return scan_layers(block, stacked, x, remat=remat)


def fold_range(key: jax.Array, count: int) -> jax.Array:
    """Return `fold_in(key, i)` for i in range(count): unlike with `split`, key i does not depend on `count`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
