"""The losses of the models that an experiment file can name: sums over examples, with the weight to divide by."""

from __future__ import annotations

from typing import Any

import jax

from jdp.core.types import Batch, Loss
from jdp.models import classification_loss, next_token_loss


def text_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Next-token cross-entropy in nats, summed over the tokens that count.

    Args:
        model: a GPT.
        batch: "tokens" and "targets" int32 [rows, length], "weights" float32 [rows, length]; where documents are packed
            also "segments" int32 [rows, length].
        rng: for dropout; None turns it off.
    """
    packed = {"segments": batch["segments"]} if "segments" in batch else {}
    logits = model(batch["tokens"], rng=rng, **packed)
    return Loss(*next_token_loss(logits, batch["targets"], batch["weights"]))


def image_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Cross-entropy in nats of the class of an image, summed over the images; the accuracy beside it.

    Args:
        model: a ResNet or ViT.
        batch: "images" float32 [rows, height, width, channels], "labels" int32 [rows], "weights" float32 [rows], 0 for
            rows that only fill the batch up: they are left out of BatchNorm's statistics as well.
        rng: for dropout; None turns it off.
    """
    logits = model(batch["images"], rng=rng, weights=batch["weights"])
    return _classified(logits, batch)


def features_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """As `image_loss`, of an MLP: "features" float32 [rows, features]."""
    return _classified(model(batch["features"], rng=rng), batch)


def _classified(logits: jax.Array, batch: Batch) -> Loss:
    total, weight, right = classification_loss(logits, batch["labels"], batch["weights"])
    return Loss(total, weight, {"accuracy": right})
