"""The model and the batches that lessons train with: a perceptron, as a plain pytree, learns a linear teacher."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTHS = (64, 256, 10)
"""Features, hidden units, classes."""
ROWS = 256
"""Rows of a global batch: over eight devices 32 on each."""


def init(key: jax.Array, widths: Sequence[int] = WIDTHS) -> dict[str, dict[str, jax.Array]]:
    """Return float32 parameters: `kernel` [in, out] and `bias` [out] of `layer0`, `layer1`, ..."""
    pairs = list(itertools.pairwise(widths))
    keys = jax.random.split(key, len(pairs))
    return {
        f"layer{i}": {"kernel": jax.random.normal(keys[i], pair) / pair[0] ** 0.5, "bias": jnp.zeros(pair[1])}
        for i, pair in enumerate(pairs)
    }


def forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the logits [rows, classes] of x [rows, features]."""
    for layer in list(params.values())[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[f"layer{len(params) - 1}"]["kernel"] + params[f"layer{len(params) - 1}"]["bias"]


def total_loss(params: dict[str, Any], rows: dict[str, Any]) -> jax.Array:
    """Return the sum over rows, not the mean: sums of several devices can be added. Padding has weight 0."""
    nats = optax.softmax_cross_entropy_with_integer_labels(forward(params, rows["x"]), rows["y"])
    return (nats * rows["weight"]).sum()


def make_batch(seed: int, rows: int = ROWS, features: int = WIDTHS[0], classes: int = WIDTHS[-1]) -> dict[str, Any]:
    """Return x [rows, features], y [rows] and weight [rows], in numpy."""
    teacher = np.random.default_rng(0).normal(size=(features, classes))
    x = np.random.default_rng(seed + 1).normal(size=(rows, features)).astype(np.float32)
    return {"x": x, "y": (x @ teacher).argmax(axis=1).astype(np.int32), "weight": np.ones(rows, np.float32)}
