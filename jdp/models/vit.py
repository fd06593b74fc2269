"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): classifies images cut into patches.

The file has the model (patches, positions, layers, a last norm, one vector for the image, logits), then the embedding.
The configuration is in `jdp.models.configs`; layers are those of the GPT, without the causal mask and rotary
positions.

Dtypes: the patch kernel's dtype is that of activations and products. Softmax, norms and logits are float32.

Initial values follow the authors' code (google-research/vision_transformer, `models_vit.py`) in variance: kernels
Glorot (normal here, uniform there), patches 1 / inputs (LeCun). Positions have standard deviation 0.02. The class
token, the head and the biases are zero (there, the feed-forward's biases have 1e-6).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.configs import GPTConfig, ViTConfig, require_images
from jdp.models.modules import Classifier, Linear, plus_to_each
from jdp.models.transformer import LayerSpec, make_layers, run_layers

POSITION_STD = 0.02


class ViT(nnx.Module):
    """Images to logits. Holds parameters only.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> config = ViTConfig(classes=10, layers=1, width=8, heads=2, patch=4, image_size=8)
    >>> jax.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3)))).shape
    (2, 10)
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = PatchEmbedding(config, rngs=rngs)
        like_gpt = GPTConfig(
            vocab_size=config.classes,
            context=config.length,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            mlp_width=config.mlp_width,
            positions="learned",
            activation="gelu",
            norm="layer",
            norm_eps=config.norm_eps,
            bias=True,
            dropout=config.dropout,
            scan=config.scan,
            attention=config.attention,
        )
        layer = LayerSpec(like_gpt, causal=False)
        self.layers = make_layers(layer, rngs.params())
        self.final_norm = layer.make_norm()
        self.head = Classifier(config.width, config.classes, std=0.0, rngs=rngs)

    def __call__(
        self, images: jax.Array, *, rng: jax.Array | None = None, weights: jax.Array | None = None
    ) -> jax.Array:
        """Return logits [batch, classes] float32.

        Args:
            images: [batch, image_size, image_size, channels] floats, already normalised.
            rng: typed key for dropout; None: no dropout.
            weights: unused, because an image's logits do not depend on others; all image models take them.

        Raises:
            ValueError: images of another shape, or not floats.
        """
        del weights
        config = self.config
        require_images(images, channels=config.channels, size=config.image_size)
        x = self.final_norm(run_layers(self.layers, self.embed(images), config, rng))
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
        dtype, x = x.dtype, x.astype(jnp.float32)  # gradients of token and positions are then summed in float32
        if self.token is not None:
            token = jnp.broadcast_to(self.token[...].astype(jnp.float32), (batch, 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        return plus_to_each(x, self.positions[...].astype(jnp.float32)).astype(dtype)
