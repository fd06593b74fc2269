"""A decoder-only transformer; what distinguishes GPT-2 from Llama are fields of its configuration.

In the order of the file: the configuration; the model (embedding, then per layer attention and feed-forward, each
normalised before and added to the residual stream after, then a last norm and the logits). The layers themselves are
in `jdp.models.transformer`, the loss in `jdp.models.losses`.

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
from flax import nnx

from jdp.models.attention import Attend
from jdp.models.checks import require, require_choice, require_heads, require_positive, require_rates
from jdp.models.modules import Linear, LoRA, dropout, product
from jdp.models.transformer import (
    Activation,
    LayerConfig,
    NormKind,
    Remat,
    RopeScaling,
    Segments,
    fold_range,
    make_layers,
    run_layers,
)

INIT_STD = 0.02
POSITION_STD = 0.01

Positions = Literal["rotary", "learned"]


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
        activation: "swiglu", "gelu" in its tanh form, as GPT-2 has it, or "gelu_exact", with the error function.
        norm: "rms" or "layer".
        tied: logits by the embedding table instead of a matrix of their own (arXiv:1608.05859).
        bias: biases in linear maps and in layer norms.
        dropout: rate on the embedding and on both residual branches (attention weights are not dropped: fused
            attention never holds them).
        rope_theta: base of the rotary wavelengths.
        rope_factor: divides the low rotary frequencies for a longer context, as Llama 3.1 has it (8; Llama 3.2: 32);
            None: they stay.
        rope_low_freq_factor, rope_high_freq_factor: with rope_factor, frequencies of fewer rotations than the first in
            the original context are divided, those of more than the second are kept, and those between interpolated.
        rope_original_context: with rope_factor, tokens of the original context.
        norm_eps: added to the variance in norms.
        scan: stack the layers and scan them: compile time and program size do not grow with depth.
        remat: what is saved of each layer for the backward pass: None, everything; "dots", its matrix products;
            "full", only its input.
        attention: "cudnn" is fused, on NVIDIA GPUs, for 16-bit floats; "xla" runs anywhere in any dtype; "auto" is the
            first where the devices, the dtype and the shapes allow it, else the second.
        lora_rank: adds a low-rank update (arXiv:2106.09685) to every kernel of the layers: `nnx.LoRAParam` leaves
            `.../lora_a` and `.../lora_b`. The function and all other initial values do not change. To train them alone:
            `jdp.init_state(..., wrt=nnx.LoRAParam)`. None: no such leaves.
        lora_alpha: updates are multiplied by lora_alpha / lora_rank.

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
    rope_factor: float | None = None
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    norm_eps: float = 1e-5
    scan: bool = True
    remat: Remat | None = None
    attention: Attend = "auto"
    lora_rank: int | None = None
    lora_alpha: float = 16.0

    def __post_init__(self) -> None:
        require_choice(
            self,
            positions=get_args(Positions),
            activation=get_args(Activation),
            norm=get_args(NormKind),
            attention=get_args(Attend),
            remat=(None, *get_args(Remat)),
        )
        sizes = ("vocab_size", "context", "layers", "width", "heads", "rope_original_context")
        require_positive(self, *sizes, optional=("kv_heads", "mlp_width", "lora_rank"))
        require_rates(self)
        require(self.rope_theta > 0, "rope_theta is positive", f"{self.rope_theta}", "10000 is usual")
        require(self.lora_alpha > 0, "lora_alpha is positive", f"{self.lora_alpha}", "16 is usual")
        self._check_heads()
        self._check_rope_scaling()

    def _check_heads(self) -> None:
        width, heads, kv_heads = self.width, self.heads, self.key_value_heads
        require_heads(width, heads)
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

    def _check_rope_scaling(self) -> None:
        if self.rope_factor is None:
            return
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        require(self.rope_factor > 0, "rope_factor is positive", f"{self.rope_factor}", "Llama 3.1 has 8")
        require(
            0 < low < high,
            "rope_low_freq_factor is positive and less than rope_high_freq_factor",
            f"{low} and {high}",
            "Llama 3.1 has 1 and 4",
        )
        rotary = self.positions == "rotary"
        require(rotary, "rope_factor scales rotary positions", f'positions = "{self.positions}"', "Remove one")

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
        return 4 * self.width if self.activation != "swiglu" else 64 * math.ceil(8 * self.width / (3 * 64))

    @property
    def residual_std(self) -> float:
        """Standard deviation of the kernels that write to the residual stream, two per layer."""
        return INIT_STD / math.sqrt(2 * self.layers)

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """`rope_factor` and the fields after it; None without `rope_factor`."""
        if self.rope_factor is None:
            return None
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        return RopeScaling(self.rope_factor, low, high, self.rope_original_context)

    @property
    def layer(self) -> LayerConfig:
        """The configuration of one layer."""
        return LayerConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.key_value_heads,
            hidden=self.hidden_width,
            activation=self.activation,
            norm=self.norm,
            norm_eps=self.norm_eps,
            bias=self.bias,
            dropout=self.dropout,
            attention=self.attention,
            causal=True,
            rope_theta=self.rope_theta if self.positions == "rotary" else None,
            rope_scaling=self.rope_scaling,
            std=INIT_STD,
            residual_std=self.residual_std,
            lora=None if self.lora_rank is None else LoRA(self.lora_rank, self.lora_alpha),
        )


class GPT(nnx.Module):
    """Tokens to next-token logits. Holds parameters only: no random state, no cache.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config, rngs=rngs)
        self.layers = make_layers(config.layer, config.layers, rngs.params(), scan=config.scan)
        self.final_norm = config.layer.make_norm()
        width, vocabulary = config.width, config.vocab_size
        self.head = None if config.tied else Linear(width, vocabulary, std=INIT_STD, bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, rng: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits of each next token: [batch, length, vocab_size] float32.

        Args:
            tokens: [batch, length] integers; length at most `context`.
            rng: typed key for dropout; None: no dropout.
            segments: [batch, length] integers, the document of each token of a packed row: constant inside a document,
                different in its neighbour; 0 for padding. Attention stays inside a document, and positions restart in
                each, so its logits are those of the document alone. None: a row is one document.

        Raises:
            ValueError: tokens or segments of another rank or dtype, or longer than the context; "cudnn" attention
                that cuDNN does not have.
        """
        return self.logits(self.features(tokens, rng=rng, segments=segments))

    def features(
        self, tokens: jax.Array, *, rng: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Return the last norm's output: [batch, length, width] in compute dtype.

        Args:
            tokens: [batch, length] integers; length at most `context`.
            rng: typed key for dropout; None: no dropout.
            segments: [batch, length] integers, the document of each token of a packed row; None: a row is one document.

        Raises:
            ValueError: tokens or segments of another rank or dtype, or longer than the context; "cudnn" attention
                that cuDNN does not have.
        """
        config = self.config
        _check_tokens(tokens, config)
        _check_segments(segments, tokens)
        packed = None if segments is None else Segments.of(segments)
        x, keys = self.embed(tokens, None if packed is None else packed.position), None
        if rng is not None and config.dropout > 0:
            keys = fold_range(rng, config.layers)
            x = dropout(x, config.dropout, jax.random.fold_in(rng, config.layers), site=0)
        return self.final_norm(run_layers(self.layers, x, keys, remat=config.remat, segments=packed))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return logits [..., vocab_size] float32: products in x's dtype, summed in float32.

        Args:
            x: [..., width] features, as `features` returns them.
        """
        if self.head is None:
            return product("...d,vd->...v", x, self.embed.tokens[...])
        return product("...d,dv->...v", x, self.head.kernel[...])


class Embedding(nnx.Module):
    """Token vectors `tokens` [vocab_size, width] and, when learned, position vectors `positions` [context, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        def table(rows: int, std: float) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(rngs.params(), (rows, config.width)))

        self.tokens = table(config.vocab_size, INIT_STD)
        self.positions = table(config.context, POSITION_STD) if config.positions == "learned" else None

    def __call__(self, tokens: jax.Array, position: jax.Array | None = None) -> jax.Array:
        """Embed [batch, length] integers as [batch, length, width] in the table's dtype; None: positions 0, 1, ..."""
        table = self.tokens[...]
        # Looked up as float32 so that the transpose, a scatter-add over a token's occurrences, sums in float32: in
        # bfloat16 it would add one term at a time and stop at 256. XLA fuses the cast into the lookup: no copy is made.
        x = table.astype(jnp.float32)[tokens]
        if self.positions is not None:
            first = self.positions[: tokens.shape[1]].astype(jnp.float32)  # no document is longer
            x = x + (first if position is None else first[position])
        return x.astype(table.dtype)


def _check_tokens(tokens: jax.Array, config: GPTConfig) -> None:
    given = f"{tokens.dtype}{list(tokens.shape)}"
    is_tokens = tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)
    require(is_tokens, "tokens are integers [batch, length]", given, "Pass token numbers, with a batch dim")
    fits = tokens.ndim == 2 and tokens.shape[1] <= config.context
    require(fits, f"a sequence has at most context({config.context}) tokens", given, "Shorten it, or raise context")


def _check_segments(segments: jax.Array | None, tokens: jax.Array) -> None:
    if segments is None:
        return
    given = f"{segments.dtype}{list(segments.shape)}"
    fits = segments.shape == tokens.shape and jnp.issubdtype(segments.dtype, jnp.integer)
    require(fits, f"segments are integers {list(tokens.shape)}, as the tokens", given, "Number each row's documents")
