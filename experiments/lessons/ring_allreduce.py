"""Ring all-reduce, written with sends to the neighbour only, and its bytes counted in the compiled program.

The claim: "a ring is O(N), a naive exchange O(N²)". N² is the naive exchange's total over all devices. A step is
limited by the bytes that *one* device sends.

Each device cuts its array into N chunks and sends one to its right neighbour, N−1 times: a chunk's sum goes around, and
each device adds its part (reduce-scatter). Then the finished chunks go around once more (all-gather). So a device sends
each chunk twice, however many devices there are. The price is steps one after the other: latency grows with N, bytes do
not.

    python experiments/lessons/ring_allreduce.py [--megabytes 4] [--latency-us 5] [--gb-s 100] [--picture FILE.svg]

Of an array of M bytes a ring sends 2(N−1)/N·M in 2(N−1) steps, the naive exchange (N−1)·M in N−1. `jax.lax.psum` is one
instruction, and NCCL chooses the algorithm; jdp counts it by the ring's bytes
(`jdp.foresight.traffic.theory.ring_bytes`). Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from devices import use_eight_devices
from exchanges import formula, seconds, size_where_equal
from jax.sharding import PartitionSpec as P
from narration import keep, parser, positive, show, tell

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.report.charts import chart

# 1. The algorithm. Every device has an array of M bytes and cuts it into N chunks. All do the same at the same time:
# send a chunk to the right neighbour, receive one from the left. Chunk numbers are modulo N; `me` is the device's own.


def send_to_the_right(chunk: jax.Array, by: int = 1) -> jax.Array:
    """Send a chunk `by` places on along the ring, and return the one that arrives."""
    n = jax.lax.axis_size("data")
    return jax.lax.ppermute(chunk, "data", [(source, (source + by) % n) for source in range(n)])


def ring(own: jax.Array, rounds: int | None = None) -> jax.Array:
    """Return the sum of all devices' arrays [M], on every device; or the chunks after some of the 2(N−1) rounds."""
    n, me = jax.lax.axis_size("data"), jax.lax.axis_index("data")
    chunks = jnp.pad(own, (0, -own.size % n)).reshape(n, -1)
    for step in range(2 * (n - 1) if rounds is None else rounds):
        arrived, place = send_to_the_right(chunks[(me - step) % n]), chunks.at[(me - step - 1) % n]
        # Reduce-scatter, N−1 rounds: device `me` sends chunk me, then the chunk that it last added to. A chunk's sum
        # travels around the ring and is complete on the device before the one where it began. All-gather, N−1 rounds:
        # each finished chunk goes around once more and replaces the partial sums.
        chunks = place.add(arrived) if step < n - 1 else place.set(arrived)
    return chunks.ravel()[: own.size]


def naive(own: jax.Array) -> jax.Array:
    """The same by sending the whole array to every other device, which adds the arrays up."""
    others = [send_to_the_right(own, by) for by in range(1, jax.lax.axis_size("data"))]
    return sum(others, own)


Way = Callable[[jax.Array], jax.Array]
WAYS: dict[str, Way] = {"ring": ring, "naive": naive, "psum": lambda own: jax.lax.psum(own, "data")}


# 2. Count. Each way is compiled for N devices; its collectives are read from the program.


@dataclass(frozen=True)
class Counted:
    """One way on N devices. `sent` is bytes per device; `error` the largest difference from the sum made by NumPy."""

    way: str
    devices: int
    steps: int
    sent: float
    error: float


def count(way: str, devices: int, elements: int) -> Counted:
    mesh = jdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    each = lambda own: WAYS[way](own[0])[None]  # noqa: E731 - [1, M] on a device
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    arrays = np.random.default_rng(0).normal(size=(devices, elements)).astype(np.float32)
    compiled = run.lower(arrays).compile()
    found = collectives(compiled.as_text())
    error = np.abs(np.asarray(run(arrays)) - arrays.sum(axis=0)).max()
    return Counted(way, devices, len(found), total_wire_bytes(found), float(error))


