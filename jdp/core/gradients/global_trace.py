"""Traces of a loss on global arrays, where the program that a step would run proves nothing."""

from __future__ import annotations

import re

from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_trace import LossTrace, trace_loss
from jdp.core.gradients.spec import GradientSpec
from jdp.core.plan import Plan
from jdp.core.sharding.traced_mesh import sized_for
from jdp.core.state import AnyState
from jdp.core.types import Batch


def global_trace(
    spec: GradientSpec,
    plan: Plan,
    state: AnyState,
    batch: Batch,
    rows: int,
    optional: bool = False,
    training: bool = True,
) -> LossTrace | None:
    """Trace the loss on `rows` rows; None where only checks need it and the loss takes no such batch."""
    if rows == 0:
        return None
    try:
        return trace_loss(spec.loss_fn, spec.settings.precision, state, batch, rows, spec.settings.train, training)
    except NameError as error:
        named = re.search(r"unbound axis name:? (\w+)", str(error))
        if named and named[1] not in plan.batch_axes:
            raise ValueError(
                f"A loss names no mesh axis but the batch's, {' and '.join(plan.batch_axes)}, and those under "
                f"partitioning='manual' only; given {named[1]!r}. Leave it out: without axis_name flax.linen's "
                "BatchNorm takes its statistics over the rows that the loss sees, under 'auto' all of the batch."
            ) from error
        if spec.settings.requested == "manual":
            return None
        if not named:
            raise
        raise ValueError(
            f"The loss names the mesh axis {named[1]!r}, which exists under partitioning='manual' only; given "
            f"partitioning={spec.settings.requested!r}. jdp itself sums over devices what a loss returns: leave "
            "that out of the loss, or ask for partitioning='manual'."
        ) from error
    except Exception:
        if spec.settings.requested is None and spec.settings.train and not optional:
            raise
        return None


def two_traces(
    spec: GradientSpec, plan: Plan, trace: LossTrace, state: AnyState, batch: Batch
) -> tuple[LossTrace, LossTrace] | None:
    """Return traces on two numbers of rows, two or more; None if the loss takes one number only."""
    least = 2
    half = trace.rows // 2 if trace.rows % least == 0 and trace.rows > least else 0
    base = trace if trace.rows >= least else global_trace(spec, plan, state, batch, least, optional=True)
    if base is None:
        return None
    for rows in (2 * max(trace.rows, least), half):
        with sized_for(base.rows, rows):
            other = global_trace(spec, plan, state, batch, rows, optional=True)
        if other is not None:
            return base, other
    return None


def names_axes(spec: GradientSpec, plan: Plan, state: AnyState, batch: Batch) -> bool:
    """Return True for a loss that names an axis which manual binds: it knows that it gets parts of a batch."""
    rows = batch_rows(batch) // (spec.settings.accumulate * plan.batch_shards)
    try:
        trace_loss(spec.loss_fn, spec.settings.precision, state, batch, rows, spec.settings.train)
    except NameError:
        return True
    return False
