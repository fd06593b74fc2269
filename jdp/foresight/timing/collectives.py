"""The time of a compiled program's collectives on a target's links.

`collective_cost` counts the members of each group, times a group of GPUs by NCCL's model (`base/link_times.py`), and
returns the slowest group's time, because all start together. TPU slices have no published model: see `_torus`.
"""

import functools
from collections import Counter

from jdp.base.chips import Chip, Gpu
from jdp.base.errors import UserError
from jdp.base.link_times import DIRECT, RINGS, CollectiveCost, Group, group_cost
from jdp.foresight.targets.resolve import Target

Groups = tuple[tuple[int, ...], ...]
NOTHING = CollectiveCost(0.0, 0.0, "none")

# "How to Scale Your Model" (jax-ml/scaling-book), "A note on ICI latency": about a microsecond a hop between chips.
_TORUS_HOP = 1e-6


def collective_seconds(kind: str, payload_bytes: float, groups: Groups, target: Target) -> float:
    """Return `collective_cost(...).seconds`, for one execution."""
    return collective_cost(kind, payload_bytes, groups, target).seconds


def collective_cost(kind: str, payload_bytes: float, groups: Groups, target: Target) -> CollectiveCost:
    """Return the time of one execution of a collective; a group of one device takes none."""
    if kind not in (kinds := (*RINGS, *DIRECT, "collective-broadcast")):
        raise UserError(f"the cost of a collective is known for {', '.join(kinds)}; given {kind!r}: name one of these")
    if target.chip is None:
        raise UserError(f"a collective is timed by published link rates; given {target}: choose a GPU or TPU target")
    chip, worst = target.chip, NOTHING
    for group in _grouped(groups, target.per_host, len(target.devices)):
        if isinstance(chip, Gpu):
            cost = group_cost(kind, payload_bytes, group, chip)
        else:
            cost = _torus(kind, payload_bytes, group, chip, target)
        worst = max(worst, cost, key=lambda cost: cost.seconds)
    return worst


@functools.lru_cache(maxsize=256)
def _grouped(groups: Groups, per_host: int, devices: int) -> tuple[Group, ...]:
    """Return the distinct groups by members and hosts, smallest first, without groups of one device."""
    distinct = set[Group]()
    for group in groups:
        if not all(0 <= member < devices for member in group):
            raise UserError(
                f"a program's groups must be within the target's {devices} devices; given device {max(group)}: use the "
                "target that the program was compiled for"
            )
        shared = Counter(member // per_host for member in set(group))  # devices are ordered host by host
        if (members := shared.total()) > 1:
            distinct.add(Group(members, len(shared), min(shared.values()), max(shared.values())))
    return tuple(sorted(distinct))


def _torus(kind: str, payload: float, group: Group, chip: Chip, target: Target) -> CollectiveCost:
    """Return the time on a TPU slice: rings along all axes of the torus, both directions, the whole interconnect.

    Optimistic for a group along one axis, and for slices too small for closed rings.
    """
    n = group.members
    rounds = RINGS.get(kind, 1)
    wire = payload if kind in ("collective-permute", "collective-broadcast") else rounds * payload * (n - 1) / n
    hops = rounds * sum(max(int(axis) // 2, 1) for axis in target.shape.split("x") if axis != "1")
    return CollectiveCost(hops * _TORUS_HOP, wire / (chip.link_bandwidth * chip.link_efficiency), "torus")
