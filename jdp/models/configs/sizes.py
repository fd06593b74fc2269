"""Sizes of models by name."""

from typing import TypeAlias

from jdp.models.configs.gpt import GPTConfig
from jdp.models.configs.mlp import MLPConfig
from jdp.models.configs.resnet import ResNetConfig
from jdp.models.configs.vit import ViTConfig

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
