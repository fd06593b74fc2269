"""The encodings of `Wire`, and the collectives that send codes.

An encoding turns rows of float32 numbers into rows of codes, which the receiving device decodes. Codes are never
summed: a reduction sends them to the device that owns a shard, which decodes and adds in float32. Numbers that are not
finite stay not finite, and the step's guard finds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdp.core.sharding.axes import DATA
from jdp.core.wire.settings import SCALE_BYTES, Wire

_FP8 = jnp.float8_e4m3fn
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def encode(wire: Wire, rows: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the codes of float32 rows: [n, m] -> [n, codes], where m is a whole number of blocks.

    With a key rounding is stochastic, and so right on average over keys. Without one it is to the nearest, which has
    half the variance; error feedback corrects its error.
    """
    if wire.gradients == "topk":
        return _largest(wire, rows)
    if wire.gradients == "bf16":
        rounded = rows if key is None else _round_bits(rows, 16, _noise(key, rows.shape))
        rounded = rounded.astype(jnp.bfloat16)
        return jax.lax.bitcast_convert_type(rounded, jnp.uint16)  # XLA:CPU sends bfloat16 as float32
    return _quantised(rows, wire.block, wire.gradients or "", key)


def decode(wire: Wire, codes: jax.Array, elements: int) -> jax.Array:
    """Return float32 rows [n, elements] from their codes."""
    if wire.gradients == "topk":
        half = codes.shape[1] // 2
        values = jax.lax.bitcast_convert_type(codes[:, :half], jnp.float32)
        rows = jnp.zeros((codes.shape[0], elements), jnp.float32)
        return rows.at[jnp.arange(codes.shape[0])[:, None], codes[:, half:]].add(values)
    if wire.gradients == "bf16":
        return jax.lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)
    return _dequantised(codes, wire.block, wire.gradients or "")


def encode_weights(rows: jax.Array, block: int) -> jax.Array:
    """Return int8 codes and scales of rows of weights, rounded to the nearest: [n, m] -> [n, m + 4m / block]."""
    return _quantised(rows.astype(jnp.float32), block, "int8", None)


def decode_weights(codes: jax.Array, block: int) -> jax.Array:
    """Return float32 rows [n, m] from the codes of `encode_weights`."""
    return _dequantised(codes, block, "int8")


def _quantised(rows: jax.Array, block: int, scheme: str, key: jax.Array | None) -> jax.Array:
    """Return [n, m] as int8: first the codes, then the bytes of the scales. A block's largest is a largest code."""
    blocks = rows.reshape(rows.shape[0], -1, block)
    scale = jnp.abs(blocks).max(axis=2, keepdims=True) / _LARGEST[scheme]
    scaled = blocks / jnp.where(scale > 0, scale, 1)
    if scheme == "int8":
        rounded = jnp.round(scaled) if key is None else jnp.floor(scaled + _noise(key, blocks.shape))
        codes = jnp.clip(rounded, -127, 127).astype(jnp.int8)
    else:
        rounded = scaled.astype(_FP8) if key is None else _rounded_to_fp8(scaled, _noise(key, blocks.shape))
        codes = jax.lax.bitcast_convert_type(rounded, jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale[:, :, 0], jnp.int8)
    return jnp.concatenate([x.reshape(rows.shape[0], -1) for x in (codes, scales)], axis=1)


