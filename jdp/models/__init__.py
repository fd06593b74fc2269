"""GPT, ResNet, ViT and MLP in plain NNX; from jdp they use only `scan_layers` and the mesh of the trace.

Configurations and sizes by name need no JAX; models and their functions are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jdp.models.configs import SIZES, GPTConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig

if TYPE_CHECKING:
    from jdp.models.construction import MLP, build, parameter_count
    from jdp.models.decode import generate
    from jdp.models.gpt import GPT
    from jdp.models.images import ResNet, ViT
    from jdp.models.losses import classification_loss, linear_next_token_loss, next_token_loss

_HOMES = {
    "GPT": "gpt",
    "MLP": "construction",
    "ResNet": "images",
    "ViT": "images",
    "build": "construction",
    "classification_loss": "losses",
    "generate": "decode",
    "linear_next_token_loss": "losses",
    "next_token_loss": "losses",
    "parameter_count": "construction",
}
__all__ = [
    "GPT",
    "MLP",
    "SIZES",
    "GPTConfig",
    "MLPConfig",
    "ModelConfig",
    "ResNet",
    "ResNetConfig",
    "ViT",
    "ViTConfig",
    "build",
    "classification_loss",
    "generate",
    "linear_next_token_loss",
    "next_token_loss",
    "parameter_count",
]

if not TYPE_CHECKING:  # or else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
