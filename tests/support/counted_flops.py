"""The floating point operations that training a model needs, from its sizes: the oracle for `model_flops`' trace.

Two operations per multiply-add in the forward pass and four in the backward pass. Rematerialisation is not counted, nor
is what a frozen parameter or the first layer's input saves. Sizes are read off the abstract model.
"""

import math

from jdp.models.configs import GPTConfig, ResNetConfig, ViTConfig
from jdp.models.construction import parameter_shapes


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Floating point operations to train on one token: 6 N + 12 L H Q T.

    PaLM (arXiv:2204.02311), appendix B: 6 per parameter, and for attention L layers, H heads of size Q, T tokens of
    context, the causal half not deducted. N leaves out tables that are only looked up (positions, and the token table
    unless it also makes the logits): a lookup multiplies nothing. `length`: tokens in a sequence.
    """
    sizes = {path: math.prod(shape) for path, shape in parameter_shapes(config).items()}
    looked_up = {"embed/positions"} if config.tied else {"embed/positions", "embed/tokens"}
    multiplied = sum(size for path, size in sizes.items() if path not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.heads * config.head_width * length


def flops_per_example(config: ResNetConfig | ViTConfig) -> float:
    """Floating point operations to train on one image.

    6 per element of a kernel and place where it is applied, edges counted as if padding were pixels, and for a ViT's
    attention the 12 L H Q T^2 of `flops_per_token`, T vectors of an image attending to all of them.
    """
    kernels = {path: shape for path, shape in parameter_shapes(config).items() if path.endswith("kernel")}
    total = sum(6.0 * math.prod(shape) * _applications(config, path) for path, shape in kernels.items())
    if isinstance(config, ViTConfig):
        total += 12.0 * config.layers * config.width * config.length**2
    return total


def _applications(config: ResNetConfig | ViTConfig, path: str) -> int:
    """How often a kernel is applied to an image: at the positions of a convolution's output, to vectors of a ViT."""
    if isinstance(config, ViTConfig):
        return {"embed": config.patches, "layers": config.length, "head": 1}[path.partition("/")[0]]
    module, *names = path.split("/")
    if module == "head":
        return 1
    halvings = 1 if config.stem == "imagenet" else 0
    if module == "stages":
        stage, block, name = int(names[0]), int(names[2]), names[3]
        before_stride = config.block == "bottleneck" and block == 0 and name == "conv1"
        halvings = 2 * halvings + stage - (stage > 0 and before_stride)
    return math.ceil(config.image_size / 2**halvings) ** 2  # a stride of two leaves ceil(side / 2)
