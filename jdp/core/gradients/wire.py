"""Encoded gradients, for slow links: `wire="bf16"` (2 bytes an element) or "int8" (1, and a scale for each block).

A device sends the codes of each part of its gradient to the device that owns this part (all-to-all), which decodes and
adds them in float32: codes are never summed. A sum that all devices need is encoded once more and gathered.

Numbers are rounded at random, drawn from the step's key, so the sum is right on average and no error is kept between
steps (QSGD, Alistarh et al. 2017, arXiv:1610.02132). Each microbatch and leaf, under zero3 each layer, has a seed: a
uint32 scalar, the same on all devices. Each shard of the batch makes its own key from it. NaN and infinities stay.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp.base.words import Encoding
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import batch_axes
from jdp.core.types import PyTree

BLOCK = 256
"""Elements that share a scale. Leaves are not encoded if a device owns fewer elements than this."""
SCALE_BYTES = 4
_LARGEST_CODE = 127.0
_ROUNDING = 0x726F756E
"""Folded into a step's key: the loss draws from the key itself."""


def is_encoded(elements: int, devices: int) -> bool:
    """Return True if `wire` encodes a gradient of this size: each device owns at least a block of its sum."""
    return elements >= devices * BLOCK


def row_bytes(wire: Encoding, elements: int) -> int:
    """Return the bytes of codes and scales of one device's part of a leaf, padded to whole blocks."""
    blocks = -(-elements // BLOCK)
    return blocks * (2 * BLOCK if wire == "bf16" else BLOCK + SCALE_BYTES)


def seeds(wire: Encoding | None, key: jax.Array) -> Callable[[Any], jax.Array | None]:
    """Return a function from a number to a seed; the seed is None if nothing is encoded."""
    if wire is None:
        return lambda number: None
    rounding = jax.random.fold_in(key, _ROUNDING)
    return lambda number: jax.random.bits(jax.random.fold_in(rounding, number), (), jnp.uint32)


def seeds_by_leaf(tree: PyTree, seed: jax.Array) -> PyTree:
    """Return a tree of seeds like `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(list(_several(seed, len(leaves))))


def seeds_by_row(placements: PyTree, shards: PyTree, seed: jax.Array) -> PyTree:
    """Return `Weight.seed` of each parameter that the backward pass reduces; None for the others."""
    leaves, tree = jax.tree.flatten(placements)
    reduced = [placement.trained and placement.dim is not None for placement in leaves]
    each = zip(_several(seed, len(leaves)), tree.flatten_up_to(shards), reduced, strict=True)
    return tree.unflatten([f + jnp.arange(len(x), dtype=f.dtype) if at_use else None for f, x, at_use in each])


def key_of_shard(seed: jax.Array | None, mesh: Mesh) -> jax.Array:
    """Return the key of a shard of the batch, the same along the model's axes: copies there must stay equal."""
    assert seed is not None
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), jax.lax.axis_index(batch_axes(mesh)))


def _several(seed: jax.Array, count: int) -> jax.Array:
    return jax.random.bits(jax.random.fold_in(jax.random.key(0), seed), (count,), jnp.uint32)


def encode(wire: Encoding, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Return the codes of float32 rows: [n, m] -> [n, codes]; m is a whole number of blocks."""
    if wire == "bf16":  # one of the two nearest bfloat16, at random: a float32 whose lowest 16 bits are zero
        bits = jax.lax.bitcast_convert_type(rows, jnp.uint32)
        bits += jax.random.bits(key, rows.shape, jnp.uint16).astype(jnp.uint32)
        rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        rounded = jnp.where(jnp.isfinite(rows), rounded, rows).astype(jnp.bfloat16)
        return jax.lax.bitcast_convert_type(rounded, jnp.uint16)  # XLA:CPU would send bfloat16 as float32
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    scale = jnp.abs(blocks).max(axis=2, keepdims=True) / _LARGEST_CODE
    scaled = blocks / jnp.where(scale > 0, scale, 1)
    noise = jax.random.bits(key, blocks.shape, jnp.uint16).astype(jnp.float32) * 2.0**-16
    codes = jnp.clip(jnp.floor(scaled + noise), -_LARGEST_CODE, _LARGEST_CODE).astype(jnp.int8)
    scales = jax.lax.bitcast_convert_type(scale[:, :, 0], jnp.int8)
    return jnp.concatenate([x.reshape(rows.shape[0], -1) for x in (codes, scales)], axis=1)


def decode(wire: Encoding, codes: jax.Array) -> jax.Array:
    """Return float32 rows [n, m] from their codes. A scale that is not finite makes its whole block NaN."""
    if wire == "bf16":
        return jax.lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)
    n, blocks = codes.shape[0], codes.shape[1] // (BLOCK + SCALE_BYTES)
    values = codes[:, : blocks * BLOCK].reshape(n, blocks, BLOCK)
    scales = codes[:, blocks * BLOCK :].reshape(n, blocks, SCALE_BYTES)
    scale = jax.lax.bitcast_convert_type(scales, jnp.float32)[:, :, None]
    return jnp.where(jnp.isfinite(scale), values.astype(jnp.float32) * scale, jnp.nan).reshape(n, -1)


def scattered_sum(wire: Encoding, x: jax.Array, dim: int, count: int, key: jax.Array) -> jax.Array:
    """Return this device's shard of the sum over `data`, float32; there are `count` shards along `dim`."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    rows = jnp.moveaxis(parts, dim, 0).reshape(count, -1)
    own = _owned_sum(wire, rows, (DATA,), key)
    return own[0, : rows.shape[1]].reshape(*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :])


def complete_sum(wire: Encoding, x: jax.Array, axes: tuple[str, ...], count: int, key: jax.Array) -> jax.Array:
    """Return the sum over mesh axes of `count` devices, float32, on each device: all decode the same codes."""
    rows = jnp.pad(x.astype(jnp.float32).reshape(-1), (0, -x.size % count)).reshape(count, -1)
    own = _owned_sum(wire, rows, axes, jax.random.fold_in(key, 0))
    codes = jax.lax.all_gather(encode(wire, own, jax.random.fold_in(key, 1)), axes, axis=0, tiled=True)
    return decode(wire, codes)[:, : rows.shape[1]].reshape(-1)[: math.prod(x.shape)].reshape(x.shape)


def _owned_sum(wire: Encoding, rows: jax.Array, axes: tuple[str, ...], key: jax.Array) -> jax.Array:
    """Return the sum over the devices of this device's row, padded to whole blocks: [1, m]."""
    codes = encode(wire, jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK))), key)
    received = jax.lax.all_to_all(codes, axes, split_axis=0, concat_axis=0, tiled=True)
    return decode(wire, received).sum(axis=0, keepdims=True)
