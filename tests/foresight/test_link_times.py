"""Times of collectives: NCCL's published model, worked out by hand, and what must hold whatever the numbers are."""

import itertools

import pytest

from jdp.foresight.targets.resolve import Target, target
from jdp.foresight.timing.collectives import NOTHING, collective_cost, collective_seconds

KIB, MIB, GIB = 2**10, 2**20, 2**30
US = 1e-6
H100_LINK = 18 * 20.6e9  # B/s: 18 NVLinks, each as fast as NCCL counts it
H100_CARD = 48e9  # B/s: a 400 Gb/s card behind PCIe 5

RINGS = ("all-reduce", "reduce-scatter", "all-gather")
KINDS = (*RINGS, "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


def everyone(cluster: Target) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(len(cluster.devices))),)


def groups_for(kind: str, *members: int) -> tuple[tuple[int, ...], ...]:
    """A group of these members; for a permute their ring of pairs."""
    ring = (*members[1:], members[0])
    return tuple(zip(members, ring, strict=True)) if kind == "collective-permute" else (members,)


# By hand. The model's numbers, written out: LL 6.6 us, LL128 14 us and Simple 8.4 us to start a ring; a hop inside a
# host 0.6, 1.9 and 3.4 us (at least 1, 1 and 3 us beside network hops), a hop between hosts 2.7, 4 and 14 us.


def test_a_large_all_gather_inside_a_host():
    cost = collective_cost("all-gather", 64 * MIB, (tuple(range(8)),), target("h100:1x8"))
    assert cost.algorithm == "ring Simple"
    assert cost.latency_seconds == pytest.approx((8.4 + 7 * 3.4) * US)
    assert cost.wire_seconds == pytest.approx(7 / 8 * 64 * MIB / H100_LINK)
    assert cost.seconds == pytest.approx(190.56 * US, abs=0.005 * US)


def test_a_small_all_reduce_inside_a_host_is_latency():
    cost = collective_cost("all-reduce", 8 * KIB, (tuple(range(8)),), target("h100:1x8"))
    assert cost.algorithm == "ring LL"
    assert cost.latency_seconds == pytest.approx((6.6 + 14 * 0.6) * US)
    assert cost.wire_seconds == pytest.approx(2 * 7 / 8 * 8 * KIB / 141e9)  # what LL carries at most on one Hopper host
    assert cost.latency_seconds > cost.wire_seconds


def test_a_ring_between_hosts_pays_for_their_hops():
    """16 members on 2 hosts: 15 hops, one of them over the network. Eight cards carry more than an NVLink."""
    cluster = target("h100:2x8")
    cost = collective_cost("all-gather", GIB, everyone(cluster), cluster)
    assert cost.algorithm == "ring Simple"
    assert cost.latency_seconds == pytest.approx((8.4 + 14 * 3.4 + 14.0) * US)
    assert cost.wire_seconds == pytest.approx(15 / 16 * GIB / H100_LINK)


def test_a_large_all_reduce_between_hosts_sits_on_the_rings_plateau():
    """30 hops, two over the network, NCCL's factor of 1.4 on all of the latency; twice 15/16 of the payload."""
    cluster = target("h100:2x8")
    cost = collective_cost("all-reduce", GIB, everyone(cluster), cluster)
    assert cost.algorithm == "ring Simple"
    assert cost.latency_seconds == pytest.approx(1.4 * (8.4 + 28 * 3.4 + 2 * 14.0) * US)
    assert cost.wire_seconds == pytest.approx(2 * 15 / 16 * GIB / H100_LINK)


def test_a_small_all_reduce_on_many_hosts_takes_the_tree():
    """64 hosts are 6 levels: 2 (7 hops inside + 6 outside) against 1022 hops of a ring. LL carries 20.4 GB/s between
    more than two hosts, of which a tree reaches 0.9 with 1 KiB."""
    cluster = target("h100:64x8")
    cost = collective_cost("all-reduce", KIB, everyone(cluster), cluster)
    assert cost.algorithm == "tree LL"
    assert cost.latency_seconds == pytest.approx((6.8 + 2 * (7 * 0.6 + 6 * 5.0)) * US)
    assert cost.wire_seconds == pytest.approx(2 * KIB / (0.9 * 20.4e9))


def test_an_all_to_all_sends_to_every_peer_over_its_own_card():
    """Half the peers of 16 are on the other host: half the operand leaves over each device's own card."""
    cluster = target("h100:2x8")
    cost = collective_cost("all-to-all", 256 * MIB, everyone(cluster), cluster)
    assert cost.algorithm == "direct Simple"
    assert cost.latency_seconds == pytest.approx((8.4 + 14.0) * US)
    assert cost.wire_seconds == pytest.approx(256 * MIB / 2 / H100_CARD)
    inside = collective_cost("all-to-all", 256 * MIB, (tuple(range(8)), tuple(range(8, 16))), cluster)
    assert inside.wire_seconds == pytest.approx(256 * MIB * 7 / 8 / H100_LINK)


