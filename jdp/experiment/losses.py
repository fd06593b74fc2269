"""The losses of an experiment: the user's, or jdp's sums over examples, with the weights to divide by.

An evaluation of classes may also measure top-k accuracies, `tops`: name -> k.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.types import Batch, Loss, LossFn
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.make import function_of
from jdp.experiment.schema.tables import tops
from jdp.models import classification_loss
from jdp.models.losses import ranks


def loss_of(experiment: Experiment) -> LossFn:
    """Return the loss function of [loss], or the usual loss for the kind of model."""
    if (table := experiment.loss).make is not None:
        return functools.partial(function_of(table.make), **table.keywords)
    return {"text": text_loss, "images": image_loss, "features": features_loss}[str(experiment.model.kind)]


def eval_loss_of(experiment: Experiment) -> LossFn:
    if not (ranked := tops(experiment.train.eval_metrics)):
        return loss_of(experiment)
    return functools.partial({"images": image_loss, "features": features_loss}[experiment.kind], tops=ranked)


def text_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute the next-token cross-entropy in nats, summed over the tokens whose weight is not 0."""
    packed = {"segments": batch["segments"]} if "segments" in batch else {}
    return Loss(*model.loss(batch["tokens"], batch["targets"], batch["weights"], rng=rng, **packed))


def image_loss(model: Any, batch: Batch, rng: jax.Array | None, *, tops: Mapping[str, int] | None = None) -> Loss:
    """Compute the cross-entropy in nats of the class of an image, summed over the images, and the accuracy.

    Padding rows have weight 0; BatchNorm's statistics leave them out too.
    """
    return _classified(model(batch["images"], rng=rng, weights=batch["weights"]), batch, tops or {})


def features_loss(model: Any, batch: Batch, rng: jax.Array | None, *, tops: Mapping[str, int] | None = None) -> Loss:
    """Compute the cross-entropy in nats of the class of a vector, summed over the vectors, and the accuracy."""
    return _classified(model(batch["features"], rng=rng), batch, tops or {})


def _classified(logits: jax.Array, batch: Batch, tops: Mapping[str, int]) -> Loss:
    labels, weights = batch["labels"], batch["weights"]
    total, weight, right = classification_loss(logits, labels, weights)
    rank = ranks(logits, labels)  # XLA drops it without `tops`
    return Loss(total, weight, {"accuracy": right, **{name: jnp.sum(weights * (rank < k)) for name, k in tops.items()}})
