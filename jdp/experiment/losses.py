"""The losses of the models that an experiment file can name: sums over examples, with the weights to divide by.

An evaluation may measure more (`Measured`). Values of single examples leave a step as arrays of the global batch: each
device adds its rows to zeros, so the sum over devices is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.types import Batch, Loss
from jdp.models import classification_loss
from jdp.models.scores import next_token_scores, ranks

ROW = "row"
"""The rows of the global batch that a batch has, int32 [rows]: what `Measured` places values by."""
NATS, PREDICTED, LABELS, COUNTED = "nats", "predicted", "labels", "counted"
"""Values of single examples: of every target; of every row its class, its label, whether its weight is not 0."""


@dataclass(frozen=True)
class Measured:
    """What an evaluation measures beside the loss.

    Attributes:
        tops: accuracies: name -> how many likeliest the label must be among.
        rows: of the global batch, for values of single examples; 0: there are none.
    """

    tops: Mapping[str, int] = field(default_factory=dict[str, int])
    rows: int = 0

    def __bool__(self) -> bool:
        return bool(self.tops or self.rows)

    def accuracies(self, rank: jax.Array, weights: jax.Array) -> dict[str, Any]:
        """Return the sums of the weights of labels that are likely enough."""
        return {name: jnp.sum(weights * (rank < most)) for name, most in self.tops.items()}

    def placed(self, batch: Batch, **values: jax.Array) -> dict[str, Any]:
        """Return values of the batch's rows at their place in the global batch, float32, each with weight 1."""
        if not self.rows:
            return {}

        def place(value: jax.Array) -> jax.Array:
            return jnp.zeros((self.rows, *value.shape[1:]), jnp.float32).at[batch[ROW]].add(value)

        return {name: (place(value), place(jnp.ones_like(value))) for name, value in values.items()}


_NOTHING = Measured()


def text_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Compute the next-token cross-entropy in nats, summed over the tokens whose weight is not 0."""
    return Loss(*model.loss(batch["tokens"], batch["targets"], batch["weights"], rng=rng, **_packed(batch)))


def text_scores(model: Any, batch: Batch, rng: jax.Array | None, *, measured: Measured) -> Loss:
    """Compute what `text_loss` does, and what is measured: accuracies of the next token, the nats of every target."""
    features = model.features(batch["tokens"], rng=rng, **_packed(batch))
    head = model.embed.tokens if model.head is None else model.head.kernel
    nats, rank = next_token_scores(features, head[...], batch["targets"], tied=model.head is None)
    weights = batch["weights"].astype(jnp.float32)
    metrics = {**measured.accuracies(rank, weights), **measured.placed(batch, **{NATS: nats})}
    return Loss(jnp.sum(nats * weights), jnp.sum(weights), metrics)


def image_loss(model: Any, batch: Batch, rng: jax.Array | None, *, measured: Measured = _NOTHING) -> Loss:
    """Compute the cross-entropy in nats of the class of an image, summed over the images, and the accuracy.

    Padding rows have weight 0; BatchNorm's statistics leave them out too.
    """
    return _classified(model(batch["images"], rng=rng, weights=batch["weights"]), batch, measured)


def features_loss(model: Any, batch: Batch, rng: jax.Array | None, *, measured: Measured = _NOTHING) -> Loss:
    """Compute the cross-entropy in nats of the class of a vector, summed over the vectors, and the accuracy."""
    return _classified(model(batch["features"], rng=rng), batch, measured)


def _packed(batch: Batch) -> dict[str, Any]:
    return {"segments": batch["segments"]} if "segments" in batch else {}


def _classified(logits: jax.Array, batch: Batch, measured: Measured) -> Loss:
    labels, weights = batch["labels"], batch["weights"]
    total, weight, right = classification_loss(logits, labels, weights)
    if not measured:
        return Loss(total, weight, {"accuracy": right})
    found = {PREDICTED: jnp.argmax(logits, axis=-1), LABELS: labels, COUNTED: weights != 0}
    single = measured.placed(batch, **{name: value.astype(jnp.float32) for name, value in found.items()})
    return Loss(total, weight, {**measured.accuracies(ranks(logits, labels), weights), "accuracy": right, **single})
