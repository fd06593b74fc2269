"""Models by name, and their numbers of parameters.

Counts are read off the abstract model (shapes without arrays), so there is no formula beside the model to go stale.
"""

import functools
import math
from typing import TypeAlias, overload

import jax
from flax import nnx

from jdp.models.gpt import GPT, GPTConfig
from jdp.models.mlp import MLP, MLPConfig
from jdp.models.resnet import ResNet, ResNetConfig
from jdp.models.vit import ViT, ViTConfig

ModelConfig: TypeAlias = GPTConfig | MLPConfig | ResNetConfig | ViTConfig
"""The configuration of any model that experiments train."""

# GPT-2 has 50257 = 29 * 1733 tokens. Padded to 50304 = 2**7 * 3 * 131, the table's largest dim divides over up to 128
# devices and fills tensor-core tiles; the 47 rows more are never a target, and their logits learn to be low.
PADDED_GPT2_VOCABULARY = 50_304

SIZES: dict[str, ModelConfig] = {
    # Bytes as tokens; every modern part in small. 0.8 M parameters: minutes on two CPU cores.
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


@overload
def build(config: GPTConfig, *, rngs: nnx.Rngs) -> GPT: ...
@overload
def build(config: MLPConfig, *, rngs: nnx.Rngs) -> MLP: ...
@overload
def build(config: ResNetConfig, *, rngs: nnx.Rngs) -> ResNet: ...
@overload
def build(config: ViTConfig, *, rngs: nnx.Rngs) -> ViT: ...
@overload
def build(config: ModelConfig, *, rngs: nnx.Rngs) -> GPT | MLP | ResNet | ViT: ...
def build(config: ModelConfig, *, rngs: nnx.Rngs) -> GPT | MLP | ResNet | ViT:
    """Build the model that a configuration describes.

    Args:
        config: shape and choices; its type selects the model.
        rngs: the `params` stream is used.
    """
    match config:
        case GPTConfig():
            return GPT(config, rngs=rngs)
        case MLPConfig():
            return MLP(config, rngs=rngs)
        case ResNetConfig():
            return ResNet(config, rngs=rngs)
        case ViTConfig():
            return ViT(config, rngs=rngs)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters, LoRA's among them, without allocating them.

    A tied table counts once; batch statistics are no parameters.

    Args:
        config: shape and choices of the model.
    """
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


@functools.cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by path, such as `layers/attention/query/kernel`."""
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
