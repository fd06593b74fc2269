"""A multi-layer perceptron: the smallest model, for tests, lessons and tables of features."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.models.checks import require
from jdp.models.modules import Linear, dropout

Activation = Literal["relu", "gelu", "silu", "tanh"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


@dataclass(frozen=True)
class MLPConfig:
    """Shape of an MLP.

    Fields:
        features_in, hidden, features_out: sizes of the input, of each hidden layer (may be empty), of the output.
        activation: after each hidden layer.
        dropout: rate after each activation.

    Raises:
        ValueError: a size that is not a positive integer, a rate outside [0, 1), an unknown activation.
    """

    features_in: int
    hidden: tuple[int, ...]
    features_out: int
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require(type(self.hidden) is tuple, "hidden is a tuple of sizes", repr(self.hidden), "Write (512, 512)")
        sizes: tuple[Any, ...] = (self.features_in, *self.hidden, self.features_out)
        positive = all(isinstance(size, int) and size > 0 for size in sizes)
        require(positive, "features are positive integers", f"in -> hidden -> out {sizes}", "Raise the others")
        known = self.activation in ACTIVATIONS
        require(known, "there is no activation of that name", repr(self.activation), f"Choose one of {[*ACTIVATIONS]}")
        require(0.0 <= self.dropout < 1.0, "dropout is a rate in [0, 1)", f"{self.dropout}", "0 turns it off")


class MLP(nnx.Module):
    """[batch, features_in] -> [batch, features_out] float32, through `layers/0`, `layers/1`, ...

    Kernels start normal with variance 2 / features_in (He et al. 2015, arXiv:1502.01852, eq. 10), the last one with
    1 / features_in because no rectifier follows; biases at zero.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.
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
