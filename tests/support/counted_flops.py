"""The floating point operations that training a model needs, from its sizes: the oracle for `model_flops`' trace.

Two operations per multiply-add in the forward pass and four in the backward pass. Rematerialisation is not counted, nor
is what a frozen parameter or the first layer's input saves. Sizes are read off the abstract model.
"""

import math

from jdp.models.configs import GPTConfig
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
