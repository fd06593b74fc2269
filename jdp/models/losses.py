"""Cross-entropies as sums for `jdp.Loss` (a total and its weight), and ranks of labels for accuracies."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.sharding.mesh import traced_device, traced_model_axes, traced_shards
from jdp.models.configs import require
from jdp.models.modules import product

CHUNK_BYTES = 2**29
"""Bytes of float32 logits on a device: products of this size are as fast as whole products, and the memory is small."""
TO_LOGITS = {True: "...d,vd->...v", False: "...d,dv->...v"}
"""Whether the head is tied -> the product of features and head."""


def next_token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the cross-entropies of next tokens, weighted.

    Args:
        logits: [batch, length, vocab_size].
        targets: [batch, length] integers. Those of weight zero may be any integer.
        weights: [batch, length]; 0 for padding.

    Returns:
        The weighted sum of cross-entropies in nats, and the sum of the weights: two float32 scalars.

    >>> import jax, numpy as np
    >>> logits, targets, weights = np.zeros((2, 3, 10)), np.zeros((2, 3), int), np.ones((2, 3))
    >>> total, weight = jax.jit(next_token_loss)(logits, targets, weights)
    >>> round(float(total / weight), 3)
    2.303
    """
    weights = weights.astype(jnp.float32)
    return jnp.sum(nats(logits, targets) * weights), jnp.sum(weights)


