"""Configurations of the models, their rules, and their sizes by name; none of these needs JAX.

A broken rule is one error with the rule, the values given and the fix.
"""

import math
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from jdp.base.errors import UserError

Activation = Literal["swiglu", "gelu", "gelu_exact"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
LoRATarget = Literal["query", "key", "value", "output", "gate", "up", "down"]
Attend = Literal["auto", "xla", "cudnn"]
Remat = Literal["dots", "dots_except_mlp", "full"]
Scan = bool | Literal["auto"]


def require(holds: bool, rule: str, given: str, fix: str) -> None:
    """Raise ValueError("RULE; given GIVEN. FIX.") unless the rule holds; `fix` has no full stop."""
    if not holds:
        raise UserError(f"{rule}; given {given}. {fix}.")


def _check_fields(config: Any) -> None:
    """Raise ValueError unless each field is in range: integers and their tuples, choices, rates, other numbers."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, kind in get_type_hints(type(config)).items():
        value, allowed, usual = getattr(config, name), _values_of(kind), f"the default is {defaults[name]}"
        if kind in (int, int | None):
            fits = (type(value) is int and value > 0) or (value is None and kind is not int)
            require(fits, f"{name} is a positive integer", repr(value), "Raise it")
        elif kind == tuple[int, ...]:
            fits = type(value) is tuple and all(type(size) is int and size > 0 for size in value)
            require(fits, f"{name} is a tuple of positive integers", repr(value), "Write (2, 2)")
        elif allowed:
            require(value in allowed, f"there is no {name} of that name", repr(value), f"Choose one of {allowed}")
        elif name in ("dropout", "norm_momentum"):
            require(0.0 <= value < 1.0, f"{name} is a rate in [0, 1)", f"{value}", f"Lower it; {usual}")
        elif kind in (float, float | None) and value is not None:
            fits = value > 0 or (value == 0 and name == "position_std")
            require(fits, f"{name} is positive", f"{value}", f"Raise it; {usual}")


def _values_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a type, if they can be listed."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        values = [*map(_values_of, get_args(kind))]
        return sum(values, ()) if all(values) else ()
    return {bool: (True, False), NoneType: (None,)}.get(kind, ())


def _require_divisor(name: str, divisor: int, of: str, size: int) -> None:
    """Raise ValueError unless `divisor` divides `size`; `name` and `of` are the names of the two fields."""
    require(
        size % divisor == 0,
        f"{name} must divide {of}",
        f"{of}({size}) % {name}({divisor}) = {size % divisor}",
        f"Make {of} a multiple of {divisor}, for instance {-(-size // divisor) * divisor}",
    )


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
        _check_fields(self)
        if self.lora_targets is not None:
            among = tuple(name for name in get_args(LoRATarget) if name != "gate" or self.gated)
            fits = bool(self.lora_targets) and set(self.lora_targets) <= set(among)
            require(fits, "lora_targets are kernels of a layer", f"{self.lora_targets}", f"Choose among {among}")
            rule = "lora_targets is for updates"
            require(self.lora_rank is not None, rule, "no rank", "Set lora_rank, or remove it")
        if self.head_dim is None:
            _require_divisor("heads", self.heads, "width", self.width)
        heads, kv_heads, rotary = self.heads, self.key_value_heads, self.positions == "rotary"
        rule, given = "kv_heads must divide heads", f"heads({heads}) % kv_heads({kv_heads}) = {heads % kv_heads}"
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        require(heads % kv_heads == 0, rule, given, f"Choose kv_heads among {fitting}")
        rule = "rotary positions turn pairs of elements, so a head's width must be even"
        given = f"width({self.width}) / heads({heads})" if self.head_dim is None else "head_dim"
        fix = "Change width, heads or head_dim, or use learned positions"
        require(not rotary or self.head_width % 2 == 0, rule, f"{given} = {self.head_width}", fix)
        if self.rope_factor is not None:
            require(rotary, "rope_factor scales rotary positions", f'positions = "{self.positions}"', "Remove one")
            low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
            rule = "rope_low_freq_factor is less than rope_high_freq_factor"
            require(low < high, rule, f"{low} and {high}", "Llama 3.1 has 1 and 4")

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


@dataclass(frozen=True)
class MLPConfig:
    """Shape of an MLP.

    Fields:
        features_in, hidden, features_out: sizes of the input, of each hidden layer (may be empty), of the output.
        activation: after each hidden layer.
        dropout: rate after each activation.

    Raises:
        ValueError: a size that is not a positive integer, a rate outside [0, 1), an unknown activation.

    >>> MLPConfig(features_in=4, hidden=(8, 8), features_out=2).activation
    'relu'
    """

    features_in: int
    hidden: tuple[int, ...]
    features_out: int
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)


EXPANSION = 4
"""A bottleneck's output has this many times the channels of its 3 x 3 convolution."""


@dataclass(frozen=True)
class ResNetConfig:
    """Shape and choices of a ResNet.

    Fields:
        image_size: pixels of a side, for counting FLOPs; the network takes any size.
        channels, classes: of an image (3: colours); of the logits.
        blocks: number of residual blocks of each stage. Every stage but the first halves the image's sides.
        block: "basic" (two 3 x 3 convolutions) or "bottleneck" (1 x 1, 3 x 3, 1 x 1).
        width: channels of the first stage's 3 x 3 convolutions; each later stage doubles them.
        stem: "imagenet" (7 x 7 stride 2, then 3 x 3 max pooling stride 2) or, for images of at most about 64 pixels,
            "small" (3 x 3, stride 1).
        zero_init: blocks start as their shortcuts.
        norm_momentum: weight of the old value in a running average.
        norm_eps: added to the variance in norms.

    Raises:
        ValueError: a size that is not a positive integer, a number out of range, or a choice that does not exist.

    >>> ResNetConfig(classes=10, blocks=(2, 2), width=16, stem="small").features
    32
    """

    classes: int
    blocks: tuple[int, ...]
    block: Literal["basic", "bottleneck"] = "basic"
    width: int = 64
    image_size: int = 224
    channels: int = 3
    stem: Literal["imagenet", "small"] = "imagenet"
    zero_init: bool = True
    norm_momentum: float = 0.9
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_fields(self)
        require(len(self.blocks) > 0, "a ResNet has one stage at least", "blocks = ()", "Write (2, 2)")

    @property
    def features(self) -> int:
        """Input channels of the head."""
        return self.width * 2 ** (len(self.blocks) - 1) * (EXPANSION if self.block == "bottleneck" else 1)


@dataclass(frozen=True)
class ViTConfig:
    """Shape and choices of a ViT.

    Fields:
        image_size, patch: pixels of the side of an image and of a patch.
        channels, classes: of an image (3: colours); of the logits.
        layers, width, heads: depth; size of the residual stream; heads, each `width / heads` wide.
        mlp_width: hidden size of the feed-forward (gelu in its tanh form); None: 4 * width.
        pool: the vector to classify: "token", a learned token that goes through the layers beside the patches; or
            "mean", the mean of the patches.
        dropout: rate on the embedding and on both residual branches.
        norm_eps: added to the variance in norms.
        scan, remat, attention: as for `GPTConfig`.

    Raises:
        ValueError: a size that does not fit another, or a choice that does not exist.

    >>> config = ViTConfig(classes=10, layers=2, width=32, heads=4, patch=4, image_size=32)
    >>> config.patches, config.length
    (64, 65)
    """

    classes: int
    layers: int
    width: int
    heads: int
    patch: int
    image_size: int = 224
    channels: int = 3
    mlp_width: int | None = None
    pool: Literal["token", "mean"] = "token"
    dropout: float = 0.0
    norm_eps: float = 1e-6
    scan: Scan = "auto"
    remat: Remat | None = None
    attention: Attend = "auto"

    def __post_init__(self) -> None:
        _check_fields(self)
        _require_divisor("heads", self.heads, "width", self.width)
        _require_divisor("patch", self.patch, "image_size", self.image_size)

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def length(self) -> int:
        """Number of vectors that go through the layers."""
        return self.patches + (self.pool == "token")


ModelConfig: TypeAlias = GPTConfig | MLPConfig | ResNetConfig | ViTConfig
"""The configuration of any model that experiments train."""

# GPT-2 has 50257 = 29 * 1733 tokens. Padded to 50304 = 2**7 * 3 * 131, the table's largest dim divides over up to 128
# devices and fills tensor-core tiles; the 47 further rows are never a target, and their logits learn to be low.
PADDED_GPT2_VOCABULARY = 50_304

SIZES: dict[str, ModelConfig] = {
    # Bytes as tokens; every modern component at small size. 0.8 M parameters: minutes on two CPU cores.
    "gpt-nano": GPTConfig(vocab_size=256, context=256, layers=4, width=128, heads=4, kv_heads=2, tied=True),
    # GPT-2 small (Radford et al. 2019; openai/gpt-2). With vocab_size=50257 it has OpenAI's 124,439,808 parameters.
    "gpt2-124m": GPTConfig(
        vocab_size=PADDED_GPT2_VOCABULARY,
        context=1024,
        layers=12,
        width=768,
        heads=12,
        positions="learned",
        activation="gelu",
        norm="layer",
        tied=True,
        bias=True,
    ),
    # The body of Llama 3.2 1B (meta-llama/Llama-3.2-1B, config.json) with GPT-2's vocabulary. 1.08 B parameters.
    "gpt-1b": GPTConfig(
        vocab_size=PADDED_GPT2_VOCABULARY,
        context=2048,
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        mlp_width=8192,
        tied=True,
        rope_theta=500_000.0,
        remat="full",
    ),
    # Llama 3 8B (arXiv:2407.21783, table 3). 8,030,261,248 parameters.
    "llama-8b": GPTConfig(
        vocab_size=128_256,
        context=8192,
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        mlp_width=14_336,
        rope_theta=500_000.0,
        remat="full",
    ),
    # 28 x 28 pixels to ten classes.
    "mlp": MLPConfig(features_in=784, hidden=(512, 512), features_out=10),
    # scikit-learn's digits, 8 x 8 greys: the paper's CIFAR network (section 4.2) of 14 layers. 174,970 parameters.
    "resnet-digits": ResNetConfig(classes=10, blocks=(2, 2, 2), width=16, image_size=8, channels=1, stem="small"),
    # Table 1 of arXiv:1512.03385, with torchvision's 11,689,512 and 25,557,032 parameters.
    "resnet-18": ResNetConfig(classes=1000, blocks=(2, 2, 2, 2)),
    "resnet-50": ResNetConfig(classes=1000, blocks=(3, 4, 6, 3), block="bottleneck"),
    # The same digits in 16 patches.
    "vit-digits": ViTConfig(
        classes=10, layers=4, width=64, heads=4, patch=2, image_size=8, channels=1, pool="mean", dropout=0.1
    ),
    # DeiT-S's shape (arXiv:2012.12877, table 1), 22,050,664 parameters; table 1 of arXiv:2010.11929, 86,567,656.
    "vit-s16": ViTConfig(classes=1000, layers=12, width=384, heads=6, patch=16),
    "vit-b16": ViTConfig(classes=1000, layers=12, width=768, heads=12, patch=16),
}


def traced_layers(config: ModelConfig) -> int:
    """Return the number of layers to trace and compile; scanned layers count as one. Ten million would take hours."""
    match config:
        case MLPConfig():
            return len(config.hidden) + 1
        case ResNetConfig():
            return sum(config.blocks)
        case _:
            return 1 if config.scan else config.layers
