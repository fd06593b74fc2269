"""The pieces that both models are made of: a linear map, a norm, dropout, and the rule-checker of their configurations.

Parameters are float32 when born. A training step may hand in copies in another dtype; every piece computes in the dtype
of the activations it is given and keeps its long sums in float32: the statistics of a norm, and (by adding the bias in
float32) the gradient of a bias, which is a sum over every token of the batch. A bfloat16 holds eight significant bits:
a running sum of ones stops at 256.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
    """`x @ kernel + bias`: [..., features_in] -> [..., features_out], in x's dtype.

    Args:
        features_in, features_out: sizes of the last dim before and after.
        std: standard deviation of the normal from which the kernel is drawn; biases start at zero.
        bias: whether there is one.
        rngs: the `params` stream is used.
    """

    def __init__(self, features_in: int, features_out: int, *, std: float, bias: bool, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (features_in, features_out)))
        self.bias = nnx.Param(jnp.zeros(features_out)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        if self.bias is None:
            return y
        return (y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Norm(nnx.Module):
    """LayerNorm (arXiv:1607.06450) or, with `center=False`, RMSNorm (arXiv:1910.07467) of the last dim, in x's dtype.

    Args:
        width: size of the last dim.
        center: subtract the mean.
        bias: whether a learned offset is added.
        eps: added to the variance.
    """

    def __init__(self, width: int, *, center: bool, bias: bool, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None
        self.center = center
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.center:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, site: int) -> jax.Array:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate) (Srivastava et al. 2014).

    Args:
        x: [batch, ...]. The mask is drawn in this shape, batch first, so that a key that stands for some rows of the
            batch can yield exactly their rows of the mask.
        rate: in [0, 1).
        key: typed key, or None for no dropout. No state is kept: the same key gives the same mask.
        site: which of the places that share `key` this is.
    """
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


def require(holds: bool, rule: str, given: str, fix: str) -> None:
    """Raise ValueError unless the rule holds, with the rule, the values given and the way out."""
    if not holds:
        raise ValueError(f"{rule}; given {given}. {fix}.")
