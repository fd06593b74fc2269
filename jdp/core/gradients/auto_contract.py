"""Where XLA's collectives ("auto") break the communication contract."""

from __future__ import annotations

from collections.abc import Iterable

from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import own_axes
from jdp.core.sharding.placement import Placement


def auto_breach(
    plan: Plan, accumulate: int, precision: Precision, reused: str | None, leaf: str | None = None
) -> str | None:
    """Describe how auto would break the communication contract; None if it keeps it. `leaf`: that of `leaf_breach`.

    Measured on compiled programs, experiments/benchmarks/traffic.py.
    """
    row = plan.row
    if accumulate > 1 and not row.reduce_each_microbatch:
        return "auto may synchronise inside the accumulation loop"
    if lower := dtype_breach(precision):
        return lower
    if row.shard_state and any(plan.mesh.shape[axis] > 1 for axis in own_axes(plan.mesh)):
        return "auto may move activations along data where they meet gradients that the model's axes shard too"
    if leaf is not None:
        return leaf
    if reused is not None:
        return f"{reused} is used more than once, and auto reduces its gradient at each use"
    return None


def leaf_breach(trained: Iterable[Placement]) -> str | None:
    """Describe how auto would reduce the gradients of parameters that are stored like this otherwise than promised."""
    stacked = None
    for placement in trained:
        if placement.dim == 0 and len(placement.shape) > 2:
            stacked = stacked or placement.path
    return f"auto would all-reduce the gradient of {stacked}, which is sharded over its layers" if stacked else None


def dtype_breach(precision: Precision) -> str | None:
    """Describe the dtype in which auto would reduce gradients, if another is asked for."""
    if precision.reduce == precision.compute:
        return None
    return f"auto would reduce gradients in {precision.compute}, and {precision.reduce} is asked for"
