"""A product of activations and a weight in float8, made of Flax's parts (`flax.linen.fp8_ops`).

The forward pass multiplies e4m3 by e4m3, the backward pass gradients in e5m2 by e4m3 (Micikevicius et al. 2022,
arXiv:2209.05433). Sums are float32, results have the dtype of the activations. Every operand has one scale, that of its
largest element, found at each use ("current scaling"): nothing is kept from step to step.

A scale is a power of two, which rounds nothing. Numbers within some 2^14 of the largest have the same significant bits
for any scale, and multiplying a result by it is exact.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST_SCALE = 2.0**-62
"""The product of two is still a normal float32. It is that of zeros, which have no scale of their own."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_product(x: jax.Array, weight: jax.Array, dims: Any, native: bool) -> jax.Array:
    """Return `jax.lax.dot_general(x, weight, dims)`, multiplied in float8.

    A number that is not finite makes every element of the result NaN, so that the step is skipped as in other dtypes.
    """
    return _forward(x, weight, dims, native)[0]


def _forward(x: jax.Array, weight: jax.Array, dims: Any, native: bool) -> tuple[jax.Array, Any]:
    (x_bits, x_scale), (w_bits, w_scale) = _rounded(x, FORWARD), _rounded(weight, FORWARD)
    dtype = None if native else x.dtype
    x8, w8 = _numbers(x_bits, FORWARD, dtype), _numbers(w_bits, FORWARD, dtype)
    y = jax.lax.dot_general(x8, w8, dims, preferred_element_type=x.dtype)
    # The backward pass keeps activations in float8. It rounds the weight again: gathered weights are never kept.
    return y * (x_scale * w_scale).astype(x.dtype), (x_bits, x_scale, weight)


def _backward(dims: Any, native: bool, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_bits, x_scale, weight = kept
    (w_bits, w_scale), (g_bits, g_scale) = _rounded(weight, FORWARD), _rounded(gradient, BACKWARD)
    dtype = None if native else gradient.dtype
    x8, w8, g8 = (_numbers(x_bits, FORWARD, dtype), _numbers(w_bits, FORWARD, dtype), _numbers(g_bits, BACKWARD, dtype))
    # At the highest precision cuBLASLt adds in full float32, which a gradient's long sums need.
    options: dict[str, Any] = {"dimension_numbers": dims, "precision": jax.lax.Precision.HIGHEST}
    options["preferred_element_type"] = gradient.dtype
    of_x = fp8_ops.dot_general_transpose_lhs(g8, x8, w8, **options)
    of_weight = fp8_ops.dot_general_transpose_rhs(g8, x8, w8, **options)
    return of_x * (g_scale * w_scale).astype(of_x.dtype), of_weight * (g_scale * x_scale).astype(of_weight.dtype)


fp8_product.defvjp(_forward, _backward)


def _rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return x / scale as the bits of `dtype`, and the scale: the least power of two with which x fits, float32.

    Bits, because `jax.checkpoint` passes floating-point numbers that it keeps through `reduce_precision`, which takes
    e4m3fn for an IEEE type: it makes infinity of 256 and more, and zero of subnormal numbers.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32) / jnp.finfo(dtype).max.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, _LEAST_SCALE), jnp.uint32)
    # With a significand other than 1, the exponent goes up by one; infinity stays infinity.
    scale = jax.lax.bitcast_convert_type((bits + jnp.uint32(0x007FFFFF)) & jnp.uint32(0xFF800000), jnp.float32)
    return jax.lax.bitcast_convert_type(fp8_ops.quantize(x, dtype, scale, jnp.float32), jnp.uint8), scale


def _numbers(bits: jax.Array, dtype: Any, wider: Any) -> jax.Array:
    """Return the numbers that bits of `dtype` stand for, in `wider` if that is not None."""
    numbers = jax.lax.bitcast_convert_type(bits, dtype)
    return numbers if wider is None else numbers.astype(wider)
