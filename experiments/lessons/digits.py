"""scikit-learn's digits, and a perceptron that learns them, for the lessons about batches and staleness."""

import functools
from typing import Any

import jax
import numpy as np
import optax


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 8 - 1).astype(np.float32), labels.astype(np.int32)


def init(seed: int) -> dict[str, np.ndarray]:
    normal = np.random.default_rng(seed).standard_normal
    params = {"up": normal((64, 64)) / 32**0.5, "down": normal((64, 10)) / 8, "bias": np.zeros(64)}
    return {name: leaf.astype(np.float32) for name, leaf in params.items()}


def loss(params: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.nn.relu(images @ params["up"] + params["bias"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
