"""Metrics of any shape: a confusion matrix, the accuracy of each class, and the mean image of the wrong answers.

The one word: the metrics of `jdp.Loss`. Each is an array, summed over the examples. It is summed over all devices and
microbatches, and divided by the loss's weight, or by its own weight: a scalar, or an array of its shape.

    python experiments/loops/array_metrics.py zero3
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

SIDE, CLASSES, ROWS = 4, 3, 32


def init(rng):
    return {"kernel": jax.random.normal(rng, (SIDE * SIDE, CLASSES)) / SIDE, "bias": jnp.zeros(CLASSES)}


def loss_fn(params, batch, rng):
    logits = batch["image"].reshape(-1, SIDE * SIDE) @ params["kernel"] + params["bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    rows, answer = jnp.float32(len(nll)), logits.argmax(-1)
    of_class = jax.nn.one_hot(batch["label"], CLASSES)
    wrong = (answer != batch["label"]).astype(jnp.float32)
    metrics = {
        "confusion": jnp.einsum("ri,rj->ij", of_class, jax.nn.one_hot(answer, CLASSES)),  # share of all examples
        "recall": (((1 - wrong)[:, None] * of_class).sum(0), of_class.sum(0)),  # by class; NaN for an absent class
        "wrong": (jnp.einsum("r,rhw->hw", wrong, batch["image"]), wrong.sum()),  # the mean wrong image
    }
    return jdp.Loss(nll.sum(), rows, metrics)


def train(plan, steps=3, **settings):
    """Return the metrics of each step, and the parameters; `settings` are options of `jdp.value_and_grad`."""
    params = jdp.init(init, plan, rng=jax.random.key(0))
    gradient = jdp.value_and_grad(loss_fn, plan, **settings)

    @jax.jit
    def step(params, batch, rng):
        metrics, grads = gradient(params, batch, rng)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), metrics

    random, measured = np.random.default_rng(0), []
    for i in range(steps):
        batch = {"image": random.normal(size=(ROWS, SIDE, SIDE)).astype("float32")}
        batch["label"] = random.integers(0, CLASSES, ROWS)
        params, metrics = step(params, batch, jax.random.key(i))
        measured.append(metrics)
    return measured, params


if __name__ == "__main__":
    tell(train)
