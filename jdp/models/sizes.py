"""Sizes of models by name, and a lower bound of any model's size before it is traced; neither needs JAX.

Tracing a model takes a tenth of a second with scanned layers, but hours with ten million unscanned blocks, and XLA
crashes on 10**18 layers. So the bound first refuses a model that is too large. It counts only the large matrices: 80
to 100 % of `jdp.models.parameter_count`.
"""

import itertools

from jdp.models.configs import EXPANSION, GPTConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig

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


def parameter_lower_bound(config: ModelConfig) -> int:
    """Return a lower bound of the number of parameters, without tracing the model."""
    match config:
        case GPTConfig():
            width, heads = config.width, (config.heads + config.key_value_heads) * config.head_width
            layer = 2 * width * heads + (3 if config.gated else 2) * width * config.hidden_width
            positions = config.context if config.positions == "learned" else 0
            ends = config.vocab_size * (1 if config.tied else 2) + positions
            return config.layers * layer + ends * width
        case MLPConfig():
            sizes = (config.features_in, *config.hidden, config.features_out)
            return sum(before * after for before, after in itertools.pairwise(sizes))
        case ResNetConfig():
            return _resnet(config)
        case ViTConfig():
            layer = 4 * config.width**2 + 2 * config.width * (config.mlp_width or 4 * config.width)
            ends = config.patches + config.patch**2 * config.channels + config.classes
            return config.layers * layer + ends * config.width


def traced_layers(config: ModelConfig) -> int:
    """Return the number of layers to trace and compile; scanned layers count as one."""
    match config:
        case MLPConfig():
            return len(config.hidden) + 1
        case ResNetConfig():
            return sum(config.blocks)
        case _:
            return 1 if config.scan else config.layers


def _resnet(config: ResNetConfig) -> int:
    """Count the convolutions and the head, without the first block's fewer inputs."""
    total = 0
    for stage, count in enumerate(config.blocks):
        square = (config.width * 2 ** min(stage, 64)) ** 2  # beyond that it is too many anyway
        basic, bottleneck = (2 * count - 1) * 9 * square, count * (9 + EXPANSION) * square + (count - 1) * 4 * square
        total += basic if config.block == "basic" else bottleneck
    return total + config.features * config.classes
