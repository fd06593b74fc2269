"""The configuration of a ViT."""

from dataclasses import dataclass
from typing import Literal, get_args

from jdp.models.checks import (
    REMATS,
    SCANS,
    Attend,
    Remat,
    Scan,
    require,
    require_choice,
    require_heads,
    require_positive,
    require_rates,
)

Pool = Literal["token", "mean"]


@dataclass(frozen=True)
class ViTConfig:
    """Shape and choices of a ViT.

    Fields:
        image_size, patch: pixels of the side of an image and of a patch.
        channels, classes: of an image (3: colours); of the logits.
        layers, width, heads: depth; size of the residual stream; heads, each `width / heads` wide.
        mlp_width: hidden size of the feed-forward (gelu in its tanh form); None: 4 * width.
        pool: the vector to classify: "token", a learned token that goes through the layers beside the patches; or
            "mean", the mean of the patches.
        dropout: rate on the embedding and on both residual branches.
        norm_eps: added to the variance in norms.
        scan, remat, attention: as for `GPTConfig`.

    Raises:
        ValueError: a size that does not fit another, or a choice that does not exist.

    >>> config = ViTConfig(classes=10, layers=2, width=32, heads=4, patch=4, image_size=32)
    >>> config.patches, config.length
    (64, 65)
    """

    classes: int
    layers: int
    width: int
    heads: int
    patch: int
    image_size: int = 224
    channels: int = 3
    mlp_width: int | None = None
    pool: Pool = "token"
    dropout: float = 0.0
    norm_eps: float = 1e-6
    scan: Scan = "auto"
    remat: Remat | None = None
    attention: Attend = "auto"

    def __post_init__(self) -> None:
        sizes = ("classes", "layers", "width", "heads", "patch", "image_size", "channels")
        require_positive(self, *sizes, optional=("mlp_width",))
        require_choice(self, pool=get_args(Pool), attention=get_args(Attend), remat=REMATS, scan=SCANS)
        require_rates(self, eps="1e-6")
        require_heads(self.width, self.heads)
        size, patch = self.image_size, self.patch
        require(
            size % patch == 0,
            "patch must divide image_size",
            f"image_size({size}) % patch({patch}) = {size % patch}",
            f"Make image_size a multiple of {patch}, for instance {-(-size // patch) * patch}",
        )

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def length(self) -> int:
        """Number of vectors that go through the layers."""
        return self.patches + (self.pool == "token")
