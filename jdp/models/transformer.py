"""The transformer layers of GPT and ViT, and the loop over them.

The layers have equal shapes, so a scanned model stacks them: `layers/attention/query/kernel` is [layers, width, width],
and one compiled block serves all. An unrolled model (`scan=False`) has `layers/0/...`, `layers/1/...`; for the same
seed these are the slices of the stack, bit for bit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jdp.core.layers import looped
from jdp.core.rematerialisation import ATTENTION
from jdp.core.sharding.mesh import traced_device
from jdp.models.attention import attend
from jdp.models.configs import GPTConfig, ViTConfig
from jdp.models.modules import Linear, LoRA, Norm, dropout, mapped


@dataclass(frozen=True)
class LayerSpec:
    """A GPT's layer by the fields of its configuration, or a layer of another model, which differs in these."""

    config: GPTConfig
    causal: bool = True
    std: float | None = None  # of kernels; None: Glorot's, by shape
    residual_std: float | None = None  # of the two kernels that write to the residual stream

    def make_norm(self, width: int | None = None) -> Norm:
        """Return a new norm of the residual stream, or with a width an RMS norm of heads."""
        config = self.config
        centered = config.norm == "layer" and width is None
        return Norm(width or config.width, center=centered, bias=config.bias and centered, eps=config.norm_eps)

    def linear(self, name: str, features_in: int, features_out: int, *, bias: bool = False, rngs: nnx.Rngs) -> Linear:
        """Return a new linear map; by name, "output" and "down" write to the residual stream."""
        config, lora = self.config, None
        std = self.residual_std if name in ("output", "down") else self.std
        if config.lora_rank is not None and (config.lora_targets is None or name in config.lora_targets):
            lora = LoRA(config.lora_rank, config.lora_alpha)
        return Linear(features_in, features_out, std=std, bias=config.bias or bias, lora=lora, rngs=rngs)


class Segments(NamedTuple):
    """The document of each token of packed rows, and its position in it: both int32 [batch, length]."""

    run: jax.Array  # number of the document in its row, counted from zero
    position: jax.Array  # of a token in its document, from zero

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

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = spec.make_norm()
        self.attention = Attention(spec, rngs=rngs)
        self.mlp_norm = spec.make_norm()
        self.mlp = FeedForward(spec, rngs=rngs)
        self.dropout = spec.config.dropout

    def __call__(self, x: jax.Array, key: jax.Array | None, segments: Segments | None = None) -> jax.Array:
        return self.after_attention(x, self.attention(self.attention_norm(x), segments), key)

    def after_attention(self, x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return the layer's output from its input x and the result of attention, y."""
        x = checkpoint_name(x + dropout(y, self.dropout, key, site=0), ATTENTION)  # saved instead of the product
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, key, site=1)


class Attention(nnx.Module):
    """Self-attention (arXiv:1706.03762) with grouped key and value heads, on [batch, length, width]."""

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs) -> None:
        self.config, self.causal = spec.config, spec.causal
        width, size, bias = self.config.width, self.config.head_width, self.config.qkv_bias
        kv_width = self.config.key_value_heads * size
        self.query = spec.linear("query", width, self.config.heads * size, bias=bias, rngs=rngs)
        self.key = spec.linear("key", width, kv_width, bias=bias, rngs=rngs)
        self.value = spec.linear("value", width, kv_width, bias=bias, rngs=rngs)
        self.output = spec.linear("output", self.config.heads * size, width, rngs=rngs)
        self.query_norm = spec.make_norm(size) if self.config.qk_norm else None
        self.key_norm = spec.make_norm(size) if self.config.qk_norm else None

    def __call__(self, x: jax.Array, segments: Segments | None = None) -> jax.Array:
        query, key, value = self.heads(x, None if segments is None else segments.position)
        return self.mix(query, key, value, None if segments is None else segments.run)

    def heads(self, x: jax.Array, position: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values [batch, length, heads, D], rotated by position; None: 0, 1, ..."""
        query, key, value = (
            checkpoint_name(y, ATTENTION).reshape(*x.shape[:-1], -1, self.config.head_width)
            for y in mapped(x, self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.positions == "rotary":
            frequencies = rope_frequencies(self.config)
            query, key = (rotate(x, frequencies, position) for x in (query, key))
        if self.query_norm is None:  # the backward pass of a norm reads the projections, which are then kept
            query, key, value = (checkpoint_name(x, ATTENTION) for x in (query, key, value))
        return query, key, value

    def mix(self, query: jax.Array, key: jax.Array, value: jax.Array, run: jax.Array | None) -> jax.Array:
        """Return attention of these heads, mapped to [batch, length, width]; `run` as for `attend`."""
        config = self.config
        mixed = attend(query, key, value, causal=self.causal, window=config.window, run=run, by=config.attention)
        return checkpoint_name(self.output(mixed.reshape(*mixed.shape[:2], -1)), ATTENTION)


class FeedForward(nnx.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` for swiglu, on [batch, length, width].

    gelu is GPT-2's tanh form; `gelu_exact` uses the error function (arXiv:1606.08415).
    """

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs) -> None:
        width, hidden = spec.config.width, spec.config.hidden_width
        self.up = spec.linear("up", width, hidden, rngs=rngs)
        self.gate = spec.linear("gate", width, hidden, rngs=rngs) if spec.config.gated else None
        self.down = spec.linear("down", hidden, width, rngs=rngs)
        self.activation = spec.config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            y = self.up(x)
            return self.down(jax.nn.gelu(y, approximate=False) if self.activation == "gelu_exact" else _gelu(y))
        gate, up = mapped(x, self.gate, self.up)
        return self.down(jax.nn.silu(gate) * up)


