"""A GAN: two modules with two optimizers; the loss of each module also reads the other module.

The one word: `jdp.value_and_grad`, once for each loss. The module that it does not differentiate is only gathered. The
noise is drawn in the loss by global row, so it is the same on any number of devices. Goodfellow et al. 2014,
arXiv:1406.2661, with the loss that does not saturate.

    python experiments/loops/gan.py zero2
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from story import tell

import jdp

NOISE, FEATURES, ROWS = 8, 4, 32


def network(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a network with one hidden layer."""
    return nnx.Sequential(nnx.Linear(inputs, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, outputs, rngs=rngs))


def generated(generator, batch, rng):
    return generator(jax.random.normal(rng, (batch["x"].shape[0], NOISE)))


def discriminator_loss(discriminator, generator, batch, rng):
    real, fake = discriminator(batch["x"]), discriminator(generated(generator, batch, rng))
    return jdp.Loss((nnx.softplus(-real) + nnx.softplus(fake)).sum(), jnp.float32(len(real)))


def generator_loss(generator, discriminator, batch, rng):
    fake = discriminator(generated(generator, batch, rng))
    return jdp.Loss(nnx.softplus(-fake).sum(), jnp.float32(len(fake)))


def train(plan, steps=3):
    """Return both losses of each step, and the models' parameters."""
    generator = jdp.init(lambda rng: network(NOISE, FEATURES, nnx.Rngs(rng)), plan, rng=jax.random.key(0))
    discriminator = jdp.init(lambda rng: network(FEATURES, 1, nnx.Rngs(rng)), plan, rng=jax.random.key(1))
    generator_optimizer = nnx.Optimizer(generator, optax.adam(1e-2), wrt=nnx.Param)
    discriminator_optimizer = nnx.Optimizer(discriminator, optax.adam(1e-2), wrt=nnx.Param)
    of_discriminator = jdp.value_and_grad(discriminator_loss, plan)
    of_generator = jdp.value_and_grad(generator_loss, plan)

    @nnx.jit
    def step(generator, discriminator, generator_optimizer, discriminator_optimizer, batch, rng):
        first, second = jax.random.split(rng)
        apart, grads = of_discriminator(discriminator, generator, batch, first)
        discriminator_optimizer.update(discriminator, grads)
        fooled, grads = of_generator(generator, discriminator, batch, second)
        generator_optimizer.update(generator, grads)
        return jnp.stack([apart["loss"], fooled["loss"]])

    random, losses = np.random.default_rng(0), []
    for i in range(steps):
        batch = {"x": random.normal(2.0, 0.5, size=(ROWS, FEATURES)).astype("float32")}
        models = (generator, discriminator, generator_optimizer, discriminator_optimizer)
        losses.append(step(*models, batch, jax.random.key(i)))
    return losses, (nnx.state(generator, nnx.Param), nnx.state(discriminator, nnx.Param))


if __name__ == "__main__":
    tell(train)
