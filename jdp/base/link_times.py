"""How long a collective of GPUs takes, by the cost model with which NCCL chooses its algorithms.

`group_cost` takes the members of a group and their hosts, times every algorithm and protocol that NCCL has for the
kind, and keeps the fastest:

    seconds        base latency + hops x latency a hop + wire bytes / (bus bandwidth x the protocol's share of it)
    bus bandwidth  min(NVLink, members on one host x network card), each times its efficiency (`base/gpus.toml`)

A ring all-reduce of n members on h hosts takes 2(n-1) hops, 2(h-1) of them over the network. It sends 2(n-1)/n of the
payload; reduce-scatter and all-gather take half of both. A tree (all-reduce only) takes 2(n/h - 1) hops inside and
2 log2 h between hosts, and sends the payload twice. Protocols: LL (at most half the bandwidth, least latency), LL128
(0.92 of it), Simple (all of it). All-to-all and permute are direct sends: one hop, over NVLink inside a host and at the
same time over each device's network card. Sources: NVIDIA/nccl 2.28, src/graph/tuning.cc (`ncclTopoTuneModel`,
`ncclTopoGetAlgoTime`), every number below; NVIDIA/nccl-tests, doc/PERFORMANCE.md, for wire bytes.

Reduction in the switches (NVLS, SHARP) is not modelled: an all-reduce inside a host of Hopper or later is up to 1.3
times faster with it (NVIDIA/nccl-tests 212). Nor are PAT, XLA's own small all-reduce kernels, the wait for the last
device, and a card or switch that groups share. NCCL has no model for direct sends: they take a ring's first hop.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jdp.base.chips import Gpu


class CollectiveCost(NamedTuple):
    """Seconds of one execution: latency and transfer; `algorithm` is the fastest, such as "ring LL128"."""

    latency_seconds: float
    wire_seconds: float
    algorithm: str

    @property
    def seconds(self) -> float:
        return self.latency_seconds + self.wire_seconds


class Group(NamedTuple):
    """Number of members, number of their hosts, and the fewest and most members on one host."""

    members: int
    hosts: int
    fewest: int
    most: int

    @staticmethod
    def of(hosts: Iterable[int]) -> "Group":
        """Return the group of members on these hosts: the number of a host for each member."""
        counts = Counter(hosts)
        return Group(counts.total(), len(counts), min(counts.values()), max(counts.values()))


class _Protocol(NamedTuple):
    """A protocol's microseconds for ring and tree: to start, per hop over NVLink, per hop over the network."""

    name: str
    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    overhead: float  # least time of a ring's hop inside a host if other hops use the network (Intel hosts)
    flushes: int  # how often a network hop waits for the card


# baseLatencies and hwLatencies (rows NVLINK and NET) of ncclTunerConstantsDefaults; getNetOverhead.
_PROTOCOLS = (
    _Protocol("LL", (6.6, 0.6, 2.7), (6.8, 0.6, 5.0), 1.0, 1),
    _Protocol("LL128", (14.0, 1.9, 4.0), (14.0, 1.25, 8.5), 1.0, 1),
    _Protocol("Simple", (8.4, 3.4, 14.0), (8.4, 4.0, 14.0), 3.0, 2),
)

# llMaxBws: LL's largest bandwidth in B/s: on one host by the GPU's generation, else by the processor (Intel here), for
# two hosts and for more.
_LL_ONE_HOST = {8: 87.7e9, 9: 141e9, 10: 282e9}
_LL_TWO_HOSTS, _LL_MORE_HOSTS = 39.0e9, 20.4e9

# "Plateau effect of ring": a Simple all-reduce over the network waits this much longer, at the sizes for which NCCL
# chooses Simple.
_PLATEAU = 1.4

