"""TFRecord files feed a plain Flax loop, without TensorFlow (`tfrecord_files.py` reads them).

The one word: `jdp.process_rows`, for one order over all records of all files. The usual way gives some files to each
process: then processes end at different times, and hang, and the order depends on the number of processes. Here each
process finds the offset of every record, for which it reads only headers, and reads the rows that its devices hold.

    python experiments/loops/tfrecords.py zero3
    jdp launch -n 2 --devices-per-process 4 -- experiments/loops/tfrecords.py zero3
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from story import tell
from tfrecord_files import as_arrays, read_record, record_offsets, write_records

import jdp

EXAMPLES, FILES, ROWS, EPOCHS, FEATURES = 90, 3, 32, 2, 8


def write_data(folder):
    """Write three files, the same in all processes."""
    random = np.random.default_rng(0)
    for number in range(FILES):
        x = random.normal(size=(EXAMPLES // FILES, FEATURES))
        write_records(folder / f"{number}.tfrecord", [{"x": row, "y": [row.sum()]} for row in x])


def loader(folder, rows, seed=0):
    """Yield batches of these rows of each global batch; rows of weight 0 fill the last batch."""
    records = [(path, offset) for path in sorted(folder.glob("*.tfrecord")) for offset in record_offsets(path)]
    orders = [np.random.default_rng((seed, epoch)).permutation(len(records)) for epoch in range(EPOCHS)]
    order = np.concatenate(orders)
    for start in range(0, len(order), ROWS):
        positions = start + np.array(rows)
        examples = [as_arrays(read_record(*records[index])) for index in order[positions % len(order)]]
        batch = {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}
        yield {**batch, "weight": (positions < len(order)).astype("float32")}


def network(rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a regression with one hidden layer."""
    return nnx.Sequential(nnx.Linear(FEATURES, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 1, rngs=rngs))


def loss_fn(model, batch, rng):
    error = jnp.square(model(batch["x"]) - batch["y"])[:, 0]
    return jdp.Loss((error * batch["weight"]).sum(), batch["weight"].sum())


def train(plan):
    """Return the loss of each step of two epochs, and the parameters."""
    model = jdp.init(lambda rng: network(nnx.Rngs(rng)), plan, rng=jax.random.key(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    gradient = jdp.value_and_grad(loss_fn, plan)

    @nnx.jit
    def step(model, optimizer, batch, rng):
        metrics, grads = gradient(model, batch, rng)
        optimizer.update(model, grads)
        return metrics["loss"]

    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        batches = jdp.shard_batches(loader(Path(folder), jdp.process_rows(plan, ROWS)), plan)
        losses = [step(model, optimizer, batch, jax.random.key(i)) for i, batch in enumerate(batches)]
    return losses, nnx.state(model, nnx.Param)


if __name__ == "__main__":
    tell(train)
