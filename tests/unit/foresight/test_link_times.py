"""Times of collectives: NCCL's published model, worked out by hand, and what must hold whatever the numbers are."""

import itertools

import pytest

from jdp.foresight.program.collectives import KINDS
from jdp.foresight.targets.resolve import target
from jdp.foresight.timing.timeline import collective_cost

pytestmark = pytest.mark.aot


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
def test_by_hand(kind, payload, groups, name, algorithm, latency, wire, rate):
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
