"""The models that experiments train, in plain Flax NNX."""

from jdp.models.gpt import GPT, GPTConfig, next_token_loss
from jdp.models.mlp import MLP, MLPConfig
from jdp.models.sampling import generate
from jdp.models.sizes import SIZES, build, flops_per_token, parameter_count

__all__ = [
    "GPT",
    "MLP",
    "SIZES",
    "GPTConfig",
    "MLPConfig",
    "build",
    "flops_per_token",
    "generate",
    "next_token_loss",
    "parameter_count",
]