def drawn(devices: int) -> list[tuple[str, ...]]:
    """Return, after each round, how many devices' parts are in each chunk of each device."""
    mesh = jdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    rows, ones = [], np.ones(devices * devices, np.float32)  # a chunk of ones: its sum counts the parts
    for done in range(2 * devices - 1):
        run = jax.shard_map(partial(ring, rounds=done), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        chunks = np.asarray(jax.jit(run)(ones)).astype(int).reshape(devices, devices)
        rows.append((str(done), *(" ".join(map(str, each)) for each in chunks)))
    return rows


# 3. Time, by `exchanges.py`: a step costs a latency α, a byte 1/β. Nothing is measured here: virtual devices share one
# memory, so α and β are given (bucketing.py fits them).


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__file__, __doc__)
    made.add_argument("--megabytes", type=positive, default=4, metavar="M", help="of the array")
    made.add_argument("--latency-us", type=positive, default=5, metavar="ALPHA", help="of one step")
    made.add_argument("--gb-s", type=positive, default=100, metavar="BETA", help="that a device sends")
    options = made.parse_args(argv)
    use_eight_devices()
    size, alpha, beta = 4 * int(options.megabytes * 250_000), options.latency_us * 1e-6, options.gb_s * 1e9
    counts = [n for n in (2, 4, 8) if n <= jax.device_count()]
    found = [count(way, n, size // 4) for way in WAYS for n in counts]
    rows = [(c.way, c.devices, c.steps, c.sent / size, formula(c.way, c.devices, 1), c.error) for c in found]
    said = """Each round a device sends one chunk to the right. After 3 rounds each chunk is complete on one device,
        after 6 on all: a device has sent 6 quarters of its array."""
    headers = ("round", *(f"device {i}" for i in range(4)))
    show("A ring of 4: how many devices' parts are in each of four chunks", headers, drawn(4), said)
    headers = ("way", "devices", "collectives", "sent per device, × M", "by formula, × M", "largest error")
    said = """The ring's bytes approach 2 M and stay there; the naive exchange sends one more M for each more device.
        All three compute the same sum, up to the order of float32 additions."""
    show(f"M = {size / 1e6:g} MB, counted in the compiled program", headers, rows, said)
    many = [2**k for k in range(1, 11)]
    times = {way: [seconds(way, n, size, alpha, beta) * 1e3 for n in many] for way in ("ring", "naive", "server")}
    equal, waits = size_where_equal(8, alpha, beta) / 1e6, 2 * (many[-1] - 1) * alpha * 1e3 / times["ring"][-1]
    said = f"""For large arrays the ring wins: a device in a naive exchange sends more for each further device, and so
        does a parameter server, the one machine that adds up for all. For small arrays it loses: on 8 devices the naive
        exchange is faster below {equal:.3g} MB. On {many[-1]} devices {waits:.0%} of the ring's time is latency, so
        NCCL also has trees."""
    rows = [*zip(many, *times.values(), strict=True)]
    title = f"Milliseconds, if a step takes {options.latency_us:g} µs (α) and a device sends {options.gb_s:g} GB/s (β)"
    show(title, ("devices", *times), rows, said)
    figure, (sent, time) = chart(2)
    for way, mark in zip(WAYS, "osx", strict=True):
        sent.plot(counts, [c.sent / 1e6 for c in found if c.way == way], mark, label=f"{way}, counted")
    for way, each in times.items():
        sent.plot(many[:3], [formula(way, n, size) / 1e6 for n in many[:3]], label=f"{way}, formula", zorder=0)
        time.loglog(many, each, label=way)
    sent.set(title="Bytes that a device sends", xlabel="devices", ylabel="MB")
    time.set(title="Time by the model α, β", xlabel="devices", ylabel="ms")
    time.xaxis.set_major_formatter("{x:g}"), time.yaxis.set_major_formatter("{x:g}")
    sent.legend(), time.legend()
    keep(figure, options.picture, "Bytes sent by a device and modelled time, for a ring and a naive exchange, over N")


if __name__ == "__main__":
    tell(main)
