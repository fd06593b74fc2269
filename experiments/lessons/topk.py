"""Top-k by hand, and in one process: eight "devices" are eight parts of the batch.

Each sends the largest elements of its gradient. The rest is dropped, or kept for the next step.
"""

from typing import Any

import jax
import numpy as np
import optax
from toy import ROWS, init, make_batch, total_loss


def held_out(params: Any) -> float:
    """Return the mean loss, in nats, of 4096 rows that no step sees."""
    return float(total_loss(params, make_batch(10**6, 4096))) / 4096


def largest(x: np.ndarray, fraction: float) -> np.ndarray:
    """Return x [devices, ...] with all but each device's largest elements set to zero."""
    flat = np.abs(x).reshape(len(x), -1)
    count = max(1, round(fraction * flat.shape[1]))
    least = np.partition(flat, -count, axis=1)[:, -count]
    return np.where(np.abs(x) >= least.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def topk_by_hand(fraction: float, feedback: bool, steps: int, rate: float, devices: int = 8) -> float:
    """Return the held-out loss after training with top-k, with error feedback or without."""
    params, tx = init(jax.random.key(0)), optax.adam(rate)
    each_gradient, update = jax.jit(jax.vmap(jax.grad(total_loss), (None, 0))), jax.jit(tx.update)
    moments, kept = tx.init(params), [np.zeros((devices, *x.shape), np.float32) for x in jax.tree.leaves(params)]
    for i in range(steps):
        rows = {name: x.reshape(devices, -1, *x.shape[1:]) for name, x in make_batch(i).items()}
        grads, treedef = jax.tree.flatten(jax.device_get(each_gradient(params, rows)))
        wanted = [g + k for g, k in zip(grads, kept, strict=True)]
        sent = [largest(x, fraction) for x in wanted]
        if feedback:
            kept = [w - s for w, s in zip(wanted, sent, strict=True)]
        updates, moments = update(treedef.unflatten([x.sum(axis=0) / ROWS for x in sent]), moments)
        params = optax.apply_updates(params, updates)
    return held_out(params)
