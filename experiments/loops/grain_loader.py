"""grain feeds a plain Flax loop: one shuffled order over all epochs, from which each process reads its own rows.

The one word: `jdp.process_rows`, in the map from a process' rows to the order's. grain's `dataset[i::processes]` also
gives different rows to each process, but not the rows that its devices hold in the global batch. That is wrong if two
processes hold the same rows (an axis of the model across hosts), and the order depends on the number of processes.
Without either, every process feeds the same rows, and a step learns from them several times.

    python experiments/loops/grain_loader.py zero2
    jdp launch -n 2 --devices-per-process 4 -- experiments/loops/grain_loader.py zero2
"""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from story import tell

import jdp

EXAMPLES, ROWS, EPOCHS, LENGTH = 48, 32, 2, 16


class Waves:
    """Sines of several frequencies: a random access source of grain."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        wave = np.sin(np.linspace(0, 6, LENGTH) * (1 + index % 4))
        return {"wave": wave.astype("float32")}


class Noisy(grain.transforms.RandomMap):
    """Add noise, drawn by the example's position in the order, so that it does not depend on the processes."""

    def random_map(self, example, rng):
        noise = 0.2 * rng.normal(size=LENGTH).astype("float32")
        return {"noisy": example["wave"] + noise, "wave": example["wave"]}


def loader(rows):
    """Return batches of these rows of each global batch; epochs follow one another without a break."""
    order = grain.MapDataset.source(Waves()).seed(0).shuffle().repeat(EPOCHS).random_map(Noisy())

    def own(position):
        batch, row = divmod(position, len(rows))
        return order[batch * ROWS + rows[row]]

    count = len(order) // ROWS * len(rows)  # the same number of batches in every process
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4 * len(rows))
    return grain.MapDataset.range(count).map(own).batch(len(rows)).to_iter_dataset(ahead)


def network(rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a network that removes noise."""
    return nnx.Sequential(nnx.Linear(LENGTH, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, LENGTH, rngs=rngs))


def loss_fn(model, batch, rng):
    error = jnp.square(model(batch["noisy"]) - batch["wave"])
    return jdp.Loss(error.sum(), jnp.float32(error.size))


def train(plan):
    """Return the loss of each step, and the parameters."""
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
