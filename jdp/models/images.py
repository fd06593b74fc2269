"""Models that classify images: residual networks (He et al. 2015, arXiv:1512.03385) and the vision transformer.

Parameters and statistics of a ResNet are named `stem/conv/kernel`, `stem/norm/mean`, `stages/0/blocks/0/conv1/kernel`,
`stages/1/blocks/0/shortcut/norm/scale`, `head/bias`. The 3 x 3 convolution of a bottleneck has the stride, not the
1 x 1 before it ("v1.5": Goyal et al. 2017, arXiv:1706.02677, section 5.1, and torchvision); paddings are symmetric, as
in torchvision. Initial values: kernels normal with variance 2 / (k^2 * channels out) (He et al. 2015, arXiv:1502.01852,
eq. 14); the head normal with standard deviation 0.01; the scale of a block's last norm zero, so a block starts as its
shortcut (Goyal et al. 2017, section 5.1).

The ViT (Dosovitskiy et al. 2020, arXiv:2010.11929) has the layers of the GPT, without the causal mask and rotary
positions. Initial values follow the authors' code (google-research/vision_transformer, `models_vit.py`) in variance:
kernels Glorot (normal here, uniform there), patches 1 / inputs (LeCun). Positions have standard deviation 0.02. The
class token, the head and the biases are zero (there, the feed-forward's biases have 1e-6).

Dtypes: the kernels' dtype is that of activations and products. Statistics, norms, softmax and logits are float32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.configs import EXPANSION, GPTConfig, ResNetConfig, ViTConfig, require
from jdp.models.modules import Classifier, Linear, plus_to_each
from jdp.models.transformer import LayerSpec, make_layers, run_layers

HEAD_STD = 0.01
POSITION_STD = 0.02


def _require_images(images: jax.Array, *, channels: int, size: int | None = None) -> None:
    """Raise ValueError unless images are [batch, height, width, channels] floats, of `size` pixels a side if given."""
    given, is_float = f"{images.dtype}{list(images.shape)}", jnp.issubdtype(images.dtype, jnp.floating)
    is_images = images.ndim == 4 and images.shape[3] == channels and is_float
    fix = "Pass a batch of floats, already normalised, colours last"
    require(is_images, f"images are [batch, height, width, channels({channels})] floats", given, fix)
    fits = size is None or images.shape[1:3] == (size, size)
    require(fits, f"images are image_size({size}) pixels high and wide", given, "Resize them, or change image_size")


class BatchNorm(nnx.BatchNorm):
    """nnx.BatchNorm (arXiv:1502.03167) of [batch, height, width, channels] in x's dtype, computed in float32.

    Variances are biased, in the running average too, as in Flax (PyTorch's running average is unbiased).
    """

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalise x [batch, ..., channels] by the batch's statistics, which update the running averages, or by these.

        `use_running_average` None follows the last `train()` or `eval()`. `mask`, which broadcasts to x, excludes
        values from the statistics if False; if no values remain, the averages do not change.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        y = x.astype(jnp.float32)
        if frozen:
            mean, variance = self.mean[...], self.var[...]
        else:
            mean, variance, count = self._statistics(y, mask)
            rate = jnp.where(count > 0, 1.0 - self.momentum, 0.0)
            # `mean[...] =` asks a tracer for its sharding: JAX writes an error of 7 ms, half of the time of tracing.
            self.mean.set_value(self.mean[...] + rate * (mean - self.mean[...]))
            self.var.set_value(self.var[...] + rate * (variance - self.var[...]))
        y = (y - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None:
            y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)

    def _statistics(self, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return mean and variance [channels], and the number of their elements, over all devices."""
        dims = tuple(range(x.ndim - 1))
        counted = jnp.broadcast_to(True if mask is None else mask, (*x.shape[:-1], 1))
        sums = [jnp.sum(z, axis=dims, where=counted) for z in (x, jnp.square(x))]
        total = jnp.concatenate([*sums, jnp.sum(counted, axis=dims, dtype=jnp.float32)])
        if self.axis_name is not None:  # one small collective
            total = jax.lax.psum(total, self.axis_name, axis_index_groups=self.axis_index_groups)
        count = total[-1]
        mean, square = jnp.split(total[:-1] / jnp.maximum(count, 1.0), 2)
        return mean, jnp.maximum(square - jnp.square(mean), 0.0), count


class ResNet(nnx.Module):
    """Images to logits. Running averages of batch statistics are `nnx.BatchStat`; all other leaves are parameters.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> config = ResNetConfig(classes=10, blocks=(1, 1), width=4, stem="small")
    >>> jax.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3)))).shape
    (2, 10)
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.stem = ConvNorm(config, config.channels, config.width, size=size, stride=stride, rngs=rngs)
        stages: list[Stage] = []
        channels = config.width
        for i, count in enumerate(config.blocks):
            stages.append(Stage(config, channels, config.width * 2**i, count, stride=1 if i == 0 else 2, rngs=rngs))
            channels = stages[-1].channels
        self.stages = nnx.List(stages)
        self.head = Classifier(config.features, config.classes, std=HEAD_STD, rngs=rngs)

    def __call__(
        self, images: jax.Array, *, rng: jax.Array | None = None, weights: jax.Array | None = None
    ) -> jax.Array:
        """Return logits [batch, classes] float32.

        After `train()` (the initial mode) each norm uses the batch's statistics and updates its running averages; after
        `eval()` it uses the averages.

        Args:
            images: [batch, height, width, channels] floats, already normalised.
            rng: unused, because nothing is random; all models take it.
            weights: [batch]; rows of weight 0 (padding) do not count in the statistics. None: all rows count.

        Raises:
            ValueError: images or weights of another shape, or not floats.
        """
        del rng
        _require_images(images, channels=self.config.channels)
        mask = None
        if weights is not None:
            require(weights.shape == images.shape[:1], "weights are [batch]", f"{list(weights.shape)}", "One an image")
            mask = (weights != 0)[:, None, None, None]
        x = jax.nn.relu(self.stem(images.astype(self.stem.conv.kernel.dtype), mask))
        if self.config.stem == "imagenet":
            edges = ((0, 0), (1, 1), (1, 1), (0, 0))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), edges)
        for stage in self.stages:
            x = stage(x, mask)
        return self.head(jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype))


class ConvNorm(nnx.Module):
    """A convolution and a norm: the stem, or the shortcut of a block that changes the shape (1 x 1; section 3.3, B)."""

    def __init__(
        self, config: ResNetConfig, channels: int, outputs: int, *, size: int, stride: int, rngs: nnx.Rngs
    ) -> None:
        self.conv = _conv(channels, outputs, size, stride, rngs=rngs)
        self.norm = _norm(config, outputs, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return self.norm(self.conv(x), mask=mask)


class Stage(nnx.Module):
    """Residual blocks of one resolution; the first may halve it: [batch, h, w, c] -> [batch, h / stride, ..., c']."""

    def __init__(
        self, config: ResNetConfig, channels: int, width: int, count: int, *, stride: int, rngs: nnx.Rngs
    ) -> None:
        blocks: list[Block] = []
        for i in range(count):
            blocks.append(Block(config, channels, width, stride if i == 0 else 1, rngs=rngs))
            channels = blocks[-1].channels
        self.blocks = nnx.List(blocks)
        self.channels = channels

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Block(nnx.Module):
    """Convolutions `conv1`, `conv2`, … with their norms, beside a shortcut."""

    def __init__(self, config: ResNetConfig, channels: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.channels, shapes = width, [(width, 3, stride), (width, 3, 1)]
        if config.block == "bottleneck":
            self.channels = EXPANSION * width
            shapes = [(width, 1, 1), (width, 3, stride), (self.channels, 1, 1)]
        self.count, inputs = len(shapes), channels
        for number, (outputs, size, step) in enumerate(shapes, 1):
            setattr(self, f"conv{number}", _conv(inputs, outputs, size, step, rngs=rngs))
            setattr(self, f"norm{number}", _norm(config, outputs, is_last=number == self.count, rngs=rngs))
            inputs = outputs
        keeps_shape = stride == 1 and channels == self.channels
        shortcut = None if keeps_shape else ConvNorm(config, channels, self.channels, size=1, stride=stride, rngs=rngs)
        self.shortcut = shortcut

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"norm{number}")(getattr(self, f"conv{number}")(y), mask=mask)
            y = y if number == self.count else jax.nn.relu(y)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x, mask)))


def _conv(inputs: int, outputs: int, size: int, stride: int, *, rngs: nnx.Rngs) -> nnx.Conv:
    kernel, start = (size, size), nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nnx.Conv(inputs, outputs, kernel, stride, padding=size // 2, use_bias=False, kernel_init=start, rngs=rngs)


def _norm(config: ResNetConfig, channels: int, *, is_last: bool = False, rngs: nnx.Rngs) -> BatchNorm:
    """Return a norm; with `is_last`, one whose output is added to the shortcut."""
    start = nnx.initializers.zeros_init() if is_last and config.zero_init else nnx.initializers.ones_init()
    return BatchNorm(channels, momentum=config.norm_momentum, epsilon=config.norm_eps, scale_init=start, rngs=rngs)


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
        _require_images(images, channels=config.channels, size=config.image_size)
        x = self.final_norm(run_layers(self.layers, self.embed(images), config, rng)[0])
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
