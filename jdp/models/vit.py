"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): classifies images that are cut into patches.

In the order of the file: the configuration; the model (patches, positions, layers, a last norm, one vector for the
image, logits); the embedding. Layers are those of the GPT, without the causal mask and rotary positions.

Dtypes: the patch kernel's dtype is that of activations and products. Softmax, norms and logits are float32.

Initial values follow the authors' code (google-research/vision_transformer, `models_vit.py`) in variance: kernels
Glorot (normal here, uniform there), patches 1 / inputs (LeCun), positions standard deviation 0.02; the class token, the
head and the biases zero (the feed-forward's there 1e-6).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.attention import Attend
from jdp.models.checks import require, require_choice, require_heads, require_images, require_positive, require_rates
from jdp.models.modules import Classifier, Linear, dropout
from jdp.models.transformer import LayerConfig, Remat, fold_range, make_layers, run_layers

POSITION_STD = 0.02

Pool = Literal["token", "mean"]


@dataclass(frozen=True)
class ViTConfig:
    """Shape and choices of a ViT.

    Fields:
        image_size, patch: pixels of the side of an image and of a patch.
        channels, classes: of an image (3: colours); of the logits.
        layers, width, heads: depth; size of the residual stream; heads, each `width / heads` wide.
        mlp_width: hidden size of the feed-forward (gelu in its tanh form); None: 4 * width.
        pool: the vector that is classified: "token", of a learned token that goes through the layers beside the
            patches; or "mean", the mean of the patches.
        dropout: rate on the embedding and on both residual branches.
        norm_eps: added to the variance in norms.
        scan, remat, attention: as for `GPTConfig`.

    Raises:
        ValueError: a size that does not fit another, or a choice that does not exist.
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
    scan: bool = True
    remat: Remat | None = None
    attention: Attend = "auto"

    def __post_init__(self) -> None:
        sizes = ("classes", "layers", "width", "heads", "patch", "image_size", "channels")
        require_positive(self, *sizes, optional=("mlp_width",))
        require_choice(self, pool=get_args(Pool), attention=get_args(Attend), remat=(None, *get_args(Remat)))
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

    @property
    def layer(self) -> LayerConfig:
        """The configuration of one layer."""
        return LayerConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            hidden=4 * self.width if self.mlp_width is None else self.mlp_width,
            activation="gelu",
            norm="layer",
            norm_eps=self.norm_eps,
            bias=True,
            dropout=self.dropout,
            attention=self.attention,
            causal=False,
        )


class ViT(nnx.Module):
    """Images to logits. Holds parameters only.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = PatchEmbedding(config, rngs=rngs)
        self.layers = make_layers(config.layer, config.layers, rngs.params(), scan=config.scan)
        self.final_norm = config.layer.make_norm()
        self.head = Classifier(config.width, config.classes, std=0.0, rngs=rngs)

    def __call__(
        self, images: jax.Array, *, rng: jax.Array | None = None, weights: jax.Array | None = None
    ) -> jax.Array:
        """Return logits [batch, classes] float32.

        Args:
            images: [batch, image_size, image_size, channels] floats, already normalised.
            rng: typed key for dropout; None: no dropout.
            weights: not used, as an image's logits do not depend on others; every model of images takes them.

        Raises:
            ValueError: images of another shape, or not floats.
        """
        del weights
        config = self.config
        require_images(images, channels=config.channels, size=config.image_size)
        x, keys = self.embed(images), None
        if rng is not None and config.dropout > 0:
            keys = fold_range(rng, config.layers)
            x = dropout(x, config.dropout, jax.random.fold_in(rng, config.layers), site=0)
        x = self.final_norm(run_layers(self.layers, x, keys, remat=config.remat))
        if config.pool == "token":
            return self.head(x[:, 0])
        return self.head(jnp.mean(x, axis=1, dtype=jnp.float32).astype(x.dtype))


class PatchEmbedding(nnx.Module):
    """A linear map of each patch, row by row, after the class token if there is one, plus learned positions.

    `patches/kernel` [patch * patch * channels, width] is a convolution's [patch, patch, channels, width], flattened;
    `token` [1, width]; `positions` [length, width].
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        pixels = config.patch**2 * config.channels
        self.patch = config.patch
        self.patches = Linear(pixels, config.width, std=1 / math.sqrt(pixels), bias=True, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, config.width))) if config.pool == "token" else None
        self.positions = nnx.Param(POSITION_STD * jax.random.normal(rngs.params(), (config.length, config.width)))

    def __call__(self, images: jax.Array) -> jax.Array:
        """[batch, image_size, image_size, channels] -> [batch, length, width] in the patch kernel's dtype."""
        batch, side, _, channels = images.shape
        size, count = self.patch, side // self.patch
        cut = images.reshape(batch, count, size, count, size, channels).swapaxes(2, 3)
        x = self.patches(cut.reshape(batch, count * count, -1).astype(self.patches.kernel.dtype))
        dtype, x = x.dtype, x.astype(jnp.float32)  # so that the gradients of what every image shares sum in float32
        if self.token is not None:
            token = jnp.broadcast_to(self.token[...].astype(jnp.float32), (batch, 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        return (x + self.positions[...].astype(jnp.float32)).astype(dtype)
