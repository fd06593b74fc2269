"""Changed gradients: of two tasks, each gradient loses its part that points against the other; the sum is clipped.

The one word: `jdp.value_and_grad`, twice. Its gradients are global arrays, sharded as the parameters are, so any
function of them is right, and is computed shard by shard. Yu et al. 2020, arXiv:2001.06782, "Gradient surgery for
multi-task learning", algorithm 1.

    python experiments/loops/changed_gradients.py zero2
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

FEATURES, WIDTH, ROWS, LARGEST = 8, 16, 32, 1.0


def init(rng):
    shared, heads = jax.random.split(rng)
    shared = jax.random.normal(shared, (FEATURES, WIDTH)) / 3
    return {"shared": shared, "heads": jax.random.normal(heads, (WIDTH, 2)) / 4}


def loss_of(task: int):
    """Return the loss of one of two tasks: the squared error of its own head."""

    def loss_fn(params, batch, rng):
        error = (jnp.tanh(batch["x"] @ params["shared"]) @ params["heads"])[:, task] - batch["y"][:, task]
        return jdp.Loss(jnp.square(error).sum(), jnp.float32(len(error)))

    return loss_fn


def without_conflict(grads, other):
    """Return gradients without their part along `other`, if the two point against each other."""
    along = optax.tree.vdot(grads, other) / optax.tree.norm(other, squared=True)
    return jax.tree.map(lambda g, o: g - jnp.minimum(along, 0) * o, grads, other)


def train(plan, steps=3):
    """Return both losses and the norm of the joint gradient of each step, and the parameters."""
    tx = optax.sgd(0.5)
    params = jdp.init(init, plan, rng=jax.random.key(0))
    opt_state = jdp.init(tx.init, plan, of=params)
    gradients = [jdp.value_and_grad(loss_of(task), plan) for task in (0, 1)]

    @jax.jit
    def step(params, opt_state, batch, rng):
        (first, ours), (second, theirs) = (gradient(params, batch, rng) for gradient in gradients)
        grads = jax.tree.map(jnp.add, without_conflict(ours, theirs), without_conflict(theirs, ours))
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, LARGEST / norm), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.stack([first["loss"], second["loss"], norm])

    random, measured = np.random.default_rng(0), []
    for i in range(steps):
        x = random.normal(size=(ROWS, FEATURES)).astype("float32")
        batch = {"x": x, "y": np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1)}
        params, opt_state, values = step(params, opt_state, batch, jax.random.key(i))
        measured.append(values)
    return measured, params


if __name__ == "__main__":
    tell(train)
