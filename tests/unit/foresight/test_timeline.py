"""The schedule, simulated: texts whose timeline follows by construction, loops against the same work written out, and
programs that XLA's GPU compiler made. And times of collectives: NCCL's published model, worked out by hand."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from described_gpus import program_of

from jdp.foresight.program.collectives import KINDS
from jdp.foresight.program.module import parse
from jdp.foresight.targets.resolve import target
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, PRODUCTS, collective_cost, timeline

pytestmark = pytest.mark.aot


EVERYONE = (tuple(range(8)),)
# Elements of the copies and gathered shards below. On an H100: a short copy is a good deal shorter than the gather, a
# long one a good deal longer.
SHARD, SHORT, LONG = 2**18, 2**20, 2**27


@functools.cache
def h100():
    return target("h100:1x8")


def copy_seconds(elements):
    """A copy of float32 by the stated model: read and written at 85% of the bandwidth, and a launch."""
    return 1.9e-6 + 8 * elements / (0.85 * 3_352_320_000_000)


@functools.cache
def gather_seconds(shard=SHARD):
    return collective_cost("all-gather", 4 * 8 * shard, EVERYONE, h100()).seconds


# Texts from nested lists: ("compute", elements), ("start" or "sync", name, shard), ("done", name), ("loop", trips, […])


GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"


def simulated(work):
    """The timeline of such a list, written as HLO text; loops become computations."""
    computations, numbers = ["HloModule m, is_scheduled=true, num_partitions=8\n"], itertools.count(1)

    def write(head, work):
        lines = [f"{head} {{", "  %p = s32[] parameter(0)"]
        for (kind, *fields), i in zip(work, numbers, strict=False):
            match kind, *fields:
                case "compute", size:
                    lines += [f"  %x.{i} = f32[{size}]{{0}} parameter(1)", f"  %y.{i} = f32[{size}]{{0}} copy(%x.{i})"]
                case "start" | "sync", name, shard:
                    result = f"f32[{8 * shard}]{{0}} all-gather"
                    if kind == "start":
                        result = f"(f32[{shard}]{{0}}, f32[{8 * shard}]{{0}}) all-gather-start"
                    lines += [f"  %x.{i} = f32[{shard}]{{0}} parameter(1)", f"  %{name} = {result}(%x.{i}), {GROUPS}"]
                case "done", name:
                    lines.append(f"  %done.{i} = f32[{8 * SHARD}]{{0}} all-gather-done(%{name})")
                case "loop", trips, inside:
                    write(f"%body.{i} (p: s32[]) -> s32[]", inside)
                    write(f"%condition.{i} (p: s32[]) -> pred[]", [])
                    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
                    lines.append(f"  %while.{i} = s32[] while(%p), condition=%condition.{i}, body=%body.{i}{known}")
        computations.append("\n".join([*lines, "}"]))

    write("ENTRY %main (p: s32[]) -> s32[]", work)
    return timeline(parse("\n\n".join(computations)), h100())


def written_out(work):
    """The same work without loops; names of collectives made unique."""
    written = []

    def write(work, rounds):
        for kind, *fields in work:
            if kind == "loop":
                for i in range(fields[0]):
                    write(fields[1], (*rounds, len(written), i))
            elif kind == "compute":
                written.append((kind, *fields))
            else:
                written.append((kind, "_".join(map(str, (fields[0], *rounds))), *fields[1:]))

    write(work, ())
    return written


def by_hand(work):
    """(step, communication, compute) of work without loops: an event at a time."""
    now = free = communication = busy = 0.0
    ends = {}
    for kind, *rest in written_out(work):
        if kind == "compute":
            now, busy = now + copy_seconds(rest[0]), busy + copy_seconds(rest[0])
        elif kind == "done":
            now = max(now, ends[rest[0]])
        else:
            free = max(now, free) + gather_seconds(rest[1])
            communication += gather_seconds(rest[1])
            ends[rest[0]] = free
            now = free if kind == "sync" else now
    return max(now, free), communication, busy


def same(result, work):
    step, communication, busy = by_hand(work)
    assert result.step_seconds == pytest.approx(step, rel=1e-9)
    assert result.communication_seconds == pytest.approx(communication, rel=1e-9)
    assert result.compute_seconds == pytest.approx(busy, rel=1e-9)
    assert result.compute_seconds + result.exposed_seconds == pytest.approx(result.step_seconds, rel=1e-12)


START, DONE = ("start", "a", SHARD), ("done", "a")


def test_a_loop_of_unknown_length_counts_once():
    result = simulated([("loop", None, [("compute", LONG)])])
    assert result.step_seconds == pytest.approx(copy_seconds(LONG))
    assert any("unknown length" in caveat for caveat in result.caveats)
    assert not any("unknown" in caveat for caveat in simulated([("loop", 3, [("compute", LONG)])]).caveats)


def random_work(rng, depth=0):
    """Work in which every start has its done in the same computation, but may be in flight when a loop begins."""
    work, open_names = [], []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice(["compute", "compute", "start", "start", "done", "sync", "loop"])
        name = f"c{rng.getrandbits(40)}"
        if kind == "compute":
            work.append((kind, rng.choice([2**10, SHORT, 2**24, LONG])))
        elif kind == "start":
            open_names.append(name)
            work.append((kind, name, rng.choice([2**10, SHARD, 2**22])))
        elif kind == "sync":
            work.append((kind, name, SHARD))
        elif kind == "done" and open_names:
            work.append((kind, open_names.pop(rng.randrange(len(open_names)))))
        elif kind == "loop" and depth < 2:
            work.append((kind, rng.randint(0, 7), random_work(rng, depth + 1)))
    rng.shuffle(open_names)
    return work + [("done", name) for name in open_names]


@pytest.mark.parametrize("seed", range(60))
def test_loops_equal_the_same_work_written_out(seed):
    work = random_work(random.Random(seed))
    result = simulated(work)
    same(result, work)
    same(simulated(written_out(work)), work)
    busy = {lane: sum(e.seconds for e in result.events if e.lane == lane) for lane in (COMPUTE, COMMUNICATION)}
    assert busy[COMPUTE] == pytest.approx(result.compute_seconds, rel=1e-9)
    assert busy[COMMUNICATION] == pytest.approx(result.communication_seconds, rel=1e-9)


def test_a_long_loop_is_simulated_in_few_events():
    result = simulated([("loop", 10**9, [START, ("compute", SHORT), DONE])])
    assert result.step_seconds == pytest.approx(1e9 * gather_seconds(), rel=1e-6)
    assert result.compute_seconds == pytest.approx(1e9 * copy_seconds(SHORT), rel=1e-6)
    assert len(result.events) == 6  # two rounds of two, and the rest of either lane
    assert [event.times for event in result.events[-2:]] == [10**9 - 2] * 2


def test_flops_in_loops_count_each_round():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    result = timeline(program_of(layers, (256, 512), (7, 512, 512)), target("h100:1x1"))
    assert result.flops == 7 * 2 * 256 * 512 * 512
    assert 0 < result.parts[PRODUCTS] < result.compute_seconds
    assert result.step_seconds == pytest.approx(result.compute_seconds)


# Times of collectives.

KIB, MIB, GIB = 2**10, 2**20, 2**30
US = 1e-6
H100_LINK = 18 * 20.6e9  # B/s: 18 NVLinks, each as fast as NCCL counts it
H100_CARD = 48e9  # B/s: a 400 Gb/s card behind PCIe 5


def groups_for(kind: str, *members: int) -> tuple[tuple[int, ...], ...]:
    """A group of these members; for a permute their ring of pairs."""
    ring = (*members[1:], members[0])
    return tuple(zip(members, ring, strict=True)) if kind == "collective-permute" else (members,)


# By hand. The model's numbers, written out: LL 6.6 us, LL128 14 us and Simple 8.4 us to start a ring; a hop inside a
# host 0.6, 1.9 and 3.4 us (at least 1, 1 and 3 us beside network hops), a hop between hosts 2.7, 4 and 14 us.


HOST, HOSTS = (tuple(range(8)),), (tuple(range(16)),)
BY_HAND = [  # kind, payload, groups, target, algorithm, latency in us, bytes on the wire, B/s
    ("all-gather", 64 * MIB, HOST, "h100:1x8", "ring Simple", 8.4 + 7 * 3.4, 7 / 8 * 64 * MIB, H100_LINK),
    # LL carries 141 GB/s at most on one Hopper host
    ("all-reduce", 8 * KIB, HOST, "h100:1x8", "ring LL", 6.6 + 14 * 0.6, 2 * 7 / 8 * 8 * KIB, 141e9),
    # 15 hops, one of them over the network; eight cards carry more than an NVLink
    ("all-gather", GIB, HOSTS, "h100:2x8", "ring Simple", 8.4 + 14 * 3.4 + 14.0, 15 / 16 * GIB, H100_LINK),
    # 30 hops, two over the network, and NCCL's factor of 1.4 on all of the latency
    ("all-reduce", GIB, HOSTS, "h100:2x8", "ring Simple", 1.4 * (8.4 + 28 * 3.4 + 28.0), 15 / 8 * GIB, H100_LINK),
    # 6 levels of a tree against 1022 hops of a ring; LL carries 20.4 GB/s between hosts, a tree reaches 0.9 of that
    ("all-reduce", KIB, (tuple(range(512)),), "h100:64x8", "tree LL", 6.8 + 2 * (4.2 + 30.0), 2 * KIB, 0.9 * 20.4e9),
    # half of the peers are on the other host: half of the operand leaves over each device's own card
    ("all-to-all", 256 * MIB, HOSTS, "h100:2x8", "direct Simple", 8.4 + 14.0, 128 * MIB, H100_CARD),
    # one pair that crosses hosts sets the time
    ("collective-permute", 64 * MIB, ((0, 1), (7, 8)), "h100:2x8", "direct Simple", 22.4, 64 * MIB, H100_CARD),
    ("collective-permute", 64 * MIB, ((0, 1), (1, 2)), "h100:2x8", "direct Simple", 11.8, 64 * MIB, H100_LINK),
    # what leaves a host leaves by its members' cards
    ("all-gather", GIB, ((0, 8),), "h100:2x8", "ring Simple", 22.4, 1 / 2 * GIB, H100_CARD),
    ("all-gather", GIB, ((0, 1, 8, 9),), "h100:2x8", "ring Simple", 8.4 + 6.8 + 14.0, 3 / 4 * GIB, 2 * H100_CARD),
]


@pytest.mark.parametrize(("kind", "payload", "groups", "name", "algorithm", "latency", "wire", "rate"), BY_HAND)
def test_times_of_collectives_by_hand(kind, payload, groups, name, algorithm, latency, wire, rate):
    cost = collective_cost(kind, payload, groups, target(name))
    assert cost.algorithm == algorithm
    assert cost.latency_seconds == pytest.approx(latency * US)
    assert cost.wire_seconds == pytest.approx(wire / rate)


@pytest.mark.parametrize(
    ("name", "kind", "measured"),
    [
        ("a100:1x8", "all-reduce", 240),  # "close to 240 GB/s": NVIDIA/nccl issue 1712
        ("a100:4x8", "all-reduce", 192),  # "8x200Gbit/s ... we measure 192GB/s": NVIDIA/nccl issue 812
        ("h100:1x8", "all-gather", 370),  # "effective NVLink bandwidth of 370GB/s": NVIDIA/nccl-tests issue 212
    ],
)
def test_what_nccls_authors_measure_with_large_messages(name, kind, measured):
    """Bus bandwidths (nccl-tests, doc/PERFORMANCE.md) that NVIDIA's engineers gave for DGX machines, in GB/s."""
    cluster = target(name)
    n, size = len(cluster.devices), 8 * GIB
    wire_bytes = (2 if kind == "all-reduce" else 1) * (n - 1) / n * size
    bandwidth = wire_bytes / collective_cost(kind, size, (tuple(range(n)),), cluster).seconds
    assert bandwidth / 1e9 == pytest.approx(measured, rel=0.01)  # they round to a few GB/s


@pytest.mark.parametrize("name", ["a100:4x8", "h100:4x8", "b200:4x8"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_are_never_faster(name, kind):
    cluster = target(name)
    sizes = [2 ** (k / 4) for k in range(136)]  # to 16 GiB, four sizes an octave: also between a table's entries
    for members in ((0, 1), tuple(range(8)), (0, 8), (0, 1, 8, 9), tuple(range(32))):
        times = [collective_cost(kind, size, groups_for(kind, *members), cluster).seconds for size in sizes]
        assert all(a <= b for a, b in itertools.pairwise(times))
