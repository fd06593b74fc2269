"""BYOL: a network predicts the features that its own moving average computes from another view of the same image.

The one word: `jdp.value_and_grad`, which writes batch statistics, over all devices' rows, back into the modules. The
target is the average of the online network. Both are sharded alike, so the average is computed shard by shard. Grill et
al. 2020, arXiv:2006.07733.

    python experiments/loops/byol.py zero3
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from story import tell

import jdp

FEATURES, WIDTH, ROWS, DECAY = 8, 16, 32, 0.9


class Encoder(nnx.Module):
    """A layer with batch norm, and a projection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.norm = nnx.Linear(FEATURES, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.projection = nnx.Linear(WIDTH, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.projection(nnx.relu(self.norm(self.layer(x))))


class Online(nnx.Module):
    """An encoder and the predictor of the target's projection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder, self.predictor = Encoder(rngs), nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.predictor(self.encoder(x))


def loss_fn(online, target, batch, rng):
    """Return the cosine distance of the prediction from one view to the projection of the other."""
    views = [batch["x"] + 0.3 * jax.random.normal(key, batch["x"].shape) for key in jax.random.split(rng)]
    distance = optax.cosine_distance(online(views[0]), target(views[1]))
    return jdp.Loss(distance.sum(), jnp.float32(len(distance)))


def train(plan, steps=3):
    """Return the loss of each step, and the state of both networks."""
    online = jdp.init(lambda rng: Online(nnx.Rngs(rng)), plan, rng=jax.random.key(0))
    target = jdp.init(lambda rng: Encoder(nnx.Rngs(rng)), plan, rng=jax.random.key(1))
    optimizer = nnx.Optimizer(online, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    gradient = jdp.value_and_grad(loss_fn, plan)

    @nnx.jit
    def step(online, target, optimizer, batch, rng):
        metrics, grads = gradient(online, target, batch, rng)
        optimizer.update(online, grads)
        average = lambda old, new: DECAY * old + (1 - DECAY) * new  # noqa: E731
        states = nnx.state(target, nnx.Param), nnx.state(online.encoder, nnx.Param)
        nnx.update(target, jax.tree.map(average, *states))
        return metrics["loss"]

    random, losses = np.random.default_rng(0), []
    for i in range(steps):
        batch = {"x": random.normal(size=(ROWS, FEATURES)).astype("float32")}
        losses.append(step(online, target, optimizer, batch, jax.random.key(i)))
    return losses, (nnx.state(online), nnx.state(target))


if __name__ == "__main__":
    tell(train)
