"""Data and seeds: which rows a device reads, and which random numbers it draws.

The claims: "give each rank its own seed" and "give all ranks one seed". Each is right for one thing and wrong for
another, without an error.

Samplers are compared by counting: how often each sample is read in an epoch, and how many different rows are in a
batch. Then eight ranks stop within an epoch and five continue. Last, dropout: one key on all ranks, a key for each, one
key indexed by the global row.

    python experiments/lessons/data_and_seeds.py [--picture FILE.svg]

If each of N ranks shuffles n samples by itself and reads n/N, a share of (1 − 1/N)^N, 34 % for 8, is read by none. The
right way: position p of a run, over all ranks, is sample f(seed, p // n, p % n), and rank r of a batch at b reads the
positions b·B + r·B/N and on. jdp: `jdp.data.sample_index` in experiments, `jdp.process_rows` for a loader of your
own; weights and dropout from one key. PyTorch: `DistributedSampler` with `set_epoch`; `drop_last`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from devices import use_eight_devices
from narration import curves, keep, parser, show, tell

import jdp
from jdp.data import sample_index

SAMPLES, RANKS, FEWER, BATCH = 1003, 8, 5, 40  # samples: no multiple of anything; rows of a global batch
RESUMED = ("from the epoch's start", "as many rows per rank", "by position")
KEYS = ("one key", "a key for each rank", "by global row")
Order = Callable[[int, int, int], np.ndarray]  # (rank, ranks, epoch) -> the samples that a rank reads


def shuffled(*seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(SAMPLES)


# 1. Samplers. PyTorch's make parts equal: some samples are read twice, or not at all.


def distributed(rank: int, ranks: int, epoch: int, drop: bool = False) -> np.ndarray:
    order, each = shuffled(0, epoch), SAMPLES // ranks if drop else -(-SAMPLES // ranks)
    return np.resize(order, each * ranks)[rank::ranks]


def by_position(rank: int, ranks: int, epoch: int) -> np.ndarray:
    """A rank's part of all batches that begin in an epoch: the last one continues into the next epoch."""
    first, end = (-(-SAMPLES * e // BATCH) * BATCH for e in (epoch, epoch + 1))
    return positions(rank, ranks, first, end)


def positions(rank: int, ranks: int, first: int, end: int) -> np.ndarray:
    part = np.arange(first, end).reshape(-1, ranks, BATCH // ranks)[:, rank].ravel()
    return np.array([sample_index(0, SAMPLES, int(p)) for p in part], int)


SAMPLERS: dict[str, Order] = {
    "one seed, no parts": lambda rank, ranks, epoch: shuffled(0, epoch)[: SAMPLES // ranks],
    "a seed for each rank": lambda rank, ranks, epoch: shuffled(rank, epoch)[: SAMPLES // ranks],
    "DistributedSampler": distributed,
    "the same, drop_last": lambda rank, ranks, epoch: distributed(rank, ranks, epoch, drop=True),
    "by position": by_position,
}


def counted(order: Order, epochs: int = 1) -> tuple[int, int, int]:
    """Return the samples that no rank reads, those read more often than epochs, and the different rows of a batch."""
    read = [order(rank, RANKS, epoch) for epoch in range(epochs) for rank in range(RANKS)]
    times = np.bincount(np.concatenate(read), minlength=SAMPLES)
    first = np.unique(np.concatenate([each[: BATCH // RANKS] for each in read[:RANKS]]))
    return int((times == 0).sum()), int((times > epochs).sum()), len(first)


# 2. Eight ranks read some batches, then five continue. Both samplers know only the number of batches read.


def resumed(way: str, batches: int) -> tuple[int, int]:
    """Return the samples of an epoch that are never read, and those that are read twice."""
    if way == "by position":
        end = SAMPLES // BATCH * BATCH
        read = [positions(r, RANKS, 0, batches * BATCH) for r in range(RANKS)]
        read += [positions(r, FEWER, batches * BATCH, end) for r in range(FEWER)]
    else:  # a rank skips as many of its own rows as a rank had read
        begin = 0 if way == "from the epoch's start" else batches * BATCH // RANKS
        read = [distributed(r, RANKS, 0)[: batches * BATCH // RANKS] for r in range(RANKS)]
        read += [distributed(r, FEWER, 0)[begin:] for r in range(FEWER)]
    times = np.bincount(np.concatenate(read), minlength=SAMPLES)
    return int((times == 0).sum()), int((times > 1).sum())


# 3. Dropout: masks of a batch, [rows, features], as ranks draw them.


def masks(way: str, ranks: int, features: int = 32) -> np.ndarray:
    draw, key = jax.random.bernoulli, jax.random.key(0)
    if way == "by global row":
        return np.asarray(draw(key, 0.5, (BATCH, features)))
    keys = [key if way == "one key" else jax.random.fold_in(key, rank) for rank in range(ranks)]
    return np.concatenate([draw(each, 0.5, (BATCH // ranks, features)) for each in keys])


def learnt_by_jdp(devices: int) -> np.ndarray:
    """Return the weights after a step with dropout, whose loss needs only `rng`."""

    def loss(params: Any, batch: Any, rng: jax.Array) -> jdp.Loss:
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        return jdp.Loss((jax.numpy.where(kept, batch["x"], 0) @ params["w"]).sum(), len(batch["x"]))

    plan = jdp.Plan(jdp.make_mesh(data=devices, devices=jax.devices()[:devices]), "ddp")
    start = lambda rng: {"w": jax.numpy.ones((32, 4))}  # noqa: E731
    state = jdp.init_state(start, optax.sgd(0.1), plan, rng=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(BATCH, 32)).astype(np.float32)
    return np.asarray(jdp.make_train_step(loss, plan)(state, {"x": x})[0].params["w"])


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    rows = [(name, *counted(order)) for name, order in SAMPLERS.items()]
    said = f"""With one seed and no parts all ranks read the same rows: {RANKS} devices do the work of one. With a seed
        each, {rows[1][1] / SAMPLES:.0%} of the data is not read in this epoch. DistributedSampler makes parts equal by
        repeating or dropping a few. By position every sample is read; the last batch continues into the next epoch, so
        its rows of that epoch come early, not twice."""
    heads = ("sampler", "samples not read", "read twice or more", f"different rows in a batch of {BATCH}")
    show(f"An epoch of {SAMPLES} samples on {RANKS} ranks", heads, rows, said)
    rows = [(way, *resumed(way, 15)) for way in RESUMED]
    said = f"""A loader that begins the epoch again reads rows twice. A loader that skips as many rows per rank skips
        too few: one of {FEWER} ranks has {BATCH // FEWER} rows of a batch, not {BATCH // RANKS}. A position is the same
        on any number of ranks; only the start of the batch that continues into the next epoch is not read here."""
    heads = ("resumed", "samples not read", "read twice")
    show(f"15 batches on {RANKS} ranks, the rest of the epoch on {FEWER}", heads, rows, said)
    drawn = {way: {ranks: masks(way, ranks) for ranks in (1, RANKS)} for way in KEYS}
    rows = [(w, len(np.unique(m[RANKS], axis=0)), str(bool((m[1] == m[RANKS]).all()))) for w, m in drawn.items()]
    apart = float(np.abs(learnt_by_jdp(1) - learnt_by_jdp(RANKS)).max())
    said = f"""One key on all ranks gives rows of different ranks the same mask. A key for each rank fixes that, but
        another number of ranks learns something else. One key and the global row solve both: jdp's weights after a step
        with dropout, on 1 and on {RANKS} devices, differ by {apart:.1g}. Initial weights always take one key."""
    show("Dropout masks", ("key", f"different masks of {BATCH} rows", f"the same on 1 and {RANKS} ranks"), rows, said)
    epochs = range(1, 9)
    never = {name: [counted(order, n)[0] for n in epochs] for name, order in SAMPLERS.items()}
    figure = curves(f"Samples of {SAMPLES} that were never read", ("epochs", epochs), "samples", never)
    keep(figure, options.picture, "Samples that no rank has read, by number of epochs, for five samplers")


if __name__ == "__main__":
    tell(main)
