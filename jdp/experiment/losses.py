"""The losses of the models that an experiment file can name: sums over examples, with the weights to divide by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.types import Batch, Loss
from jdp.models import classification_loss


def text_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute the next-token cross-entropy in nats, summed over the tokens whose weight is not 0."""
    packed = {"segments": batch["segments"]} if "segments" in batch else {}
    return Loss(*model.loss(batch["tokens"], batch["targets"], batch["weights"], rng=rng, **packed))


def image_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute the cross-entropy in nats of the class of an image, summed over the images, and the accuracy.

    Padding rows have weight 0; BatchNorm's statistics leave them out too.
    """
    return _classified(model(batch["images"], rng=rng, weights=batch["weights"]), batch)


def features_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute the cross-entropy in nats of the class of a vector, summed over the vectors, and the accuracy."""
    return _classified(model(batch["features"], rng=rng), batch)


def dpo_loss(model: Any, batch: Batch, *, beta: float, smoothing: float) -> Loss:
    """Compute the loss of direct preference optimization, summed over the pairs, and what TRL reports beside it.

    A reward is beta · (log-probability of an answer - that under the initial weights). Without dropout, as in TRL.
    """
    logps, there = _pairs(model, batch)
    rewards = beta * (logps - batch["reference"])
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margins = chosen - rejected
    losses = -(1 - smoothing) * jax.nn.log_sigmoid(margins) - smoothing * jax.nn.log_sigmoid(-margins)
    reported = {
        "rewards/accuracies": margins > 0,
        "rewards/margins": margins,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return Loss(
        jnp.sum(losses * there), jnp.sum(there), {name: jnp.sum(each * there) for name, each in reported.items()}
    )


def reference_loss(rows: int, model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute no loss, but the log-probabilities of each pair, [rows, 2], at its place in the batch ("slot")."""
    del rng
    logps, there = _pairs(model, batch)
    at = (jnp.arange(rows)[:, None] == batch["slot"]) & (there > 0)  # [rows, pairs]
    values = jnp.sum(jnp.where(at[..., None], logps, 0.0), axis=1)
    counts = jnp.broadcast_to(jnp.sum(at, axis=1, dtype=jnp.float32)[:, None], values.shape)
    return Loss(jnp.sum(logps) * 0, jnp.sum(there), {"logps": (values, counts)})


def _pairs(model: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the log-probabilities of both answers of each pair, [pairs, 2], and 1 for pairs that are no padding."""
    pairs, _, length = batch["tokens"].shape
    tokens, targets, weights = (batch[name].reshape(2 * pairs, length) for name in ("tokens", "targets", "weights"))
    there = jnp.any(batch["weights"] > 0, axis=(1, 2)).astype(jnp.float32)
    return model.log_probs(tokens, targets, weights).reshape(pairs, 2), there


def _classified(logits: jax.Array, batch: Batch) -> Loss:
    total, weight, right = classification_loss(logits, batch["labels"], batch["weights"])
    return Loss(total, weight, {"accuracy": right})
