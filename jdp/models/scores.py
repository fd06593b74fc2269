"""How well a label is predicted: its rank among all, and for text the nats and the rank of every target."""

from typing import Any

import jax
import jax.numpy as jnp

from jdp.models.losses import CHUNK_BYTES, chunks, in_chunks, nats
from jdp.models.modules import product


def ranks(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return how many classes come before each label: [..., classes] and [...] -> [...] int32, 0 for the likeliest.

    Of equal logits the lower class comes first, as in `argmax` and `top_k`. A logit that is not a number comes before
    all others, and is the last itself.

    >>> import jax.numpy as jnp
    >>> ranks(jnp.array([[1.0, 3.0, 2.0]] * 3), jnp.array([0, 1, 2])).tolist()
    [2, 0, 1]
    """
    classes = jnp.arange(logits.shape[-1])
    is_label = classes == labels[..., None]
    of_label = jnp.sum(jnp.where(is_label, logits, 0), axis=-1, keepdims=True)
    before = ~(logits <= of_label) | ((logits == of_label) & (classes < labels[..., None]))
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def next_token_scores(
    features: jax.Array, head: jax.Array, targets: jax.Array, *, tied: bool, chunk_bytes: int = CHUNK_BYTES
) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy in nats, float32, and the rank, int32, of every target: both [batch, length].

    Logits that would take more than `chunk_bytes` on a device are computed for some positions at a time.

    Args:
        features: [batch, length, width].
        head: [width, vocab_size]; with `tied` [vocab_size, width].
        targets: [batch, length] integers.
        tied: which of its dimensions the head has first.
        chunk_bytes: most bytes of float32 logits on a device.
    """
    batch, length, _ = features.shape
    vocabulary, equation = (head.shape[0], "...d,vd->...v") if tied else (head.shape[1], "...d,dv->...v")
    count, of_chunk = chunks(batch, length, vocabulary, chunk_bytes)

    def score(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = product(equation, part[0], head)
        return nats(logits, part[1]), ranks(logits, part[1])

    if count == 1:
        return score((features, targets))

    def join(x: Any) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * of_chunk)[:, :length]

    of_nats, of_ranks = jax.lax.map(score, tuple(in_chunks(x, count, of_chunk) for x in (features, targets)))
    return join(of_nats), join(of_ranks)