def _dequantised(codes: jax.Array, block: int, scheme: str) -> jax.Array:
    """Return float32 [n, m]. A scale that is not finite makes its whole block NaN."""
    n, blocks = codes.shape[0], codes.shape[1] // (block + SCALE_BYTES)
    values = codes[:, : blocks * block].reshape(n, blocks, block)
    if scheme == "fp8":
        values = jax.lax.bitcast_convert_type(values, _FP8)
    scales = codes[:, blocks * block :].reshape(n, blocks, SCALE_BYTES)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[:, :, None]
    return jnp.where(jnp.isfinite(scale), values.astype(jnp.float32) * scale, jnp.nan).reshape(n, -1)


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform float32 numbers in [0, 1), in steps of 2^-16."""
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) * 2.0**-16


def _round_bits(x: jax.Array, dropped: int, noise: jax.Array) -> jax.Array:
    """Round float32 numbers stochastically to those whose lowest `dropped` bits are zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    added = bits + (noise * 2.0**dropped).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type(added & jnp.uint32(2**32 - 2**dropped), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _rounded_to_fp8(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Round numbers of at most 448 stochastically to e4m3: 3 bits of mantissa; below 2^-6 steps of 2^-9."""
    step = 2.0**-9
    subnormal = jnp.floor(x / step + noise) * step
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, _round_bits(x, 20, noise)).astype(_FP8)


def _largest(wire: Wire, rows: jax.Array) -> jax.Array:
    """Return the values and positions of each row's largest elements: [n, m] -> int32 [n, 2k]."""
    _, index = jax.lax.top_k(jnp.abs(rows), wire.kept(rows.shape[1]))
    values = jnp.take_along_axis(rows, index, axis=1)
    values = jnp.where(jnp.isfinite(rows).all(), values, jnp.nan)
    return jnp.concatenate([jax.lax.bitcast_convert_type(values, jnp.int32), index], axis=1)


def to_rows(x: jax.Array, dim: int | None, count: int) -> jax.Array:
    """Return [count, elements / count]: row i is the i-th part of dimension `dim`; None: of x flattened and padded."""
    if dim is None:
        return jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)
    parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0).reshape(count, -1)


def from_rows(rows: jax.Array, shape: tuple[int, ...], dim: int | None) -> jax.Array:
    """Return the array of this shape whose rows `to_rows` gave."""
    count = rows.shape[0]
    if dim is None:
        return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
    parts = rows.reshape(count, *shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def encoded_gather(wire: Wire, shard: jax.Array, dim: int, count: int) -> jax.Array:
    """Return the complete leaf whose dimension `dim` is sharded over `data`, sent as codes, in the shard's dtype.

    Every device decodes the same codes, the owner of a shard too: all compute with the same weights.
    """
    flat = shard.reshape(1, -1)
    codes = encode_weights(side_by_side([flat], wire), wire.block)
    rows = decode_weights(jax.lax.all_gather(codes, DATA, axis=0, tiled=True), wire.block)[:, : flat.shape[1]]
    whole = (*shard.shape[:dim], shard.shape[dim] * count, *shard.shape[dim + 1 :])
    return from_rows(rows.astype(shard.dtype), whole, dim)


def encoded_scatter(wire: Wire, x: jax.Array, dim: int, count: int, key: jax.Array | None) -> jax.Array:
    """Return a device's shard of the sum over `data` of one leaf, sent as codes, without error feedback."""
    packed = to_rows(x.astype(jnp.float32), dim, count)
    rows = side_by_side([packed], wire)
    own = decode(wire, exchange(encode(wire, rows, key), (DATA,)), rows.shape[1]).sum(axis=0)
    return own[: packed.shape[1]].reshape(*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :])


def exchange(codes: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_to_all(codes, axes, split_axis=0, concat_axis=0, tiled=True)


def side_by_side(packed: Sequence[jax.Array], wire: Wire) -> jax.Array:
    """Return rows next to each other, each leaf's padded to whole blocks."""
    padded = [jnp.pad(rows, ((0, 0), (0, wire.padded(rows.shape[1]) - rows.shape[1]))) for rows in packed]
    return jnp.concatenate(padded, axis=1) if len(padded) > 1 else padded[0]


def split(rows: jax.Array, sizes: Sequence[int], wire: Wire | None = None) -> list[jax.Array]:
    """Return the columns of each leaf; with `wire` without the padding of `side_by_side`."""
    pieces, start = list[jax.Array](), 0
    for size in sizes:
        pieces.append(rows[:, start : start + size])
        start += size if wire is None else wire.padded(size)
    return pieces
