"""Softmax attention in the best form for the devices of the trace: cuDNN's kernels, XLA's operations, or blocks.

cuDNN's kernels (flash attention, arXiv:2205.14135) never hold the weights [batch, heads, length, length]. They take
16-bit floats on NVIDIA GPUs since Ampere; `cudnn_refuses` has the same rules as jax's own checks.

On a CPU causal attention is computed in two to four blocks of queries, each with the keys that it sees. That saves a
quarter or more of the products and the softmax, and keeps one layout.

On other devices, rows with several documents that are longer than a block are computed block by block, also with a
window. cuDNN's kernel takes a fixed number of documents, so it is no alternative.

    for each pair of blocks (i, j), (i, i) first:
        s = query[i] key[j]^T / sqrt(D), -inf if a query does not see the key
        update of rows i, by s:  m the maximum,  t the sum of exponentials,  o the sum of values

No array is [length, length] (Rabe and Staats 2021, arXiv:2112.05682). The backward pass computes the scores again, from
the logarithm of each row's sum (Dao et al. 2022, arXiv:2205.14135, algorithm 4). Pairs after the queries, or before
their window, are skipped. All others are computed for any documents, so the number of rounds is fixed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # jax's own checks are private
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jdp.core.rematerialisation import ATTENTION
from jdp.core.sharding.mesh import is_traced_by_shard, traced_device, traced_model_axes, traced_shards
from jdp.models.configs import Attend, require

MODEL = "model"
"""The mesh axis of tensor parallelism (arXiv:1909.08053), which shards the heads."""
_MOST_BLOCKS, _SHORTEST_BLOCK = 4, 64
SCORE_BYTES = 128 * 2**20
"""Most bytes of a block's float32 scores over all rows and heads, unless the smallest block has more."""
_SIZES = (1024, 512, 256)
_TILE = 64
Results = tuple[jax.Array, ...]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    run: jax.Array | None = None,
    by: Attend = "auto",
) -> jax.Array:
    """Return softmax(query key^T / sqrt(D)) value, softmax in float32 (arXiv:1706.03762, eq. 1).

    Args:
        query: [batch, length, heads, D], like the result.
        key, value: [batch, length, kv_heads, D]; query head h reads head h // (heads / kv_heads) (arXiv:2305.13245).
        causal: a position attends to itself and earlier positions; else to all.
        window: most positions that a causal position attends to, with itself; None: all.
        run: [batch, length] integers >= 0, the document of each token, which attends inside it; None: one document.
        by: "cudnn" is refused if cuDNN does not support the case; "xla" runs anywhere in any dtype. "auto" is cuDNN if
            supported, else XLA, in blocks: on a CPU if causal, elsewhere within long documents.
    """
    if window is None or window >= key.shape[1]:
        window = None  # it covers all earlier positions
    packed, device = run is not None, traced_device()
    refused = cudnn_refuses(query, key, packed=packed, device=device) if by != "xla" else None
    if by == "cudnn" and refused is not None:
        require(False, *refused)
    if by != "xla" and refused is None:
        return _by_cudnn(query, key, value, causal, window)
    batch, length, heads, _ = query.shape
    on_cpu = device.platform == "cpu"
    if by == "auto" and run is not None and not on_cpu:
        shards, head_shards = math.gcd(traced_shards(), batch), math.gcd(math.prod(traced_model_axes().values()), heads)
        size = block_size(batch // shards, length, heads // head_shards)
        if size < length:
            return attend_in_documents(query, key, value, run, Sight(causal, window, size))
    blocks = min(_MOST_BLOCKS, length // _SHORTEST_BLOCK)  # each is compiled, and a short one gains little
    if by == "auto" and on_cpu and causal and not packed and blocks > 1 and length % blocks == 0:
        mixed = _causal_in_blocks(query, key, value, blocks, window)
    else:
        mask = _mask(length, window, run)
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal, implementation="xla")
    return checkpoint_name(mixed, ATTENTION)


def _mask(length: int, window: int | None, run: jax.Array | None) -> jax.Array | None:
    """Return the keys that a query sees (without the causal rule): bool [batch or 1, 1, length, length]; None: all.

    Every layer computes it, because the comparison fuses into the softmax, and a shared mask would be stored.
    """
    mask = None if run is None else (run[:, :, None] == run[:, None, :])[:, None]
    if window is None:
        return mask
    index = jnp.arange(length, dtype=jnp.int32)
    near = (index[:, None] - index < window)[None, None]
    return near if mask is None else mask & near


def _by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, window: int | None) -> jax.Array:
    near = None if window is None else (window - 1, 0)

    def run(*operands: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*operands, is_causal=causal, local_window_size=near, implementation="cudnn")

    if is_traced_by_shard() and traced_model_axes():  # jax's rule for sharding this call fails here
        heads = PartitionSpec(None, None, MODEL, None)
        run = jax.shard_map(run, in_specs=heads, out_specs=heads, axis_names={MODEL}, check_vma=False)
    return run(query, key, value)


