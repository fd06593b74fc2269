"""The configuration of a ResNet."""

from dataclasses import dataclass
from typing import Literal, get_args

from jdp.models.checks import require, require_choice, require_positive

BlockKind = Literal["basic", "bottleneck"]
Stem = Literal["imagenet", "small"]

EXPANSION = 4
"""A bottleneck's output has this many times the channels of its 3 x 3 convolution."""


@dataclass(frozen=True)
class ResNetConfig:
    """Shape and choices of a ResNet.

    Fields:
        image_size: pixels of a side, for counting FLOPs; the network takes any size.
        channels, classes: of an image (3: colours); of the logits.
        blocks: number of residual blocks of each stage. Every stage but the first halves the image's sides.
        block: "basic" (two 3 x 3 convolutions) or "bottleneck" (1 x 1, 3 x 3, 1 x 1).
        width: channels of the first stage's 3 x 3 convolutions; each later stage doubles them.
        stem: "imagenet" (7 x 7 stride 2, then 3 x 3 max pooling stride 2) or, for images of at most about 64 pixels,
            "small" (3 x 3, stride 1).
        zero_init: blocks start as their shortcuts.
        norm_momentum: weight of the old value in a running average.
        norm_eps: added to the variance in norms.

    Raises:
        ValueError: a size that is not a positive integer, a number out of range, or a choice that does not exist.

    >>> ResNetConfig(classes=10, blocks=(2, 2), width=16, stem="small").features
    32
    """

    classes: int
    blocks: tuple[int, ...]
    block: BlockKind = "basic"
    width: int = 64
    image_size: int = 224
    channels: int = 3
    stem: Stem = "imagenet"
    zero_init: bool = True
    norm_momentum: float = 0.9
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require(type(self.blocks) is tuple, "blocks is a tuple, one number a stage", repr(self.blocks), "Write (2, 2)")
        positive = self.blocks and all(type(count) is int and count > 0 for count in self.blocks)
        require(bool(positive), "blocks are positive integers", repr(self.blocks), "Remove empty stages")
        require_positive(self, "classes", "width", "image_size", "channels")
        require_choice(self, block=get_args(BlockKind), stem=get_args(Stem))
        decays = 0.0 <= self.norm_momentum < 1.0
        require(decays, "norm_momentum is in [0, 1)", f"{self.norm_momentum}", "0.9 is usual")
        require(self.norm_eps > 0, "norm_eps is positive", f"{self.norm_eps}", "1e-5 is usual")

    @property
    def features(self) -> int:
        """Input channels of the head."""
        return self.width * 2 ** (len(self.blocks) - 1) * (EXPANSION if self.block == "bottleneck" else 1)
