"""Where XLA's collectives ("auto") break the communication contract."""

from __future__ import annotations

from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import own_axes

FLAT = "auto would all-reduce the gradients of parameters that are stored flat and padded"


def auto_breach(
    plan: Plan, accumulate: int, precision: Precision, reused: str | None, flat: bool = False
) -> str | None:
    """Describe how auto would break the communication contract; None if it keeps it.

    Measured on compiled programs, experiments/benchmarks/traffic.py.
    """
    row = plan.row
    if accumulate > 1 and not row.reduce_each_microbatch:
        return "auto may synchronise inside the accumulation loop"
    if lower := dtype_breach(precision):
        return lower
    if row.shard_state and any(plan.mesh.shape[axis] > 1 for axis in own_axes(plan.mesh)):
        return "auto may move activations along data where they meet gradients that the model's axes shard too"
    if flat:
        return FLAT
    if reused is not None:
        return f"{reused} is used more than once, and auto reduces its gradient at each use"
    return None


def dtype_breach(precision: Precision) -> str | None:
    """Describe the dtype in which auto would reduce gradients, if another is asked for."""
    if precision.reduce == precision.compute:
        return None
    return f"auto would reduce gradients in {precision.compute}, and {precision.reduce} is asked for"