def _causal_in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, blocks: int, window: int | None) -> jax.Array:
    """Return causal attention: queries in blocks, each with the keys that the block sees.

    Heads that share a key are rows of one matrix: [batch, kv_heads, heads / kv_heads * block, D].
    """
    batch, length, heads, width = query.shape
    shared, size = heads // key.shape[2], length // blocks
    query = query.reshape(batch, length, -1, shared, width).transpose(0, 2, 3, 1, 4)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    mixed: list[jax.Array] = []
    for first, last in zip(range(0, length, size), range(size, length + 1, size), strict=True):
        rows = query[:, :, :, first:last].reshape(batch, -1, shared * size, width)
        begin = 0 if window is None else max(0, first - window + 1)
        scores = jnp.einsum("bkqd,bksd->bkqs", rows, key[:, :, begin:last], preferred_element_type=jnp.float32)
        before = np.arange(first, last, dtype=np.int32)[:, None] - np.arange(begin, last, dtype=np.int32)
        seen = np.tile((before >= 0) & (before < (window or length)), (shared, 1))
        weights = jax.nn.softmax(jnp.where(seen, scores / math.sqrt(width), -jnp.inf)).astype(value.dtype)
        block = jnp.einsum("bkqs,bksd->bkqd", weights, value[:, :, begin:last])
        mixed.append(block.reshape(batch, -1, shared, size, width))
    return jnp.concatenate(mixed, axis=3).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def cudnn_refuses(query: jax.Array, key: jax.Array, *, packed: bool, device: Any) -> tuple[str, str, str] | None:
    """Return (rule, value given, fix) if cuDNN does not support this attention on `device`; else None.

    Query is [batch, length, heads, D], key [batch, length, kv_heads, D]. `packed` rows hold several documents.
    """
    kind, xla = getattr(device, "device_kind", device.platform), 'set attention = "xla"'
    if packed:
        return "cudnn attention takes no segments", "segments", 'Set attention = "auto" or "xla"'
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return "cudnn attention runs on NVIDIA GPUs", kind, 'Set attention = "auto" or "xla"'
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return "cudnn attention takes 16-bit floats", f"{query.dtype}", f"Compute in bf16, or {xla}"
    try:
        capability = tuple(int(part) for part in device.compute_capability.split("."))
        version = cudnn.check_cudnn_version()
    except (ValueError, RuntimeError):  # an AMD GPU's architecture; no cuDNN
        return "cudnn attention needs cuDNN", f"{kind} without it", f"Install nvidia-cudnn, or {xla}"
    if capability < (8, 0) or (capability == (10, 3) and version < 91_100):
        given = f"{kind} ({device.compute_capability}) with cuDNN {version}"
        return "cudnn attention runs on compute capability 8.0 and later (10.3: cuDNN 9.11)", given, xla.capitalize()
    axes = traced_model_axes() if is_traced_by_shard() else {}
    if axes and (set(axes) != {MODEL} or key.shape[2] % axes[MODEL]):
        rule = f"cudnn attention takes heads that are sharded over {MODEL} alone, evenly"
        return rule, f"kv_heads({key.shape[2]}) and {axes}", f"Change the mesh, or {xla}"
    width, widest = query.shape[-1], 256 if capability >= (9, 0) else 128
    if width % 8 or width > widest:
        rule = f"cudnn attention takes heads of at most {widest} elements, a multiple of 8"
        return rule, f"{width}", f"Change width or heads, or {xla}"
    return None


# Block by block, within documents.


def block_size(batch: int, length: int, heads: int) -> int:
    """Return the positions of a block: the fewest, in multiples of 64, for the least number of blocks.

    A block has at most 1024, 512 or 256: larger blocks need fewer passes over memory, but hold more.
    """
    most = next((size for size in _SIZES if 4 * batch * heads * size**2 <= SCORE_BYTES), _SIZES[-1])
    blocks = math.ceil(length / most)
    return math.ceil(length / (blocks * _TILE)) * _TILE


class Sight(NamedTuple):
    """The keys that a query sees in its document; `causal` and `window` as for `attend`."""

    causal: bool  # keys up to its own position; else all
    window: int | None  # the number of last keys; None: all
    size: int  # positions of a block


def attend_in_documents(query: jax.Array, key: jax.Array, value: jax.Array, run: jax.Array, sight: Sight) -> jax.Array:
    """Return `attend` within documents, block by block; statistics and sums in float32."""
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


def _scores(query: jax.Array, key: jax.Array, run: jax.Array, i: jax.Array, j: jax.Array, sight: Sight) -> jax.Array:
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