def _gelu(x: jax.Array) -> jax.Array:
    """Return the tanh form of gelu (arXiv:1606.08415) as a sigmoid: (1 + tanh(u)) / 2 = sigmoid(2 u).

    In the backward pass of a 16-bit tanh, XLA makes an extra kernel, which reads and writes all of x.
    """
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def rope_frequencies(config: GPTConfig) -> np.ndarray:
    """Return the rotary frequencies, theta^(-2i/D) radians per position: float64 [D/2].

    For a longer context they are scaled as in Llama 3.1 (meta-llama/llama-models, `apply_scaling`). A frequency with
    fewer than `low` rotations in the original context is divided by the factor. With more than `high` rotations it
    stays; in between, the two are interpolated linearly.
    """
    frequencies = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
    if config.rope_factor is None:
        return frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_context * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def rotate(x: jax.Array, frequencies: np.ndarray, position: jax.Array | None = None) -> jax.Array:
    """Rotate each pair (x[i], x[i + D/2]) of a head by position * frequencies[i] radians (arXiv:2104.09864, eq. 34).

    The pairing is that of GPT-NeoX and of Llama in Hugging Face's layout. Meta's files pair neighbours instead, with
    permuted columns of the query and key kernels.

    x is [batch, length, heads, D], D even; angles and products are float32, the result has x's dtype. `position` is
    [batch, length] integers; None: 0, 1, 2, ... in every row.
    """
    frequencies = frequencies.astype(np.float32)
    if position is None and traced_device().platform == "cpu":
        # constants: XLA:CPU would compute cosine and sine for every row and head
        angles = np.arange(x.shape[1], dtype=np.float32)[:, None, None] * frequencies
        cos, sin = np.cos(angles), np.sin(angles)
    else:
        position = jnp.arange(x.shape[1], dtype=jnp.float32) if position is None else position.astype(jnp.float32)
        angles = position[..., None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def make_layers(spec: LayerSpec, key: jax.Array) -> Layer | nnx.List[Layer]:
    """Return all layers, stacked or as a list, with equal values: layer i's depend on (key, i) only."""

    def make(key: jax.Array) -> Layer:
        return Layer(spec, rngs=nnx.Rngs(key))

    keys = fold_range(key, spec.config.layers)
    return jax.vmap(make)(keys) if spec.config.scan else nnx.List([make(each) for each in keys])


def run_layers(
    layers: Layer | nnx.List[Layer],
    x: jax.Array,
    config: GPTConfig | ViTConfig,
    rng: jax.Array | None,
    segments: Segments | None = None,
    after: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Apply dropout and the layers of `make_layers` to the embedding x [batch, length, width]; `after` as in `looped`.

    `rng` is for dropout (None: no dropout), and `segments` are the documents of packed rows.
    """
    keys = None
    if rng is not None and config.dropout > 0:
        keys = fold_range(rng, config.layers)
        x = dropout(x, config.dropout, jax.random.fold_in(rng, config.layers), site=0)
    # The parameters are passed as the module's own arrays, because a sharding plan recognises them by identity, and
    # gathers a layer when the loop reaches it. `looped` unrolls a list, and scans a tuple as one tree.
    if isinstance(layers, nnx.List):
        stacked = [(layer, None if keys is None else keys[i]) for i, layer in enumerate(layers)]
    else:
        stacked = (layers, keys)

    def block(operands: tuple[Layer, jax.Array | None], x: jax.Array) -> jax.Array:
        layer, key = operands
        return layer(x, key, segments)

    return looped(block, stacked, x, remat=config.remat, scan=config.scan, after=after)


def fold_range(key: jax.Array, count: int) -> jax.Array:
    """Return `fold_in(key, i)` for i in range(count); unlike `split`, key i does not depend on `count`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