def test_one_pair_of_a_permute_that_crosses_hosts_sets_its_time():
    cluster = target("h100:2x8")
    inside = collective_cost("collective-permute", 64 * MIB, ((0, 1), (1, 2)), cluster)
    assert inside.wire_seconds == pytest.approx(64 * MIB / H100_LINK)
    crossing = collective_cost("collective-permute", 64 * MIB, ((0, 1), (7, 8)), cluster)
    assert crossing.wire_seconds == pytest.approx(64 * MIB / H100_CARD)


# Cards.


@pytest.mark.parametrize(("members", "cards"), [((0, 8), 1), ((0, 1, 8, 9), 2), ((0, 1, 2, 3, 8, 9, 10, 11), 4)])
def test_what_leaves_a_host_leaves_by_its_members_cards(members, cards):
    cost = collective_cost("all-gather", GIB, (members,), target("h100:2x8"))
    assert cost.algorithm == "ring Simple"
    n = len(members)
    assert cost.wire_seconds == pytest.approx((n - 1) / n * GIB / (cards * H100_CARD))


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
    bandwidth = wire_bytes / collective_seconds(kind, size, everyone(cluster), cluster)
    assert bandwidth / 1e9 == pytest.approx(measured, rel=0.01)  # they round to a few GB/s


# What must hold for every number.


@pytest.mark.parametrize("name", ["a100:4x8", "h100:4x8", "b200:4x8"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_are_never_faster(name, kind):
    cluster = target(name)
    sizes = [2 ** (k / 4) for k in range(136)]  # to 16 GiB, four sizes an octave: also between a table's entries
    for members in ((0, 1), tuple(range(8)), (0, 8), (0, 1, 8, 9), tuple(range(32))):
        times = [collective_seconds(kind, size, groups_for(kind, *members), cluster) for size in sizes]
        assert all(a <= b for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_the_same_members_on_more_hosts_are_never_faster(chip, kind):
    for exponent in range(35):
        times = [
            collective_seconds(kind, 2**exponent, groups_for(kind, *range(8)), target(f"{chip}:{hosts}x{8 // hosts}"))
            for hosts in (1, 2, 4, 8)
        ]
        assert all(a <= b for a, b in itertools.pairwise(times)), f"2^{exponent} bytes: {times}"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaves_a_group_of_one(kind):
    singles = tuple((i, i) if kind == "collective-permute" else (i,) for i in range(8))
    assert collective_cost(kind, GIB, singles, target("h100:1x8")) == NOTHING


@pytest.mark.parametrize(("fast", "slow"), [((0, 1, 2, 3), (4, 12)), ((0, 1), (4, 5, 6, 12))])
def test_the_slowest_group_counts(fast, slow):
    cluster = target("h100:2x8")
    both = collective_seconds("all-reduce", MIB, (fast, slow), cluster)
    assert both == collective_seconds("all-reduce", MIB, (slow,), cluster)
    assert both > collective_seconds("all-reduce", MIB, (fast,), cluster)


# One's own cluster, TPUs, and what is refused.


def cluster_file(folder, text: str, shape: str) -> Target:
    path = folder / "cluster.toml"
    path.write_text(text)
    return target(f"{path}:{shape}")


@pytest.mark.aot
def test_a_cluster_with_slower_cards_and_longer_hops(tmp_path):
    slower = cluster_file(tmp_path, 'like = "h100"\nnetwork_bandwidth_gb_s = 25\nnetwork_latency_us = 10\n', "2x1")
    cost = collective_cost("all-gather", GIB, ((0, 1),), slower)
    assert cost.algorithm == "ring Simple"
    assert cost.latency_seconds == pytest.approx((8.4 + 14 + 2 * 10) * US)  # Simple waits twice: data, then its flush
    assert cost.wire_seconds == pytest.approx(GIB / 2 / (0.96 * 25e9))


def test_cpu_devices_have_no_rates():
    with pytest.raises(ValueError, match=r"published link rates; given cpu:4: choose a GPU or TPU target"):
        collective_seconds("all-reduce", MIB, ((0, 1, 2, 3),), target("cpu:4"))


def test_a_program_for_more_devices_than_the_target_has_is_refused():
    with pytest.raises(ValueError, match="among the target's 8 devices; given device 15"):
        collective_seconds("all-reduce", MIB, (tuple(range(16)),), target("h100:1x8"))