# treeCorrectionFactor: the tenths of a tree's bandwidth reached with 64 B, 128 B, ... 256 MiB.
_TREE_REACHES = {
    "LL": (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10),
    "LL128": (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10),
    "Simple": (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
}

# How often a member of a ring of n sends the payload, in units of (n-1)/n, and how many rounds of n-1 hops that takes.
RINGS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
DIRECT = ("all-to-all", "ragged-all-to-all", "collective-permute")


def group_cost(kind: str, payload: float, group: Group, chip: Gpu) -> CollectiveCost:
    """Return the cost of the fastest algorithm for one group."""
    algorithms = _direct if kind in DIRECT else _ring
    trees = _tree(payload, group, chip) if kind == "all-reduce" else ()
    return min((*algorithms(kind, payload, group, chip), *trees), key=lambda cost: cost.seconds)


def _bus(group: Group, chip: Gpu) -> float:
    """B/s that all members can send at once along a ring or tree; between hosts, over the members' network cards."""
    inside = chip.link_bandwidth * chip.link_efficiency
    outside = group.fewest * chip.network_bandwidth * chip.network_efficiency
    return inside if group.hosts == 1 else min(inside, outside)


def _ll_limit(group: Group, chip: Gpu) -> float:
    if group.hosts == 1:
        return _LL_ONE_HOST.get(chip.capability[0], _LL_ONE_HOST[10])
    return _LL_TWO_HOSTS if group.hosts == 2 else _LL_MORE_HOSTS


def _ring(kind: str, payload: float, group: Group, chip: Gpu) -> Iterator[CollectiveCost]:
    n, hosts, bus = group.members, group.hosts, _bus(group, chip)
    rounds = RINGS.get(kind, 1)
    wire = payload if kind == "collective-broadcast" else rounds * payload * (n - 1) / n
    outside = rounds * (hosts - 1)
    for protocol in _PROTOCOLS:
        start, inside_hop, outside_hop = _hops(protocol, group, chip)
        latency = start + (rounds * (n - 1) - outside) * inside_hop + outside * outside_hop
        if kind == "all-reduce" and hosts > 1 and protocol.name == "Simple":
            latency *= _PLATEAU
        left = {"LL": min(0.5 * bus, _ll_limit(group, chip)), "LL128": 0.92 * bus, "Simple": bus}[protocol.name]
        yield CollectiveCost(latency, wire / left, f"ring {protocol.name}")


def _hops(protocol: _Protocol, group: Group, chip: Gpu) -> tuple[float, float, float]:
    """Seconds for a ring to start, for a hop inside a host, and for a hop between hosts."""
    start, inside, outside = protocol.ring
    if group.hosts > 1:
        inside = max(inside, protocol.overhead)
    if group.most == 1:
        outside = protocol.tree[2]  # no hop inside a host hides it
    outside_hop = 1e-6 * outside + protocol.flushes * chip.network_latency
    return 1e-6 * start, 1e-6 * inside + chip.link_latency, outside_hop


def _tree(payload: float, group: Group, chip: Gpu) -> Iterator[CollectiveCost]:
    bus, deep = 0.92 * _bus(group, chip), int(math.log2(group.hosts))
    for protocol in _PROTOCOLS:
        start, inside, outside = (1e-6 * number for number in protocol.tree)
        outside += protocol.flushes * chip.network_latency
        latency = start + 2 * ((group.most - 1) * (inside + chip.link_latency) + deep * outside)
        packed = 7 / 9 if group.hosts == 1 else 120 / 128
        left = {"LL": min(bus / 3.8, _ll_limit(group, chip)), "LL128": packed * bus, "Simple": bus}[protocol.name]
        table = _TREE_REACHES[protocol.name]  # interpolated: a larger message is never faster
        tenths = float(np.interp(math.log2(max(payload, 1) / 64), range(len(table)), table))
        yield CollectiveCost(latency, 2 * payload / (left * tenths / 10), f"tree {protocol.name}")


def _direct(kind: str, payload: float, group: Group, chip: Gpu) -> Iterator[CollectiveCost]:
    """Direct sends to every peer: over NVLink inside a host and over the network between hosts, at the same time."""
    n, local = group.members, group.fewest
    inside, outside = (1.0, 0.0) if group.hosts == 1 else (0.0, 1.0)  # a permute's pair
    if kind != "collective-permute":
        inside, outside = (group.most - 1) / n, (n - local) / n if group.hosts > 1 else 0.0
    for protocol in _PROTOCOLS[::2]:  # NCCL's sends have LL and Simple
        start, inside_hop, outside_hop = _hops(protocol, group, chip)
        share = 0.5 if protocol.name == "LL" else 1.0
        over_links = inside * payload / (share * chip.link_bandwidth * chip.link_efficiency)
        over_network = outside * payload / (share * chip.network_bandwidth * chip.network_efficiency)
        hop = inside_hop if group.hosts == 1 else outside_hop
        yield CollectiveCost(start + hop, max(over_links, over_network), f"direct {protocol.name}")
