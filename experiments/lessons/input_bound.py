"""Input-bound training: devices that wait for their batches, and how to see it.

The claim: "the all-reduce is always the bottleneck". Often a step waits for its rows, and a profile of the device shows
a gap, or, on the other hosts, a long all-reduce.

A loader that sleeps stands for a slow disk, and one compiled step for the model. Batches are read between steps; in a
thread, ahead of the step; by several threads; or only once, which is the decisive test. A clock around each line of the
loop shows which line waits. Last, a simulation: hosts whose reading times vary, and where the waiting shows.

    python experiments/lessons/input_bound.py [--picture FILE.svg]

With r seconds to read a batch, c to compute a step and w readers a step takes r + c without, max(c, r/w) with
prefetching. Over H hosts it takes the slowest host's time. jdp: `shard_batches(loader, plan, prefetch=2)`, whose
`wait_seconds` is the loop's waiting time; `data_wait_seconds` in the metrics of `jdp train`. Mohan et al. 2021,
arXiv:2007.06775 (data stalls).
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from devices import use_eight_devices
from narration import curves, keep, parser, show, tell

import jdp

STEPS, ROWS, WIDTH, DEEP = 12, 1024, 256, 8
LINES, HOSTS = ("next(feed)", "step(...)", "float(loss)"), (1, 8, 64, 512)
WAYS = {  # readers (0: the loop itself reads), batches ahead
    "read between steps": (0, 0),
    "prefetch 2": (1, 2),
    "prefetch 2, 4 readers": (4, 2),
}


def seconds_a_step(read: float, compute: float, readers: int) -> float:
    """Return r + c if the loop itself reads, else the larger of c and r / readers."""
    return max(compute, read / readers) if readers else read + compute


# 1. A loader, and readers that keep the order: results are awaited in the order of their requests.


def read_batch(index: int, seconds: float) -> np.ndarray:
    time.sleep(seconds)  # like a disk, a network or a decoder in C, it lets other threads run
    return np.full((ROWS, WIDTH), index, np.float32)


def loader(readers: int, seconds: float, steps: int) -> Iterator[np.ndarray]:
    if readers < 2:
        yield from (read_batch(i, seconds) for i in range(steps))
        return
    with ThreadPoolExecutor(readers) as pool:
        indices = iter(range(steps))
        pending = [pool.submit(read_batch, i, seconds) for i in itertools.islice(indices, readers)]
        while pending:
            batch = pending.pop(0).result()
            pending += [pool.submit(read_batch, i, seconds) for i in itertools.islice(indices, 1)]
            yield batch


# 2. The loop, with a clock around each of its lines. A step returns before it is done; the line that reads its result
# waits for it.


@jax.jit
def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    for _ in range(DEEP):
        x = jax.numpy.tanh(x @ weights)
    return weights + 1e-6 * x.mean(), x.mean()


def run(plan: jdp.Plan, readers: int, prefetch: int, read: float, steps: int = STEPS) -> dict[str, float]:
    """Return seconds per step: of each line by the clock, of all, and the wait that jdp's feed reports."""
    put = lambda x: jax.device_put(x, plan.batch_sharding)  # noqa: E731
    weights, took = jax.device_put(np.eye(WIDTH, dtype=np.float32), plan.replicated), dict.fromkeys(LINES, 0.0)
    jax.block_until_ready(step(weights, put(read_batch(0, 0))))  # compiles
    source = loader(readers, read, steps)
    feed = jdp.shard_batches(source, plan, prefetch=prefetch) if prefetch else map(put, source)
    begun = time.perf_counter()
    for _ in range(steps):
        clock = [time.perf_counter()]
        batch = next(feed)
        clock.append(time.perf_counter())
        weights, result = step(weights, batch)
        clock.append(time.perf_counter())
        float(result)
        clock.append(time.perf_counter())
        for name, seconds in zip(LINES, np.diff(clock), strict=True):
            took[name] += float(seconds) / steps
    waited = getattr(feed, "wait_seconds", took["next(feed)"] * steps) / steps
    return took | {"all": (time.perf_counter() - begun) / steps, "waited": waited}


# 3. Many hosts: each waits at the all-reduce for the one whose batch came last.


def waiting(hosts: int, read: float, compute: float, spread: float, steps: int = 2000) -> tuple[float, float, float]:
    """Return seconds per step, and a host's mean wait for its own input and in the all-reduce; `spread`: σ of log r."""
    reads = read * np.exp(np.random.default_rng(0).normal(-(spread**2) / 2, spread, (steps, hosts)))  # of mean `read`
    own = np.maximum(reads - compute, 0)  # its batch is read while the step before computes
    last = own.max(axis=1, keepdims=True)
    return float(compute + last.mean()), float(own.mean()), float((last - own).mean())


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    plan = jdp.Plan(jdp.make_mesh(data=-1), "ddp")
    alone = run(plan, 0, 0, 0.0)
    compute = alone["all"]
    read = 2 * compute  # a slow disk: twice as long as the step
    found = {way: run(plan, *how, read) for way, how in WAYS.items()} | {"the test: nothing to read": alone}
    bounds = [seconds_a_step(read, compute, how[0]) for how in WAYS.values()] + [compute]
    rows = [
        (way, *(1e3 * each[name] for name in (*LINES, "all")), 1e3 * bound, f"{each['waited'] / each['all']:.0%}")
        for (way, each), bound in zip(found.items(), bounds, strict=True)
    ]
    said = """A thread that reads ahead hides the shorter of reading and computing; only more readers shorten the
        longer. Look at the line that takes the batch: the other two together take the computing time in every row. (A
        call returns before a GPU is done; these CPU devices do part of it in the call.) Then train on one batch, made
        once: if that is faster, the input was the limit."""
    heads = ("input", *LINES, "a step", "formula", "waited for input")
    show(f"Milliseconds per step; reading takes {1e3 * read:.0f}", heads, rows, said)
    rows = [(n, *(1e3 * each for each in waiting(n, 0.08, 0.1, 0.5))) for n in HOSTS]
    said = f"""Reading takes 80 ms on average and computing 100, so one host hardly waits. Of {HOSTS[-1]} hosts one is
        nearly always late: a step takes {rows[-1][1] / rows[0][1]:.1f} times as long. Each waits little for its own
        input, and long in the all-reduce: the profile blames the network, but the input is the cause."""
    heads = ("hosts", "a step", "waits for its own input", "waits in the all-reduce")
    show("Simulated, in ms: reading times vary (lognormal, σ 0.5), compute is 100", heads, rows, said)
    parts = {"its own input": [row[2] for row in rows], "the all-reduce": [row[3] for row in rows]}
    figure = curves("What a host waits for", ("hosts", HOSTS), "ms per step", parts)
    keep(figure, options.picture, "Waiting for a host's own input and in the all-reduce, by number of hosts")


if __name__ == "__main__":
    tell(main)
