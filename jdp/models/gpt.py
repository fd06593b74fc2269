"""A decoder-only transformer with the choices that tell GPT-2 from Llama as fields of its configuration.

In the order of the file: the configuration; a token's way through the model (embedding, then per layer attention and
feed-forward, each normalised before and added to the residual stream after, then a last norm and the logits); the loss.

Parameters are two-dimensional kernels [in, out], biases and scales. The layers are alike, so a scanned model stacks
them: `layers/attention/query/kernel` is [layers, width, width] and one compiled block serves all. An unrolled model
(`scan=False`) holds `layers/0/...`, `layers/1/...`; for the same seed these are the slices of the stack, bit for bit.

Dtypes: the embedding table's dtype is the dtype of the activations and of the matrix products. Softmax, norms, rotary
angles and logits are float32, as is the sum of a token's gradients over its occurrences.

Initial values (Radford et al. 2019, section 2.3, and openai/gpt-2 `src/model.py`): normal with standard deviation 0.02,
0.01 for learned positions; the two projections that write to the residual stream are divided by sqrt(2 * layers), the
number of such writes, so that its variance does not grow with depth.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import DotAlgorithmPreset

from jdp.layers import scan_layers
from jdp.models.parts import Linear, Norm, dropout, require

INIT_STD = 0.02
POSITION_STD = 0.01

Positions = Literal["rotary", "learned"]
Activation = Literal["swiglu", "gelu"]
NormKind = Literal["rms", "layer"]
Attend = Literal["xla", "cudnn"]
Remat = Literal["full", "dots"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape and choices of a GPT. Any field can be changed with `dataclasses.replace`.

    Fields:
        vocab_size, context: tokens in the vocabulary; most tokens in a sequence.
        layers, width, heads: depth; size of the residual stream; query heads, each `width / heads` wide.
        kv_heads: key and value heads, each shared by `heads / kv_heads` query heads (arXiv:2305.13245); None: heads.
        mlp_width: hidden size of the feed-forward; None: 4 * width for gelu, and for swiglu 8/3 * width, which keeps
            the parameter count (arXiv:2002.05202), rounded up to a multiple of 64.
        positions: "rotary" (arXiv:2104.09864) or "learned".
        activation: "swiglu", or "gelu" in its tanh form, as GPT-2 has it.
        norm: "rms" or "layer".
        tied: logits by the embedding table instead of a matrix of their own (arXiv:1608.05859).
        bias: biases in linear maps and in layer norms.
        dropout: rate on the embedding and on both residual branches (attention weights are not dropped: fused
            attention never holds them).
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the variance in norms.
        scan: stack the layers and scan them: compile time and program size do not grow with depth.
        remat: what the backward pass finds saved of each layer: None, everything; "dots", its matrix products;
            "full", only its input.
        attention: "xla" runs anywhere in any dtype; "cudnn" is fused, on NVIDIA GPUs, for 16-bit floats.

    Raises:
        ValueError: a size that does not fit another, or a choice that does not exist.
    """

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Positions = "rotary"
    activation: Activation = "swiglu"
    norm: NormKind = "rms"
    tied: bool = False
    bias: bool = False
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    scan: bool = True
    remat: Remat | None = None
    attention: Attend = "xla"

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        require(0.0 <= self.dropout < 1.0, "dropout is a rate in [0, 1)", f"{self.dropout}", "0 turns it off")
        require(self.rope_theta > 0, "rope_theta is positive", f"{self.rope_theta}", "10000 is usual")
        require(self.norm_eps > 0, "norm_eps is positive", f"{self.norm_eps}", "1e-5 is usual")

    def _check_choices(self) -> None:
        for name, choices in (
            ("positions", get_args(Positions)),
            ("activation", get_args(Activation)),
            ("norm", get_args(NormKind)),
            ("attention", get_args(Attend)),
            ("remat", (None, *get_args(Remat))),
        ):
            value = getattr(self, name)
            require(value in choices, f"there is no {name} of that name", repr(value), f"Choose one of {choices}")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "context", "layers", "width", "heads", "kv_heads", "mlp_width"):
            value = getattr(self, name)
            if value is not None or name not in ("kv_heads", "mlp_width"):
                require(isinstance(value, int) and value > 0, f"{name} is a positive integer", repr(value), "Raise it")
        width, heads, kv_heads = self.width, self.heads, self.key_value_heads
        require(
            width % heads == 0,
            "heads must divide width",
            f"width({width}) % heads({heads}) = {width % heads}",
            f"Make width a multiple of {heads}, for instance {-(-width // heads) * heads}",
        )
        require(
            heads % kv_heads == 0,
            "kv_heads must divide heads",
            f"heads({heads}) % kv_heads({kv_heads}) = {heads % kv_heads}",
            f"Choose kv_heads among {[n for n in range(1, heads + 1) if heads % n == 0]}",
        )
        require(
            self.positions != "rotary" or self.head_width % 2 == 0,
            "rotary positions turn pairs of elements, so a head's width must be even",
            f"width({width}) / heads({heads}) = {self.head_width}",
            "Change width or heads, or use learned positions",
        )

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """`mlp_width`, with the default resolved."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.activation == "gelu" else 64 * math.ceil(8 * self.width / (3 * 64))

    @property
    def residual_std(self) -> float:
        """Standard deviation of the kernels that write to the residual stream, two per layer."""
        return INIT_STD / math.sqrt(2 * self.layers)


class GPT(nnx.Module):
    """Tokens to next-token logits. Holds parameters only: no random state, no cache.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config, rngs=rngs)
        self.layers = _make_layers(config, rngs.params())
        self.final_norm = _norm(config)
        width, vocabulary = config.width, config.vocab_size
        self.head = None if config.tied else Linear(width, vocabulary, std=INIT_STD, bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, rng: jax.Array | None = None) -> jax.Array:
        """Logits of each next token: [batch, length, vocab_size] float32.

        Args:
            tokens: [batch, length] integers; length at most `context`.
            rng: typed key for dropout; None: no dropout.

        Raises:
            ValueError: tokens of another rank or dtype, or longer than the context.
        """
        return self.logits(self.features(tokens, rng=rng))

    def features(self, tokens: jax.Array, *, rng: jax.Array | None = None) -> jax.Array:
        """The last norm's output, [batch, length, width] in compute dtype. Arguments and errors: as for the call."""
        config = self.config
        _check_tokens(tokens, config)
        x, keys = self.embed(tokens), None
        if rng is not None and config.dropout > 0:
            keys = _fold_range(rng, config.layers)
            x = dropout(x, config.dropout, jax.random.fold_in(rng, config.layers), site=0)
        # The parameters go in exactly as they sit in the module: a sharding plan knows them by identity, and gathers a
        # layer's when the loop reaches it. A list would mean "unrolled" to the loop, a tuple is a tree to scan.
        stacked = (self.layers, keys)
        if isinstance(self.layers, nnx.List):
            stacked = [(layer, None if keys is None else keys[i]) for i, layer in enumerate(self.layers)]
        return self.final_norm(scan_layers(_block, stacked, x, remat=config.remat))

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., width] features to [..., vocab_size] float32: products of x's dtype, summed and returned in float32."""
        if self.head is None:
            return _to_vocabulary("...d,vd->...v", x, self.embed.tokens[...])
        return _to_vocabulary("...d,dv->...v", x, self.head.kernel[...])


