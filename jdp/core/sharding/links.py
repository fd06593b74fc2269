"""How long collectives take along axes of a mesh of GPUs, by the chip's published rates and NCCL's own model."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from jax.sharding import Mesh

from jdp.base.chips import GPUS, Gpu
from jdp.base.link_times import CollectiveCost, Group, group_cost
from jdp.core.sharding.host_memory import is_described
from jdp.core.sharding.mesh import devices_along, host_of


def gpu_of(mesh: Mesh) -> Gpu | None:
    """Return the chip that a mesh is made of; None where its rates are not known."""
    kind = mesh.devices.flat[0].device_kind
    return next((chip for chip in GPUS.values() if chip.name == kind), None)


def groups_along(mesh: Mesh, axes: tuple[str, ...]) -> set[Group]:
    """Return the groups that differ, of devices that communicate along these axes; none of a single device."""
    host = attrgetter("process_index") if is_described(mesh) else host_of
    shared = [Counter(map(host, group)) for group in devices_along(mesh, axes)]
    several = (counts for counts in shared if counts.total() > 1)
    return {Group(each.total(), len(each), min(each.values()), max(each.values())) for each in several}


def slowest(kind: str, payload: float, groups: set[Group], chip: Gpu) -> CollectiveCost:
    """Return the cost of a collective of all groups at once, which is the slowest group's."""
    costs = [group_cost(kind, payload, group, chip) for group in groups]
    return max(costs, key=lambda cost: cost.seconds, default=CollectiveCost(0.0, 0.0, "none"))
