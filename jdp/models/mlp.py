"""A multi-layer perceptron: the smallest model, for tests, lessons and tables of features."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.configs import MLPConfig, require
from jdp.models.modules import Linear, dropout

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


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
        activate = ACTIVATIONS[config.activation]
        *hidden, last = self.layers
        x = x.astype(last.kernel.dtype)
        for site, layer in enumerate(hidden):
            x = dropout(activate(layer(x)), config.dropout, rng, site=site)
        return last(x).astype(jnp.float32)
