"""Several steps in one call: a `jax.lax.scan` over the batches of a round, so the host waits once per round.

The one word: `jdp.value_and_grad`, in the body of a scan. The batches of a round are one array, [steps, rows, ...],
with sharded rows; parameters and optimizer state keep their sharding from step to step.

    python experiments/loops/several_steps.py zero1
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

FEATURES, WIDTH, ROWS, STEPS = 8, 16, 32, 4


def init(rng):
    first, last = jax.random.split(rng)
    return {"first": jax.random.normal(first, (FEATURES, WIDTH)) / 3, "last": jax.random.normal(last, (WIDTH,)) / 4}


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    hidden *= 2 * jax.random.bernoulli(rng, 0.5, hidden.shape)  # dropout, the same on any mesh
    error = hidden @ params["last"] - batch["y"]
    return jdp.Loss(jnp.square(error).sum(), jnp.float32(len(error)))


def train(plan, steps=2, **settings):
    """Return the losses of each round of steps, and the parameters; `settings` are options of `jdp.value_and_grad`."""
    tx = optax.adam(1e-2)
    params = jdp.init(init, plan, rng=jax.random.key(0))
    opt_state = jdp.init(tx.init, plan, of=params)
    gradient = jdp.value_and_grad(loss_fn, plan, **settings)

    @jax.jit
    def train_round(params, opt_state, batches, rng):
        def step(carry, batch_and_key):
            params, opt_state = carry
            metrics, grads = gradient(params, *batch_and_key)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), metrics["loss"]

        (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), (batches, jax.random.split(rng, STEPS)))
        return params, opt_state, losses

    random, measured = np.random.default_rng(0), []
    for i in range(steps):
        x = random.normal(size=(STEPS, ROWS, FEATURES)).astype("float32")
        params, opt_state, losses = train_round(params, opt_state, {"x": x, "y": x.sum(axis=-1)}, jax.random.key(i))
        measured.append(losses)
    return measured, params


if __name__ == "__main__":
    tell(train)
