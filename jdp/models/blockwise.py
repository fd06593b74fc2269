"""Attention within the documents of packed rows, by blocks of queries and keys.

    for each pair of blocks (i, j), (i, i) first:
        s = query[i] key[j]^T / sqrt(D), -inf if a query does not see the key
        update of rows i, by s:  m the maximum,  t the sum of exponentials,  o the sum of values

No array is [length, length] (Rabe and Staats 2021, arXiv:2112.05682). The backward pass computes the scores again, from
the logarithm of each row's sum (Dao et al. 2022, arXiv:2205.14135, algorithm 4). Pairs after the queries, or before
their window, are skipped. All others are computed for any documents, so the number of rounds is fixed.

It is for devices without a suitable kernel: cuDNN's takes a fixed number of documents.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdp.core.rematerialisation import ATTENTION

SCORE_BYTES = 128 * 2**20
"""Most bytes of a block's float32 scores over all rows and heads, unless the smallest block has more."""
_SIZES = (1024, 512, 256)
_TILE = 64

Results = tuple[jax.Array, ...]


def block_size(batch: int, length: int, heads: int) -> int:
    """Return the positions of a block: the fewest, in multiples of 64, for the least number of blocks.

    A block has at most 1024, 512 or 256: larger blocks need fewer passes over memory, but hold more. A single block has
    at least `length`.
    """
    most = next((size for size in _SIZES if 4 * batch * heads * size**2 <= SCORE_BYTES), _SIZES[-1])
    blocks = math.ceil(length / most)
    return math.ceil(length / (blocks * _TILE)) * _TILE


class Sight(NamedTuple):
    """The keys that a query sees in its document; `causal` and `window` as for `attend`."""

    causal: bool  # keys up to its own position; else all
    window: int | None  # the number of last keys; None: all
    size: int  # positions of a block


def attend_in_documents(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    run: jax.Array,
    sight: Sight,
) -> jax.Array:
    """Return softmax(query key^T / sqrt(D)) value within documents; statistics and sums in float32.

    Shapes are those of `jdp.models.attention.attend`; `sight` has the keys that a position sees and the block size.
    """
    batch, length, heads, width = query.shape
    more = -length % sight.size
    query, key, value = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (query, key, value))
    run = jnp.pad(run, ((0, 0), (0, more)), constant_values=-1)  # a document of its own, so that no row sees nothing
    query = query.reshape(batch, length + more, key.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    mixed = _differentiable(query, key, value, run, sight)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length + more, heads, width)[:, :length]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, run: jax.Array, sight: Sight
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Return the result of attention, and the residuals of its backward pass.

    Query and result are [batch, kv_heads, heads of each, length, D], key and value [batch, kv_heads, length, D].
    """
    size = sight.size

    def pair(carry: Results, places: Results) -> tuple[Results, None]:
        (most, total, mixed), (i, j) = carry, places
        scores = _scores(query, key, run, i, j, sight)
        before = _block(most, i, size)
        now = jnp.maximum(before, scores.max(axis=-1))  # finite: the first pair is (i, i), where each sees itself
        weights, kept = jnp.exp(scores - now[..., None]), jnp.exp(before - now)
        total = _set(total, kept * _block(total, i, size) + weights.sum(axis=-1), i, size)
        values = _product("bkqs,bksd->bkqd", _rows(weights.astype(value.dtype)), _block(value, j, size, 2))
        mixed = _set(mixed, kept[..., None] * _block(mixed, i, size) + values.reshape(*kept.shape, -1), i, size)
        return (_set(most, now, i, size), total, mixed), None

    zeros = jnp.zeros(query.shape, jnp.float32)
    start = (zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
    (most, total, mixed), _ = jax.lax.scan(pair, start, _pairs(query.shape[3] // size, sight))
    out = checkpoint_name((mixed / total[..., None]).astype(query.dtype), ATTENTION)
    return out, (query, key, value, run, out, checkpoint_name(most + jnp.log(total), ATTENTION))


def _backward(sight: Sight, residuals: tuple[Any, ...], cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    (query, key, value, run, out, logs), size = residuals, sight.size
    scale = 1 / math.sqrt(query.shape[-1])
    inner = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def pair(carry: Results, places: Results) -> tuple[Results, None]:
        (d_query, d_key, d_value), (i, j) = carry, places
        weights = jnp.exp(_scores(query, key, run, i, j, sight) - _block(logs, i, size)[..., None])
        given = _rows(_block(cotangent, i, size))
        d_weights = _product("bkqd,bksd->bkqs", given, _block(value, j, size, 2)).reshape(weights.shape)
        d_scores = scale * weights * (d_weights - _block(inner, i, size)[..., None])
        d_scores, weights = _rows(d_scores.astype(query.dtype)), _rows(weights.astype(value.dtype))
        more = _product("bkqs,bksd->bkqd", d_scores, _block(key, j, size, 2))
        d_query = _set(d_query, _block(d_query, i, size) + more.reshape(_block(query, i, size).shape), i, size)
        more = _product("bkqs,bkqd->bksd", d_scores, _rows(_block(query, i, size)))
        d_key = _set(d_key, _block(d_key, j, size, 2) + more, j, size, 2)
        more = _product("bkqs,bkqd->bksd", weights, given)
        return (d_query, d_key, _set(d_value, _block(d_value, j, size, 2) + more, j, size, 2)), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    sums, _ = jax.lax.scan(pair, start, _pairs(query.shape[3] // size, sight))
    return *(x.astype(like.dtype) for x, like in zip(sums, (query, key, value), strict=True)), None


_differentiable = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(4,))
_differentiable.defvjp(_forward, _backward)


def _pairs(blocks: int, sight: Sight) -> Results:
    """Return the blocks of queries and of keys of each pair; for each block of queries, (i, i) comes first."""
    nearest = math.inf if sight.window is None else sight.window
    pairs = [
        (i, j)
        for i in range(blocks)
        for j in (i, *(j for j in range(i if sight.causal else blocks) if j != i))
        if (i - j - 1) * sight.size + 1 < nearest  # the distance of the first query of i from the last key of j
    ]
    return tuple(jnp.asarray(blocks, jnp.int32) for blocks in zip(*pairs, strict=True))


def _scores(
    query: jax.Array,
    key: jax.Array,
    run: jax.Array,
    i: jax.Array,
    j: jax.Array,
    sight: Sight,
) -> jax.Array:
    """Return the scores of a pair of blocks, [batch, kv_heads, heads of each, queries, keys] in float32.

    The barrier makes the mask depend on the layer; otherwise a loop over layers would compute it once, for all pairs.
    """
    size = sight.size
    rows, columns = _block(query, i, size), _block(key, j, size, 2)
    scores = _product("bkqd,bksd->bkqs", _rows(rows), columns).reshape(*rows.shape[:-1], size)
    scores, run, i, j = jax.lax.optimization_barrier((scores, run, i, j))
    seen = _block(run, i, size, 1)[:, :, None] == _block(run, j, size, 1)[:, None]
    place = jnp.arange(size, dtype=jnp.int32)
    distance = (i * size + place)[:, None] - (j * size + place)
    if sight.causal:
        seen &= distance >= 0
    if sight.window is not None:
        seen &= distance < sight.window
    return jnp.where(seen[:, None, None], scores / math.sqrt(query.shape[-1]), -jnp.inf)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(letters, x, y, preferred_element_type=jnp.float32)


def _block(x: jax.Array, i: jax.Array, size: int, dim: int = 3) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, dim)


def _set(x: jax.Array, block: jax.Array, i: jax.Array, size: int, dim: int = 3) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, i * size, dim)
