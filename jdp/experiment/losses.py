"""The losses of the models that an experiment file can name: sums over examples, with the weights to divide by."""

from __future__ import annotations

from typing import Any

import jax

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


def _classified(logits: jax.Array, batch: Batch) -> Loss:
    total, weight, right = classification_loss(logits, batch["labels"], batch["weights"])
    return Loss(total, weight, {"accuracy": right})