class Embedding(nnx.Module):
    """Token vectors `tokens` [vocab_size, width] and, when learned, position vectors `positions` [context, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        def table(rows: int, std: float) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(rngs.params(), (rows, config.width)))

        self.tokens = table(config.vocab_size, INIT_STD)
        self.positions = table(config.context, POSITION_STD) if config.positions == "learned" else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, length] integers -> [batch, length, width] in the table's dtype."""
        table = self.tokens[...]
        # Looked up as float32 so that the transpose, a scatter-add over a token's occurrences, sums in float32: in
        # bfloat16 it would add one term at a time and stop at 256. XLA fuses the cast into the lookup: no copy is made.
        x = table.astype(jnp.float32)[tokens]
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]].astype(jnp.float32)
        return x.astype(table.dtype)


class Layer(nnx.Module):
    """Pre-norm transformer layer: [batch, length, width] -> the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = x + dropout(self.attention(self.attention_norm(x)), self.dropout, key, site=0)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, key, site=1)


class Attention(nnx.Module):
    """Causal self-attention (arXiv:1706.03762) with grouped key and value heads: [batch, length, width] -> the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width, shared = config.width, config.key_value_heads * config.head_width
        self.config = config
        self.query = Linear(width, width, std=INIT_STD, bias=config.bias, rngs=rngs)
        self.key = Linear(width, shared, std=INIT_STD, bias=config.bias, rngs=rngs)
        self.value = Linear(width, shared, std=INIT_STD, bias=config.bias, rngs=rngs)
        self.output = Linear(width, width, std=config.residual_std, bias=config.bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        fits = config.attention != "cudnn" or x.dtype in (jnp.bfloat16, jnp.float16)
        require(fits, "cudnn attention takes 16-bit floats", f"{x.dtype}", 'Compute in bf16, or set attention = "xla"')
        query, key, value = (
            project(x).reshape(*x.shape[:-1], -1, config.head_width) for project in (self.query, self.key, self.value)
        )
        if config.positions == "rotary":
            query, key = rotate(query, config.rope_theta), rotate(key, config.rope_theta)
        # Softmax is float32 inside, and query head h reads key and value head h // (heads / kv_heads).
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=config.attention)
        return self.output(mixed.reshape(x.shape))


