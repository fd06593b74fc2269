"""The MLP, the smallest model; every model from its configuration; the shapes and number of its parameters.

Counts come from the abstract model (shapes without arrays), so no separate formula can go stale.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.configs import GPTConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig, require
from jdp.models.gpt import GPT
from jdp.models.images import ResNet, ViT
from jdp.models.modules import Linear, dropout


class MLP(nnx.Module):
    """[batch, features_in] -> [batch, features_out] float32, through `layers/0`, `layers/1`, ...

    Kernels start normal with variance 2 / features_in (He et al. 2015, arXiv:1502.01852, eq. 10), the last with 1 /
    features_in because no rectifier follows. Biases start at zero.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> config = MLPConfig(features_in=4, hidden=(8,), features_out=2)
    >>> jax.eval_shape(lambda: MLP(config, rngs=nnx.Rngs(0))(jnp.ones((3, 4)))).shape
    (3, 2)
    """

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        sizes = (config.features_in, *config.hidden, config.features_out)
        gains = (2.0,) * len(config.hidden) + (1.0,)
        self.layers = nnx.List(
            [
                Linear(size, after, std=math.sqrt(gain / size), bias=True, rngs=rngs)
                for size, after, gain in zip(sizes[:-1], sizes[1:], gains, strict=True)
            ]
        )

    def __call__(self, x: jax.Array, *, rng: jax.Array | None = None) -> jax.Array:
        """Return the outputs of a batch, [batch, features_out] float32, computed in the parameters' dtype.

        Args:
            x: [batch, features_in].
            rng: typed key for dropout; None: no dropout.

        Raises:
            ValueError: x of another shape.
        """
        config = self.config
        fits = x.ndim == 2 and x.shape[1] == config.features_in
        require(fits, f"x is [batch, features_in({config.features_in})]", f"{list(x.shape)}", "Reshape each row flat")
        activate = getattr(jax.nn, config.activation)
        *hidden, last = self.layers
        x = x.astype(last.kernel.dtype)
        for site, layer in enumerate(hidden):
            x = dropout(activate(layer(x)), config.dropout, rng, site=site)
        return last(x).astype(jnp.float32)


def build(config: ModelConfig, *, rngs: nnx.Rngs) -> GPT | MLP | ResNet | ViT:
    """Build the model that a configuration describes.

    Args:
        config: shape and choices; its type selects the model.
        rngs: the `params` stream is used.

    >>> from flax import nnx
    >>> from jdp.models import SIZES
    >>> model = nnx.eval_shape(lambda: build(SIZES["gpt2-124m"], rngs=nnx.Rngs(0)))
    >>> type(model).__name__, model.embed.tokens.shape
    ('GPT', (50304, 768))
    """
    match config:
        case GPTConfig():
            return GPT(config, rngs=rngs)
        case MLPConfig():
            return MLP(config, rngs=rngs)
        case ResNetConfig():
            return ResNet(config, rngs=rngs)
        case ViTConfig():
            return ViT(config, rngs=rngs)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters, with LoRA's, without allocating them.

    A tied table counts once; batch statistics are not parameters.

    Args:
        config: shape and choices of the model.

    >>> parameter_count(MLPConfig(features_in=4, hidden=(8,), features_out=2))
    58
    """
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


@functools.cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by path, such as `layers/attention/query/kernel`."""
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
