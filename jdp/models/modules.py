"""Building blocks of the models: a linear map, a norm, dropout, logits.

Parameters are created in float32; a training step may pass copies in another dtype. Every module computes in the dtype
of its activations, but keeps long sums in float32: the statistics of a norm, and the gradient of a bias over all tokens
of the batch. A bfloat16 has eight significant bits, so a running sum of ones stops at 256.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.lax import DotAlgorithmPreset

from jdp.core.rematerialisation import STATISTICS
from jdp.core.sharding.mesh import traced_device, traced_model_axes, traced_shards


@dataclass(frozen=True)
class LoRA:
    """A low-rank update of a kernel: kernel + alpha / rank * lora_a @ lora_b (arXiv:2106.09685, section 4.1)."""

    rank: int
    alpha: float


class Linear(nnx.Module):
    """`x @ kernel + bias`: [..., features_in] -> [..., features_out], in x's dtype.

    Args:
        features_in, features_out: sizes of the last dim before and after.
        std: standard deviation of the kernel's normal initial values; biases start at zero. None: that of Glorot and
            Bengio 2010, eq. 16, sqrt(2 / (features_in + features_out)).
        bias: whether to add a bias.
        lora: adds the matrices of a low-rank update, `lora_a` [features_in, rank] and `lora_b` [rank, features_out], as
            `nnx.LoRAParam`. `lora_b` starts at zero, so the map does not change; the kernel has the same bits.
        rngs: the `params` stream is used.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        std: float | None,
        bias: bool,
        lora: LoRA | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        key = rngs.params()
        std = math.sqrt(2 / (features_in + features_out)) if std is None else std
        self.kernel = nnx.Param(std * jax.random.normal(key, (features_in, features_out)))
        self.bias = nnx.Param(jnp.zeros(features_out)) if bias else None
        self.lora = lora
        if lora is None:
            self.lora_a = self.lora_b = None
        else:
            # Gaussian as in the paper, with the variance of its code's uniform draw (microsoft/LoRA). The key is folded
            # from the kernel's, because one more draw from the stream would change every later kernel.
            draw = jax.random.normal(jax.random.fold_in(key, 1), (features_in, lora.rank))
            self.lora_a = nnx.LoRAParam(draw / math.sqrt(3 * features_in))
            self.lora_b = nnx.LoRAParam(jnp.zeros((lora.rank, features_out)))

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = _rows(x)
        y = rows @ self.kernel[...].astype(x.dtype)
        if self.lora is not None and self.lora_a is not None and self.lora_b is not None:
            low = rows @ self.lora_a[...].astype(x.dtype)
            y = y + self.lora.alpha / self.lora.rank * (low @ self.lora_b[...].astype(x.dtype))
        return self.plus_bias(y).reshape(*x.shape[:-1], y.shape[-1])

    def plus_bias(self, y: jax.Array) -> jax.Array:
        """Return y [rows, features_out] with the bias, if there is one."""
        if self.bias is None:
            return y
        return (y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(y.dtype)


def mapped(x: jax.Array, *maps: Linear) -> list[jax.Array]:
    """Return the results of several linear maps of x; a map that is not exactly a `Linear`, as after a swap, is called.

    On a CPU long sequences use one product, because copying the kernels then costs little: a step of the quickstart
    takes 0.955 of the time. On GPUs XLA decides.
    """
    is_long = traced_device().platform == "cpu" and math.prod(x.shape[1:-1]) >= 64  # however many rows there are
    is_plain = all(type(each) is Linear and each.lora is None for each in maps)
    if not is_long or not is_plain or traced_model_axes():
        return [each(x) for each in maps]
    y = _rows(x) @ jnp.concatenate([each.kernel[...] for each in maps], axis=1).astype(x.dtype)
    parts = jnp.split(y, np.cumsum([each.kernel.shape[1] for each in maps])[:-1], axis=1)
    return [each.plus_bias(part).reshape(*x.shape[:-1], -1) for each, part in zip(maps, parts, strict=True)]


class Classifier(Linear):
    """A linear map to logits: [batch, features_in] of any dtype -> [batch, classes] float32; products of x's dtype."""

    def __init__(self, features_in: int, classes: int, *, std: float, rngs: nnx.Rngs) -> None:
        super().__init__(features_in, classes, std=std, bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.bias is not None
        return product("...d,dc->...c", x, self.kernel[...]) + self.bias[...].astype(jnp.float32)


class Norm(nnx.Module):
    """LayerNorm (arXiv:1607.06450) or, with `center=False`, RMSNorm (arXiv:1910.07467) of the last dim, in x's dtype.

    `eps` is added to the variance, and with `bias` a learned offset to the result.
    """

    def __init__(self, width: int, *, center: bool, bias: bool, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None
        self.center = center
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.center:
            y = y - checkpoint_name(jnp.mean(y, axis=-1, keepdims=True), STATISTICS)
        root = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * (checkpoint_name(root, STATISTICS) if self.center else root)  # an RMS norm's is recomputed
        y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def product(equation: str, x: jax.Array, table: jax.Array) -> jax.Array:
    """Return the logits: the product of x [..., d] and a table cast to x's dtype, summed and returned in float32.

    The equation is an einsum's: "...d,dv->...v" or "...d,vd->...v"; x enters it as a matrix.
    """
    # Naming the algorithm keeps the two transposed products in x's dtype as well. Without it they would mix the float32
    # cotangent with a 16-bit operand and run in float32: jax-ml/jax issue 24047.
    algorithms = {
        jnp.dtype(jnp.bfloat16): DotAlgorithmPreset.BF16_BF16_F32,
        jnp.dtype(jnp.float16): DotAlgorithmPreset.F16_F16_F32,
    }
    operands, algorithm = (_rows(x), table.astype(x.dtype)), algorithms.get(x.dtype)
    y = jnp.einsum(equation, *operands, precision=algorithm, preferred_element_type=jnp.float32)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _rows(x: jax.Array) -> jax.Array:
    """Return [..., features] as [rows, features].

    The gradient of a kernel is then a sum over one dimension. For a sum over two, batch and length, XLA:CPU first
    writes transposed copies of both operands: a fifth of a small GPT's step.
    """
    return x.reshape(-1, x.shape[-1])


def plus_to_each(x: jax.Array, y: jax.Array) -> jax.Array:
    """Add y [...] to each row of x [batch, ...].

    The gradient of y is a sum over the batch. With 32 rows or more on a device, XLA:GPU lays out all activations with
    the batch as their innermost dimension, and transposes them at each product: 5 % of GPT-2's step. So a GPU adds y to
    fewer rows at a time, and sums their gradients.
    """
    shards = math.gcd(traced_shards(), len(x))
    rows = len(x) // shards
    fewest = -(-rows // 31)
    parts = next((count for count in range(fewest, 4 * fewest) if rows % count == 0), 1)
    if parts == 1 or traced_device().platform != "gpu":
        return x + y
    split = x.reshape(shards, parts, -1, *y.shape)
    return jnp.stack([split[:, i] + y for i in range(parts)], axis=1).reshape(x.shape)


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, site: int) -> jax.Array:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate) (Srivastava et al. 2014).

    The mask is drawn in x's shape, batch first, so a key for some rows of the batch yields exactly their rows of the
    mask. There is no state: the same key and `site`, a number among calls that share the key, give the same mask.
    """
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
