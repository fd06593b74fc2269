"""GPT, ResNet, ViT and MLP in plain NNX; of jdp they know `scan_layers` and the device traced for only."""

from jdp.models.gpt import GPT, GPTConfig
from jdp.models.losses import classification_loss, next_token_loss
from jdp.models.mlp import MLP, MLPConfig
from jdp.models.resnet import ResNet, ResNetConfig
from jdp.models.sampling import generate
from jdp.models.sizes import SIZES, ModelConfig, build, parameter_count
from jdp.models.vit import ViT, ViTConfig

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
    "next_token_loss",
    "parameter_count",
]