def linear_next_token_loss(
    features: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    tied: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """Sum the cross-entropies of next tokens, weighted, from features: like `next_token_loss(features @ head, ...)`.

    Logits that would take more than `chunk_bytes` on a device are computed for some positions at a time. Their
    gradients are computed with them, so logits are neither kept nor recomputed (as in Liger Kernel, arXiv:2410.10989,
    section 3.2). Products are in the features' dtype; logits, softmax and the sum of the head's gradient are float32.
    In chunks it has no forward-mode derivative: `jax.jvp` raises TypeError.

    Args:
        features: [batch, length, width].
        head: [width, vocab_size]; with `tied` the embedding's table, [vocab_size, width].
        targets: [batch, length] integers. Those of weight zero may be any integer.
        weights: [batch, length]; 0 for padding.
        tied: which of its dimensions the head has first.
        chunk_bytes: most bytes of float32 logits on a device.

    Returns:
        The weighted sum of cross-entropies in nats, and the sum of the weights: two float32 scalars.

    Raises:
        ValueError: shapes that do not fit each other, or `chunk_bytes` below 1.

    >>> import jax, numpy as np
    >>> features, head = np.ones((2, 3, 4), np.float32), np.zeros((4, 10), np.float32)
    >>> loss = jax.jit(linear_next_token_loss)
    >>> total, weight = loss(features, head, np.zeros((2, 3), int), np.ones((2, 3)))
    >>> round(float(total / weight), 3)
    2.303
    """
    shapes = [list(x.shape) for x in (features, head, targets, weights)]
    given = "features {}, head {}, targets {}, weights {}".format(*shapes)
    fits = features.ndim == 3 and head.ndim == 2 and features.shape[2] == head.shape[int(tied)]
    rule = f"features are [batch, length, width], the head {'[vocab_size, width]' if tied else '[width, vocab_size]'}"
    require(fits, rule, given, "Pass these")
    fits = targets.shape == weights.shape == features.shape[:2]
    require(fits, "targets and weights are [batch, length], as the features", given, "Give one of each for each token")
    require(chunk_bytes > 0, "chunk_bytes is positive", f"{chunk_bytes}", "Leave it out")
    batch, length, _ = features.shape
    count, of_chunk = chunks(batch, length, head.shape[0 if tied else 1], chunk_bytes)
    if count == 1 and traced_device().platform == "cpu":
        return next_token_loss(product(TO_LOGITS[tied], features, head), targets, weights)
    weights, shards = weights.astype(jnp.float32), math.gcd(traced_shards(), batch)
    x, *rest = (in_chunks(x, count, of_chunk, shards) for x in (features, targets, weights))
    return _chunked(tied, x, head, *rest), jnp.sum(weights)


def chunks(batch: int, length: int, vocabulary: int, chunk_bytes: int) -> tuple[int, int]:
    """Return the number of chunks of a row, and the positions of a chunk, so that its logits fit `chunk_bytes`."""
    rows = max(1, -(-batch // math.gcd(traced_shards(), batch)))
    logits = 4 * rows * length * -(-vocabulary // math.prod(traced_model_axes().values()))
    fewest = min(length, -(-logits // chunk_bytes))
    whole = (count for count in range(fewest, min(length, 2 * fewest) + 1) if length % count == 0)
    of_chunk = -(-length // next(whole, fewest))
    return -(-length // of_chunk), of_chunk


def in_chunks(x: jax.Array, count: int, of_chunk: int, shards: int) -> jax.Array:
    """Return [batch, length, ...] as [chunks, shards, batch / shards, positions of a chunk, ...], padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, count * of_chunk - x.shape[1]), *((0, 0) for _ in x.shape[2:])))
    return jnp.moveaxis(x.reshape(shards, x.shape[0] // shards, count, of_chunk, *x.shape[2:]), 2, 0)


def classification_loss(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the cross-entropies, the weights and the correct predictions of classified examples, weighted.

    Args:
        logits: [batch, classes].
        labels: [batch] integers. Those of weight zero may be any integer.
        weights: [batch]; 0 for padding.

    Returns:
        Three float32 scalars: the weighted sum of cross-entropies in nats; the sum of the weights; the sum of the
        weights of correct examples, whose largest logit is the label's. The first and the third divided by the second
        are the mean loss and the accuracy.

    >>> import jax, numpy as np
    >>> total, weight, correct = jax.jit(classification_loss)(np.eye(2), np.array([0, 0]), np.ones(2))
    >>> float(correct / weight)
    0.5
    """
    weights = weights.astype(jnp.float32)
    correct = jnp.argmax(logits, axis=-1) == labels
    return jnp.sum(nats(logits, labels) * weights), jnp.sum(weights), jnp.sum(weights * correct)


_TILE = 128  # columns of a tile of the matrix units
_TO_FEATURES = {True: "...v,vd->...d", False: "...v,dv->...d"}
_TO_HEAD = {True: "stv,std->svd", False: "stv,std->sdv"}


def _chunked_forward(
    tied: bool, features: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the total over chunks, and its nats and slopes: features [chunks, shards, rows, positions, width].

    The head's gradient is summed over chunks separately for each shard of the batch, so devices sum it once.
    """
    table, vocabulary = _padded(head, tied)

    def add(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> Any:
        (total, of_head), (x, its_targets, its_weights) = carry, chunk
        nats, slopes = _of_chunk(_within(_summed_in_float32(TO_LOGITS[tied], x, table), vocabulary), its_targets)
        slopes = (slopes * its_weights[..., None]).astype(x.dtype)
        of_features = _summed_in_float32(_TO_FEATURES[tied], slopes, table).astype(x.dtype)
        by_shard = [y.reshape(y.shape[0], -1, y.shape[-1]) for y in (slopes, x)]  # contracting one dim is faster
        of_head += _summed_in_float32(_TO_HEAD[tied], *by_shard)
        return (total + jnp.sum(nats * its_weights), of_head), (nats, of_features)

    zeros = jnp.zeros((features.shape[1], *table.shape), jnp.float32)
    (total, of_head), (nats, of_features) = jax.lax.scan(add, (jnp.float32(0), zeros), (features, targets, weights))
    of_head = of_head[:, : head.shape[0], : head.shape[1]].sum(axis=0).astype(head.dtype)
    return total, (nats, of_features, of_head)


def _chunked_backward(tied: bool, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    del tied
    nats, *slopes = residuals
    of_features, of_head = ((x.astype(jnp.float32) * cotangent).astype(x.dtype) for x in slopes)
    return of_features, of_head, None, nats * cotangent


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(tied: bool, features: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the total alone: `model_flops` counts this program's products, so the slopes' must not be in it."""
    table, vocabulary = _padded(head, tied)

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, its_targets, its_weights = chunk
        nats, _ = _of_chunk(_within(_summed_in_float32(TO_LOGITS[tied], x, table), vocabulary), its_targets)
        return total + jnp.sum(nats * its_weights), None

    return jax.lax.scan(add, jnp.float32(0), (features, targets, weights))[0]


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _summed_in_float32(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return an einsum with an explicit derivative, in the dtype of x.

    It names no product algorithm, because XLA:GPU would first copy both operands (3 ms of 75, on an H200).
    """
    return jnp.einsum(equation, x, y.astype(x.dtype), preferred_element_type=jnp.float32)


def _of_chunk(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropies of logits [..., classes], and their derivatives, both float32."""
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]  # as in `nats`
    if traced_device().platform == "gpu" and not traced_model_axes():
        normaliser, target_logits = _in_one_pass(logits, jnp.where(is_target, logits, 0.0))
    else:
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return normaliser - target_logits, jnp.exp(logits - normaliser[..., None]) - is_target


def _in_one_pass(logits: jax.Array, terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logsumexp(logits) and the sum of `terms` over the last dim, in one reduction (arXiv:1805.02867)."""

    def combine(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top = jnp.maximum(first[0], second[0])
        scaled = first[1] * jnp.exp(first[0] - top) + second[1] * jnp.exp(second[0] - top)
        return top, scaled, first[2] + second[2]

    start = (jnp.finfo(jnp.float32).min, jnp.float32(0), jnp.float32(0))
    operands = (logits, jnp.ones_like(logits), terms)
    top, scaled, terms = jax.lax.reduce(operands, start, combine, (logits.ndim - 1,))
    return top + jnp.log(scaled), terms


def _padded(head: jax.Array, tied: bool) -> tuple[jax.Array, int]:
    """Return the head, padded with zeros to whole tiles of a GPU's matrix units, and the true vocabulary size."""
    vocabulary = head.shape[0 if tied else 1]
    if traced_device().platform == "cpu" or traced_model_axes():  # padding would reshard a sharded dim
        return head, vocabulary
    unused = ((0, -vocabulary % _TILE), (0, 0))
    return jnp.pad(head, unused if tied else unused[::-1]), vocabulary


def _within(logits: jax.Array, vocabulary: int) -> jax.Array:
    """Return logits with the columns beyond the vocabulary too low to count."""
    if logits.shape[-1] == vocabulary:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocabulary, logits, jnp.finfo(jnp.float32).min)


def nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return -log softmax(logits)[target]: [..., classes] and [...] -> [...] float32."""
    logits = logits.astype(jnp.float32)
    # Selected by comparison, not by index: the transpose then fuses into that of the softmax and overwrites the logits,
    # while a scatter takes a second array of their size (8192 x 50304 logits compiled for an H100: 1.5 GiB against
    # 3.1), and it stays local if the vocabulary is sharded.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


def ranks(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the number of classes before each label: [..., classes] and [...] -> [...] int32, 0 for the likeliest.

    Among equal logits the lower class comes first, as in `argmax` and `top_k`. A NaN comes before all other labels, but
    a label whose own logit is NaN comes last.

    >>> import jax.numpy as jnp
    >>> ranks(jnp.array([[1.0, 3.0, 2.0]] * 3), jnp.array([0, 1, 2])).tolist()
    [2, 0, 1]
    """
    classes = jnp.arange(logits.shape[-1])
    is_label = classes == labels[..., None]
    of_label = jnp.sum(jnp.where(is_label, logits, 0), axis=-1, keepdims=True)
    before = ~(logits <= of_label) | ((logits == of_label) & (classes < labels[..., None]))
    return jnp.sum(before, axis=-1, dtype=jnp.int32)
