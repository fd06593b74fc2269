"""Differentially private SGD: each example's own gradient is clipped, and noise is added to their sum.

The one word: `jdp.Loss`. Its total is Σ cᵢ · lossᵢ, with each example's clipping factor cᵢ held constant, so its
gradient is the sum of the clipped gradients: an ordinary sum over examples. Per-example gradients exist only inside the
loss, for one device's rows at a time. Abadi et al. 2016, arXiv:1607.00133, algorithm 1.

    python experiments/loops/private.py zero2
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

FEATURES, WIDTH, ROWS, CLIP, NOISE = 8, 16, 32, 0.5, 1.1


def init(rng):
    first, last = jax.random.split(rng)
    return {"first": jax.random.normal(first, (FEATURES, WIDTH)) / 3, "last": jax.random.normal(last, (WIDTH,)) / 4}


def example_loss(params, example):
    return jnp.square(jnp.tanh(example["x"] @ params["first"]) @ params["last"] - example["y"])


def loss_fn(params, batch, rng):
    """Return a loss whose gradient is the sum of the examples' gradients, each with a norm of at most CLIP."""
    grads = jax.vmap(jax.grad(example_loss), (None, 0))(params, batch)
    norms = jax.vmap(optax.tree.norm)(grads)
    factors = jax.lax.stop_gradient(jnp.minimum(1, CLIP / norms))
    losses = jax.vmap(example_loss, (None, 0))(params, batch)
    metrics = {"mean": losses.sum(), "clipped": (factors < 1).sum()}
    return jdp.Loss((factors * losses).sum(), jnp.float32(len(losses)), metrics)


def train(plan, steps=3):
    """Return the mean loss and the share of clipped examples of each step, and the parameters."""
    params = jdp.init(init, plan, rng=jax.random.key(0))
    gradient = jdp.value_and_grad(loss_fn, plan)

    @jax.jit
    def step(params, batch, rng):
        metrics, grads = gradient(params, batch, rng)
        noise = optax.tree.random_like(rng, grads, jax.random.normal)
        noise = jdp.place(noise, plan)  # sharded like the gradients; the same numbers on any mesh
        grads = jax.tree.map(lambda g, n: g + NOISE * CLIP / ROWS * n, grads, noise)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        return params, jnp.stack([metrics["mean"], metrics["clipped"]])

    random, measured = np.random.default_rng(0), []
    for i in range(steps):
        x = random.normal(size=(ROWS, FEATURES)).astype("float32")
        params, values = step(params, {"x": x, "y": x.sum(axis=1)}, jax.random.key(i))
        measured.append(values)
    return measured, params


if __name__ == "__main__":
    tell(train)
