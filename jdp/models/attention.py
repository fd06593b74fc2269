"""Softmax attention in the best form for the devices of the trace: cuDNN's kernels, XLA's operations, or blocks.

cuDNN's kernels (flash attention, arXiv:2205.14135) never hold the weights [batch, heads, length, length]. They take
16-bit floats on NVIDIA GPUs since Ampere; `cudnn_refuses` has the same rules as jax's own checks.

On a CPU causal attention is computed in two to four blocks of queries, each with the keys that it sees. That saves a
quarter or more of the products and the softmax, and keeps one layout.

On other devices, rows with several documents that are longer than a block are computed block by block (`blockwise.py`),
also with a window.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # jax's own checks are private
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jdp.core.rematerialisation import ATTENTION
from jdp.core.sharding.traced_mesh import is_traced_by_shard, traced_device, traced_model_axes, traced_shards
from jdp.models.blockwise import Sight, attend_in_documents, block_size
from jdp.models.configs import Attend, require

MODEL = "model"
"""The mesh axis of tensor parallelism (arXiv:1909.08053), which shards the heads."""
_MOST_BLOCKS, _SHORTEST_BLOCK = 4, 64


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

    Every layer computes it, as a comparison that fuses into the softmax; a shared mask would be stored and read for all
    layers.
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
        before = np.tile(np.arange(first, last), shared)[:, None] - np.arange(begin, last)
        seen = (before >= 0) & (before < (window or length))
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
