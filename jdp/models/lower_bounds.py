"""A lower bound of a model's size from its configuration alone, before anything is traced.

Tracing a model takes a tenth of a second with scanned layers, but hours with ten million unscanned blocks, and XLA
crashes on 10**18 layers. So this bound first refuses a model that is too large. It counts only the large matrices: 80
to 100 % of `jdp.models.parameter_count`.
"""

import itertools

from jdp.models.configs.gpt import GPTConfig
from jdp.models.configs.mlp import MLPConfig
from jdp.models.configs.resnet import EXPANSION, ResNetConfig
from jdp.models.configs.sizes import ModelConfig
from jdp.models.configs.vit import ViTConfig


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
