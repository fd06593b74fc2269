"""Notices about the placement of parameters, once for each plan."""

import math
from collections.abc import Collection, Sequence

import jax

from jdp.base.formatting import format_bytes, listed
from jdp.base.notices import notice, warn
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.placement import Placement, axes_of, rest_spec
from jdp.core.state import TrainState

REPORTED_SHARE = 0.05
"""Share of a device's part of the state above which the report names a mesh that divides its replicated leaves."""


def report_placements(plan: Plan, state: TrainState) -> None:
    """Report once the parameters that ZeRO cannot shard; under ddp, the rules that name `data`."""
    if plan.mesh.shape[DATA] == 1:
        return
    if not plan.row.shard_state:
        for pattern in (pattern for pattern, spec in plan.rules if any(DATA in axes_of(entry) for entry in spec)):
            warn(
                f"the rule for {pattern!r} shards over {DATA}, which {plan.strategy} does not: its parameters are "
                f"replicated over {DATA}. Choose zero1, zero2 or zero3, or leave {DATA} out of the rule"
            )
        return
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    replicated = [p for p in params if p.dim is None]
    small = [p for p in replicated if "min_shard_size" in p.reason]
    indivisible = [p for p in replicated if p.is_indivisible]
    if indivisible:
        _report_indivisible(plan, state, indivisible)
    for p in (p for p in replicated if p not in small and p not in indivisible):
        notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
    if small:
        notice(
            f"parameters of fewer than {plan.min_shard_size} elements stay replicated, "
            f"{sum(p.bytes_per_device for p in small):,} bytes on every device: {listed(p.path for p in small)}"
        )


def _report_indivisible(plan: Plan, state: TrainState, params: Sequence[Placement]) -> None:
    """Report the parameters without a dimension that divides, and their share of the state; name a better mesh."""
    mirrors = {f"mirrors params/{p.path}" for p in params}
    placements = plan.placements(state)
    opt_state = sum(p.bytes_per_device for p in placements if p.reason.partition(";")[0] in mirrors)
    held = opt_state + sum(p.bytes_per_device for p in params)
    share = held / sum(p.bytes_per_device for p in placements)
    mesh = dividing_mesh(plan, params) if share > REPORTED_SHARE else None
    notice(
        f"{_largest(params)}: no dimension divides by {DATA}={plan.mesh.shape[DATA]}, so every device holds all, "
        f"{format_bytes(held)} with optimizer state, {share:.1%} of its state"
        + (f"; a mesh of {mesh} divides all" if mesh else "")
    )


def _largest(params: Sequence[Placement]) -> str:
    largest_first = sorted(params, key=lambda p: -p.bytes_per_device)
    return listed((f"{p.path} {list(p.shape)}" for p in largest_first), 1)


def dividing_mesh(plan: Plan, params: Sequence[Placement]) -> str | None:
    """Return "replica=2 × data=4", the mesh with the longest `data` axis that divides all these parameters."""
    sizes = dict(plan.mesh.shape)
    for data in range(sizes[DATA] // 2, 1, -1):
        if sizes[DATA] % data == 0:
            others = {**sizes, DATA: data}
            if all(rest_spec(p.shape, p.compute, others, 0)[0] != p.compute for p in params):
                return factors({REPLICA: sizes.get(REPLICA, 1) * sizes[DATA] // data, DATA: data})
    return None


def report_products(plan: Plan, state: TrainState, sizes: Collection[int], divided: Collection[str]) -> None:
    """Report once sharded parameters whose update takes products of arrays of these `sizes`, except `divided` ones."""
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    gathered = [p for p in params if p.dim is not None and math.prod(p.shape) in sizes and p.path not in divided]
    if gathered and plan.mesh.shape[DATA] > 1:
        size = sum(p.bytes_per_device for p in gathered) * plan.mesh.shape[DATA]
        notice(
            f"the optimizer's update takes matrix or inner products of {_largest(gathered)}, {format_bytes(size)} "
            f"that {plan.strategy} shards: XLA gathers them or sums partial products, in addition to the traffic that "
            f"{plan.strategy} promises; jdp.verify counts it"
        )
