"""A torch `DataLoader` feeds a plain Flax loop: torch's data set, workers and collation, and JAX's devices.

The one word: `jdp.process_rows`, in the loader's batch sampler. All processes use one order, and each reads the rows of
a global batch that its own devices hold. There are two usual mistakes. Without a sampler every process feeds the same
rows, and a step learns from them several times. A `DistributedSampler` by process number is wrong if two processes hold
the same rows (an axis of the model across hosts). The CPU build of `pip install torch` is enough, because tensors are
copied to the devices like NumPy arrays.

    python experiments/loops/torch_loader.py zero1
    jdp launch -n 2 --devices-per-process 4 -- experiments/loops/torch_loader.py zero1
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from story import tell

import jdp

EXAMPLES, ROWS, CLASSES = 200, 32, 3


class Spirals(torch.utils.data.Dataset):
    """Points on three arms of a spiral, with the arm as label."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        arm, radius = index % CLASSES, index / EXAMPLES
        angle = 4 * radius + 2 * np.pi * arm / CLASSES
        return {"x": torch.tensor([radius * np.cos(angle), radius * np.sin(angle)], dtype=torch.float32), "y": arm}


def own_rows(rows, epochs, seed=0):
    """Yield the indices of this process' rows of each global batch; an epoch's last, uneven batch is left out."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(EXAMPLES)  # the same in every process
        for start in range(0, EXAMPLES - ROWS + 1, ROWS):
            yield order[start : start + ROWS][rows].tolist()


def loader(rows, epochs=1, workers=0):
    """Return the loader of these rows. Workers are spawned, because a fork would copy JAX's locks, held or not."""
    context = "spawn" if workers else None
    return torch.utils.data.DataLoader(
        Spirals(), batch_sampler=own_rows(rows, epochs), num_workers=workers, multiprocessing_context=context
    )


def network(rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a classifier of points."""
    return nnx.Sequential(nnx.Linear(2, 32, rngs=rngs), nnx.relu, nnx.Linear(32, CLASSES, rngs=rngs))


def loss_fn(model, batch, rng):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return jdp.Loss(nll.sum(), jnp.float32(len(nll)))


def train(plan):
    """Return the loss of each step of an epoch, and the parameters."""
    model = jdp.init(lambda rng: network(nnx.Rngs(rng)), plan, rng=jax.random.key(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    gradient = jdp.value_and_grad(loss_fn, plan)

    @nnx.jit
    def step(model, optimizer, batch, rng):
        metrics, grads = gradient(model, batch, rng)
        optimizer.update(model, grads)
        return metrics["loss"]

    batches = jdp.shard_batches(loader(jdp.process_rows(plan, ROWS)), plan)
    losses = [step(model, optimizer, batch, jax.random.key(i)) for i, batch in enumerate(batches)]
    return losses, nnx.state(model, nnx.Param)


if __name__ == "__main__":
    tell(train)
