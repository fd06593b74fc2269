"""Notices about the placement of parameters, once for each plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import jax

from jdp.base.formatting import format_bytes, listed
from jdp.base.notices import notice, warn
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.mesh import hosts_along, replicas_for_hosts
from jdp.core.sharding.placement import Placement, axes_of, rest_spec
from jdp.core.state import TrainState

REPORTED_SHARE = 0.05
"""Of a device's part of the state: if replicated leaves hold more, the report names a mesh that divides them."""


def report_placements(plan: Plan, state: TrainState) -> None:
    """Report once which parameters ZeRO cannot shard; under ddp, which rules name `data`."""
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
    replicated = [p for p in params if p.dim is None]
    small = [p for p in replicated if "min_shard_size" in p.reason]
    indivisible = [p for p in replicated if p.is_indivisible]
    if indivisible:
        _report_indivisible(plan, state, indivisible)
    for p in (p for p in replicated if p not in small and p not in indivisible):
        notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
    if small:
        counted, stay = ("1 parameter", "stays") if len(small) == 1 else (f"{len(small)} parameters", "stay")
        notice(
            f"{counted} of fewer than {plan.min_shard_size} elements {stay} replicated "
            f"({sum(p.bytes_per_device for p in small):,} bytes on every device): {listed(p.path for p in small)}"
        )


def _report_indivisible(plan: Plan, state: TrainState, params: Sequence[Placement]) -> None:
    """Report the parameters of which no dimension divides, and their share of the state; of a large one, the mesh."""
    mirrors = {f"mirrors params/{p.path}" for p in params}
    placements = plan.placements(state)
    opt_state = sum(p.bytes_per_device for p in placements if p.reason.partition(";")[0] in mirrors)
    held = opt_state + sum(p.bytes_per_device for p in params)
    share = held / sum(p.bytes_per_device for p in placements)
    largest = max(params, key=lambda p: p.bytes_per_device)
    several, them = (f" and {len(params) - 1} more", "them") if len(params) > 1 else ("", "it")
    mesh = dividing_mesh(plan, params) if share > REPORTED_SHARE else None
    notice(
        f"{largest.path} {list(largest.shape)}{several}: no dimension divides by {DATA}={plan.mesh.shape[DATA]}, so "
        f"every device holds all of {them}, {format_bytes(held)} with optimizer state, {share:.1%} of what it holds"
        + (f"; a mesh of {mesh} divides {them}" if mesh else "")
    )


def dividing_mesh(plan: Plan, params: Sequence[Placement]) -> str | None:
    """Return "replica=2, data=4", the mesh with most devices along `data` that divides all these parameters."""
    sizes = dict(plan.mesh.shape)
    for data in range(sizes[DATA] // 2, 1, -1):
        if sizes[DATA] % data == 0:
            others = {**sizes, DATA: data}
            if all(rest_spec(p.shape, p.compute, others, 0)[0] != p.compute for p in params):
                return factors({REPLICA: sizes.get(REPLICA, 1) * sizes[DATA] // data, DATA: data})
    return None


def report_products(plan: Plan, state: TrainState, sizes: Collection[int], divided: Collection[str]) -> None:
    """Report once the sharded parameters of which an update takes matrix or inner products.

    Args:
        plan: the mesh and the strategy.
        state: real or abstract.
        sizes: numbers of elements of the arrays in those products.
        divided: paths of parameters whose matrices are divided among the devices (`jdp.muon`).
    """
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    gathered = [p for p in params if p.dim is not None and math.prod(p.shape) in sizes and p.path not in divided]
    if gathered and plan.mesh.shape[DATA] > 1:
        largest = max(gathered, key=lambda p: p.bytes_per_device)
        size = sum(p.bytes_per_device for p in gathered) * plan.mesh.shape[DATA]
        several = f" and {len(gathered) - 1} more" if len(gathered) > 1 else ""
        notice(
            f"the optimizer's update takes matrix or inner products of {largest.path} {list(largest.shape)}{several}, "
            f"{format_bytes(size)} that {plan.strategy} shards: XLA gathers them or sums partial products, beside what "
            f"{plan.strategy} promises; jdp.verify counts it"
        )
