"""A gradient penalty: the loss contains a gradient, here that of a critic with respect to each input, as in WGAN-GP.

The one word: `jdp.value_and_grad`, which differentiates the loss once more. The penalty is a term of each example, so
the total stays a sum over examples, and may be computed on parts of the batch. Gulrajani et al. 2017, arXiv:1704.00028.

    python experiments/loops/gradient_penalty.py zero2
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

FEATURES, WIDTH, ROWS, PENALTY = 4, 16, 32, 10.0


def init(rng):
    first, last = jax.random.split(rng)
    return {"first": jax.random.normal(first, (FEATURES, WIDTH)) / 2, "last": jax.random.normal(last, (WIDTH,)) / 4}


def critic(params, x):
    """Return the critic's score of one example x [features], a scalar."""
    return jnp.tanh(x @ params["first"]) @ params["last"]


def loss_fn(params, batch, rng):
    """Return fake − real + 10 (‖∇ critic‖ − 1)², with the gradient at a point between a real and a fake example."""
    share = jax.random.uniform(rng, (batch["real"].shape[0], 1))
    between = share * batch["real"] + (1 - share) * batch["fake"]
    value = jax.vmap(critic, (None, 0))
    slope = jnp.linalg.norm(jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, between), axis=-1)
    each = value(params, batch["fake"]) - value(params, batch["real"]) + PENALTY * jnp.square(slope - 1)
    return jdp.Loss(each.sum(), jnp.float32(len(each)), {"slope": slope.sum()})


def train(plan, steps=3, **settings):
    """Return the loss and mean slope of each step, and the critic; `settings` are options of `jdp.value_and_grad`."""
    tx = optax.adam(1e-2)
    params = jdp.init(init, plan, rng=jax.random.key(0))
    opt_state = jdp.init(tx.init, plan, of=params)
    gradient = jdp.value_and_grad(loss_fn, plan, **settings)

    @jax.jit
    def step(params, opt_state, batch, rng):
        metrics, grads = gradient(params, batch, rng)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.stack([metrics["loss"], metrics["slope"]])

    random, measured = np.random.default_rng(0), []
    for i in range(steps):
        batch = {name: random.normal(size=(ROWS, FEATURES)).astype("float32") for name in ("real", "fake")}
        params, opt_state, values = step(params, opt_state, batch, jax.random.key(i))
        measured.append(values)
    return measured, params


if __name__ == "__main__":
    tell(train)
