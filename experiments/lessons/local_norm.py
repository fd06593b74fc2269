"""A batch norm of a device's own rows, for the lesson on batch norms."""

import jax
import jax.numpy as jnp
from flax import nnx


class LocalNorm(nnx.Module):
    """A batch norm that jdp does not know: each device has statistics of its own rows, and averages are averaged."""

    def __init__(self, channels: int, momentum: float, rngs: nnx.Rngs) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(channels)), nnx.BatchStat(jnp.ones(channels))
        self.momentum, self.use_running_average = momentum, False

    def __call__(self, x: jax.Array) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            for average, new in ((self.mean, mean), (self.var, var)):
                average[...] = self.momentum * average[...] + (1 - self.momentum) * new
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * self.scale[...] + self.bias[...]
