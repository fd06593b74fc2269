"""Distillation: a student learns the answers of a frozen teacher.

The one word: `jdp.value_and_grad`, whose loss takes two models, and which differentiates the first. The teacher has
neither gradient nor optimizer; it is sharded and gathered like the student. Hinton et al. 2015, arXiv:1503.02531.

    python experiments/loops/distillation.py zero3
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from story import tell

import jdp

FEATURES, CLASSES, ROWS, TEMPERATURE = 8, 4, 32, 2.0


def network(width: int, rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a classifier with one hidden layer."""
    return nnx.Sequential(nnx.Linear(FEATURES, width, rngs=rngs), nnx.relu, nnx.Linear(width, CLASSES, rngs=rngs))


def loss_fn(student, teacher, batch, rng):
    """Return the cross-entropy between the teacher's and the student's answers, both softened."""
    target = jax.nn.softmax(teacher(batch["x"]) / TEMPERATURE)
    answer = student(batch["x"])
    nll = TEMPERATURE**2 * optax.softmax_cross_entropy(answer / TEMPERATURE, target)
    agree = answer.argmax(-1) == target.argmax(-1)
    return jdp.Loss(nll.sum(), jnp.float32(len(nll)), {"agree": agree.sum()})


def train(plan, steps=3):
    """Return the loss of each step, and the student's parameters."""
    student = jdp.init(lambda rng: network(8, nnx.Rngs(rng)), plan, rng=jax.random.key(0))
    teacher = jdp.init(lambda rng: network(32, nnx.Rngs(rng)), plan, rng=jax.random.key(1))
    optimizer = nnx.Optimizer(student, optax.adam(1e-2), wrt=nnx.Param)
    gradient = jdp.value_and_grad(loss_fn, plan)

    @nnx.jit
    def step(student, teacher, optimizer, batch, rng):
        metrics, grads = gradient(student, teacher, batch, rng)
        optimizer.update(student, grads)
        return metrics["loss"]

    random, losses = np.random.default_rng(0), []
    for i in range(steps):
        batch = {"x": random.normal(size=(ROWS, FEATURES)).astype("float32")}
        losses.append(step(student, teacher, optimizer, batch, jax.random.key(i)))
    return losses, nnx.state(student, nnx.Param)


if __name__ == "__main__":
    tell(train)
