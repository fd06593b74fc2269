"""The configuration of a GPT."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jdp.models.checks import (
    REMATS,
    SCANS,
    Activation,
    Attend,
    NormKind,
    Remat,
    Scan,
    require,
    require_choice,
    require_heads,
    require_positive,
    require_rates,
)

Positions = Literal["rotary", "learned"]
LoRATarget = Literal["query", "key", "value", "output", "gate", "up", "down"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape and choices of a GPT. Any field can be changed with `dataclasses.replace`.

    Fields:
        vocab_size, context: tokens in the vocabulary; most tokens in a sequence.
        layers, width, heads: depth; size of the residual stream; query heads.
        head_dim: size of a head; None: width / heads, which must divide.
        kv_heads: key and value heads, each shared by `heads / kv_heads` query heads (arXiv:2305.13245); None: heads.
        mlp_width: hidden size of the feed-forward. None is 4 * width for gelu. For swiglu it is 8/3 * width,
            rounded up to a multiple of 64, which keeps the parameter count (arXiv:2002.05202).
        positions: "rotary" (arXiv:2104.09864) or "learned".
        position_std: standard deviation of learned positions at the start: 0.01 in openai/gpt-2, 0.02 in nanoGPT.
        activation: "swiglu"; "gelu" in the tanh form of GPT-2, or "gelu_exact", with the error function.
        norm: "rms" or "layer".
        tied: logits from the embedding table instead of a separate matrix (arXiv:1608.05859).
        bias: biases in linear maps and in layer norms.
        qkv_bias: biases only in the maps to queries, keys and values, as in Qwen2.
        qk_norm: an RMS norm of each head of queries and keys, as in Qwen3 (arXiv:2010.04245).
        window: a position attends to itself and the window - 1 before it (arXiv:2310.06825); None: to all before it.
        dropout: rate on the embedding and on both residual branches (attention weights are not dropped: fused attention
            never holds them).
        rope_theta: base of the rotary wavelengths.
        rope_factor: divides the low rotary frequencies for a longer context, as in Llama 3.1 (8; Llama 3.2: 32); None:
            no scaling.
        rope_low_freq_factor, rope_high_freq_factor: with rope_factor, frequencies with fewer rotations than the first
            in the original context are divided, frequencies with more than the second stay, others are interpolated.
        rope_original_context: with rope_factor, tokens of the original context.
        norm_eps: added to the variance in norms.
        scan: true: layers are stacked and compiled once, as a loop. false: each is stored and compiled separately.
            "auto": they are stacked, and up to 128 on GPUs and 8 on CPUs are compiled one by one.
        remat: what each layer saves for the backward pass: None, everything; "dots", its matrix products;
            "dots_except_mlp", those of attention; "full", only its input.
        attention: "cudnn" is fused, on NVIDIA GPUs, for 16-bit floats; "xla" runs anywhere in any dtype. "auto" is
            "cudnn" if devices, dtype and shapes allow it, else "xla". Attention in long packed rows is then computed
            block by block.
        lora_rank: adds a low-rank update (arXiv:2106.09685) to kernels of the layers: `nnx.LoRAParam` leaves
            `.../lora_a` and `.../lora_b`. The function and all other initial values do not change. To train only these:
            `jdp.init_state(..., wrt=nnx.LoRAParam)`. None: no such leaves.
        lora_alpha: updates are multiplied by lora_alpha / lora_rank.
        lora_targets: kernels with an update: "query", "key", "value", "output", "gate", "up", "down"; None: all.

    Raises:
        ValueError: a size that does not fit another, or a choice that does not exist.

    >>> import dataclasses
    >>> config = GPTConfig(vocab_size=256, context=64, layers=2, width=32, heads=4)
    >>> dataclasses.replace(config, kv_heads=2).key_value_heads, config.hidden_width
    (2, 128)
    """

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    head_dim: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Positions = "rotary"
    position_std: float = 0.01
    activation: Activation = "swiglu"
    norm: NormKind = "rms"
    tied: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    rope_factor: float | None = None
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    norm_eps: float = 1e-5
    scan: Scan = "auto"
    remat: Remat | None = None
    attention: Attend = "auto"
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_targets: tuple[LoRATarget, ...] | None = None

    def __post_init__(self) -> None:
        require_choice(
            self,
            positions=get_args(Positions),
            activation=get_args(Activation),
            norm=get_args(NormKind),
            attention=get_args(Attend),
            remat=REMATS,
            scan=SCANS,
        )
        sizes = ("vocab_size", "context", "layers", "width", "heads", "rope_original_context")
        require_positive(self, *sizes, optional=("head_dim", "kv_heads", "mlp_width", "window", "lora_rank"))
        require_rates(self)
        require(self.rope_theta > 0, "rope_theta is positive", f"{self.rope_theta}", "10000 is usual")
        require(self.position_std >= 0, "position_std is not negative", f"{self.position_std}", "0.01 is usual")
        require(self.lora_alpha > 0, "lora_alpha is positive", f"{self.lora_alpha}", "16 is usual")
        self._check_lora_targets()
        self._check_heads()
        self._check_rope_scaling()

    def _check_heads(self) -> None:
        width, heads, kv_heads = self.width, self.heads, self.key_value_heads
        if self.head_dim is None:
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
            f"width({width}) / heads({heads}) = {self.head_width}" if self.head_dim is None else f"{self.head_dim}",
            "Change width, heads or head_dim, or use learned positions",
        )

    def _check_lora_targets(self) -> None:
        if self.lora_targets is None:
            return
        among = tuple(name for name in get_args(LoRATarget) if name != "gate" or self.gated)
        fits = bool(self.lora_targets) and set(self.lora_targets) <= set(among)
        require(fits, "lora_targets are kernels of a layer", f"{self.lora_targets}", f"Choose among {among}")
        require(self.lora_rank is not None, "lora_targets is for updates", "no rank", "Set lora_rank, or remove it")

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
        """`head_dim`, with the default resolved."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation == "swiglu"

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """`mlp_width`, with the default resolved."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 64 * math.ceil(8 * self.width / (3 * 64)) if self.gated else 4 * self.width
