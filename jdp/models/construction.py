"""Models from their configurations, and their numbers of parameters.

Counts come from the abstract model (shapes without arrays), so no separate formula can go stale.
"""

import functools
import math
from typing import overload

import jax
from flax import nnx

from jdp.models.configs import GPTConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig
from jdp.models.gpt import GPT
from jdp.models.mlp import MLP
from jdp.models.resnet import ResNet
from jdp.models.vit import ViT


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

    >>> from flax import nnx
    >>> from jdp.models import SIZES
    >>> model = nnx.eval_shape(lambda: build(SIZES["gpt2-124m"], rngs=nnx.Rngs(0)))
    >>> type(model).__name__, model.embed.tokens.shape
    ('GPT', (50304, 768))
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
    """Return the number of parameters, with LoRA's, without allocating them.

    A tied table counts once; batch statistics are not parameters.

    Args:
        config: shape and choices of the model.

    >>> parameter_count(MLPConfig(features_in=4, hidden=(8,), features_out=2))
    58
    """
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


@functools.cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by path, such as `layers/attention/query/kernel`."""
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