class FeedForward(nnx.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` for swiglu: [batch, length, width] -> the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.hidden_width
        self.up = Linear(width, hidden, std=INIT_STD, bias=config.bias, rngs=rngs)
        gated = config.activation == "swiglu"
        self.gate = Linear(width, hidden, std=INIT_STD, bias=config.bias, rngs=rngs) if gated else None
        self.down = Linear(hidden, width, std=config.residual_std, bias=config.bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=True))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Turn each pair (x[i], x[i + D/2]) of a head by position * theta^(-2i/D) radians (arXiv:2104.09864, eq. 34).

    The pairing is that of GPT-NeoX and of Llama in Hugging Face's layout; Meta's files pair neighbours instead, which
    is the same model with the columns of the query and key kernels permuted.

    Args:
        x: [batch, length, heads, D], D even. Angles and products are float32; the result has x's dtype.
        theta: base of the wavelengths.
    """
    length, size = x.shape[1], x.shape[-1]
    frequencies = np.float32(theta ** (-np.arange(0, size, 2) / size))
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def next_token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of cross-entropies in nats, and the sum of the weights: two float32 scalars.

    Args:
        logits: [batch, length, vocab_size].
        targets: [batch, length] integers. Where the weight is zero any integer will do.
        weights: [batch, length]; 0 for padding.
    """
    logits = logits.astype(jnp.float32)
    # Selected by comparison rather than by index: the transpose then fuses into that of the softmax and overwrites the
    # logits, where a scatter takes a second array of their size (8192 x 50304 logits compiled for an H100: 1.5 GiB
    # against 3.1), and it stays local when the vocabulary is sharded.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    nats = jax.nn.logsumexp(logits, axis=-1) - target_logits
    weights = weights.astype(jnp.float32)
    return jnp.sum(nats * weights), jnp.sum(weights)


def _block(layer_and_key: tuple[Layer, jax.Array | None], x: jax.Array) -> jax.Array:
    layer, key = layer_and_key
    return layer(x, key)


def _make_layers(config: GPTConfig, key: jax.Array) -> Layer | nnx.List[Layer]:
    """All layers, stacked or as a list. Layer i's values depend on (key, i) only, so both hold the same."""

    def make(key: jax.Array) -> Layer:
        return Layer(config, rngs=nnx.Rngs(key))

    keys = _fold_range(key, config.layers)
    return jax.vmap(make)(keys) if config.scan else nnx.List([make(keys[i]) for i in range(config.layers)])


def _fold_range(key: jax.Array, count: int) -> jax.Array:
    """`fold_in(key, i)` for i in range(count): unlike `split`, key i does not depend on how many there are."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def _norm(config: GPTConfig) -> Norm:
    centered = config.norm == "layer"
    return Norm(config.width, center=centered, bias=config.bias and centered, eps=config.norm_eps)


def _to_vocabulary(equation: str, x: jax.Array, table: jax.Array) -> jax.Array:
    # Naming the algorithm keeps the two transposed products in x's dtype as well. Without it they would mix the float32
    # cotangent with a 16-bit operand and run in float32: jax-ml/jax issue 24047.
    algorithms = {
        jnp.dtype(jnp.bfloat16): DotAlgorithmPreset.BF16_BF16_F32,
        jnp.dtype(jnp.float16): DotAlgorithmPreset.F16_F16_F32,
    }
    precision = algorithms.get(x.dtype)
    return jnp.einsum(equation, x, table.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _check_tokens(tokens: jax.Array, config: GPTConfig) -> None:
    given = f"{tokens.dtype}{list(tokens.shape)}"
    is_tokens = tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)
    require(is_tokens, "tokens are integers [batch, length]", given, "Pass token numbers, with a batch dim")
    fits = tokens.ndim == 2 and tokens.shape[1] <= config.context
    require(fits, f"a sequence has at most context({config.context}) tokens", given, "Shorten it, or raise context")
