"""Notices about the placement of parameters, once for each plan."""

from __future__ import annotations

import jax

from jdp.base.formatting import listed
from jdp.base.notices import notice, warn
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.mesh import hosts_along, replicas_for_hosts
from jdp.core.sharding.placement import axes_of
from jdp.core.state import TrainState


def report_placements(plan: Plan, state: TrainState) -> None:
    """Report once which parameters ZeRO pads or cannot shard; under ddp, which rules name `data`."""
    data = plan.mesh.shape[DATA]
    if data == 1:
        return
    if not plan.row.shard_state:
        for pattern in (pattern for pattern, spec in plan.rules if any(DATA in axes_of(entry) for entry in spec)):
            warn(
                f"the rule for {pattern!r} shards over {DATA}, which {plan.strategy} does not: what it matches is "
                f"replicated over {DATA}; take zero1, zero2 or zero3, or leave {DATA} out of the rule"
            )
        return
    if (replicas := replicas_for_hosts(plan.mesh)) is not None:
        inside, hosts = factors({REPLICA: replicas, DATA: data // replicas}), hosts_along(plan.mesh, DATA)
        notice(
            f"{plan.strategy} gathers and reduces along {DATA}={data}, which spans {hosts} hosts; {inside} "
            f"does it on each host's fast links, and every device then holds {replicas} times as much state"
        )
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    if flat := [p for p in params if p.flat is not None]:
        most, shared = max(flat, key=lambda p: p.bytes_per_device), factors({DATA: data})
        several = len(flat) > 1
        notice(
            f"{most.path} {list(most.own_shape)}{f' and {len(flat) - 1} more' * several}, of which no dimension "
            f"divides by {shared}, {'rest' if several else 'rests'} flat and padded "
            f"({sum(p.bytes_per_device for p in flat):,} bytes on every device); state.unpadded() has "
            f"{'them in their own shapes' if several else 'it in its own shape'}"
        )
    replicated = [p for p in params if p.dim is None]
    small = [p for p in replicated if "min_shard_size" in p.reason]
    for p in (p for p in replicated if p not in small):
        notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
    if small:
        counted, stay = ("1 parameter", "stays") if len(small) == 1 else (f"{len(small)} parameters", "stay")
        notice(
            f"{counted} of fewer than {plan.min_shard_size} elements {stay} replicated "
            f"({sum(p.bytes_per_device for p in small):,} bytes on every device): {listed(p.path for p in small)}"
        )
