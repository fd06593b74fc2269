"""Which partitioning a step gets when none was asked for, and why.

Auto, unless auto cannot keep the communication contract and the loss returns a `Loss`, which promises that its total is
a sum over examples: then manual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jdp.mesh import own_axes
from jdp.notices import notice
from jdp.plan import Plan, path_of
from jdp.precision import Precision
from jdp.state import TrainState
from jdp.types import Batch, Loss

if TYPE_CHECKING:
    from jdp.step import Step


ASKED = "asked for"


@dataclass(frozen=True)
class Choice:
    partitioning: str
    why: str


def choose(step: Step, state: TrainState, batch: Batch) -> Choice:
    """Settle the partitioning of `step` for this state and batch, and say once what was chosen."""
    choice = _choose(step, state, batch)
    if step.plan.batch_shards > 1 and (step.asked is None or choice.why != ASKED):
        what = "train" if step.train else "eval"
        notice(f"{what} step under {step.plan.strategy}: partitioning={choice.partitioning!r}: {choice.why}")
    adapter, without = state.static.adapter, step.train and not step.sync_batch_norm and step.plan.batch_shards > 1
    if without and choice.partitioning == "auto" and adapter is not None and adapter.has_statistics:
        notice("sync_batch_norm=False changes nothing under partitioning='auto', which sees the whole batch")
    return choice


def _choose(step: Step, state: TrainState, batch: Batch) -> Choice:
    if step.asked is not None:
        known = _drawback(step, state) if step.train else None
        return Choice(step.asked, f"{ASKED}, although {known}" if known else ASKED)
    if step.plan.batch_shards == 1:
        return Choice("auto", "one shard of the batch: nothing to communicate")
    if not step.train:
        return Choice("auto", "an evaluation step has no gradients to reduce")
    is_sum, reused = _read_loss(step, state, batch)
    breach = auto_breach(step.plan, step.accumulate, step.precision, reused)
    if breach is None:
        return Choice("auto", "XLA keeps the communication contract")
    if names := _unsynchronised(state):
        return Choice(
            "auto", f"{names[0]} may be a statistic of the batch, which only auto sees whole, although {breach}"
        )
    if not is_sum:
        return Choice("auto", f"the loss returns a mean, although {breach}; a loss that returns jdp.Loss gets manual")
    return Choice("manual", breach)


def auto_breach(plan: Plan, accumulate: int, precision: Precision, reused: str | None) -> str | None:
    """What auto would get wrong; None: nothing. Measured on compiled programs, experiments/benchmarks/traffic.py."""
    row = plan.row
    if accumulate > 1 and not row.reduce_each_microbatch:
        return "auto may synchronise inside the accumulation loop"
    if lower := _dtype_breach(precision):
        return lower
    if row.shard_state and any(plan.mesh.shape[axis] > 1 for axis in own_axes(plan.mesh)):
        return "auto may move activations along data where they meet gradients that the model's axes shard too"
    if reused is not None:
        return f"{reused} is used more than once, and auto reduces its gradient at each use"
    return None


def _drawback(step: Step, state: TrainState) -> str | None:
    """What the user who asked for a partitioning may not expect of it."""
    if step.asked == "auto":
        return _dtype_breach(step.precision)
    if names := _unsynchronised(state):
        return f"each device then computes {names[0]} over its own rows, and the values are averaged"
    return None


def _unsynchronised(state: TrainState) -> tuple[str, ...]:
    """State of the model that its calls change, apart from batch norms' statistics."""
    return () if state.static.adapter is None else state.static.adapter.unsynchronised


def _dtype_breach(precision: Precision) -> str | None:
    if precision.reduce == precision.compute:
        return None
    return f"auto would reduce gradients in {precision.compute}, and {precision.reduce} is asked for"


def _read_loss(step: Step, state: TrainState, batch: Batch) -> tuple[bool, str | None]:
    """Trace the loss abstractly: does it return a `Loss`, and which parameter does it use more than once?"""
    adapter, found = state.static.adapter, list[bool]()

    def probe(params: Any) -> Any:
        model = params if adapter is None else adapter.merge(params, state.model_state, state.rng)
        value = step.loss_fn(model, batch, state.rng)
        found.append(isinstance(value, Loss))
        return value.total if isinstance(value, Loss) else value

    jaxpr = jax.make_jaxpr(probe)(step.precision.working_shapes(state.params)).jaxpr
    paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(state.params)]
    trained = state.static.trained or (True,) * len(paths)
    uses = zip(paths, jaxpr.invars, trained, strict=True)
    return found[0], next((path for path, var, counts in uses if counts and count_uses(jaxpr, var) > 1), None)


def count_uses(jaxpr: Any, var: Any) -> int:
    """How many primitive operations of `jaxpr`, and of those it calls, take `var` as an operand."""
    count = 0
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if operand is var:
                count += _uses_inside(eqn, position)
    return count


def _uses_inside(eqn: Any, position: int) -> int:
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)  # a ClosedJaxpr or a Jaxpr; anything else has no invars
        if len(getattr(inner, "invars", ())) == len(eqn.invars):
            return count_uses(inner, inner.invars[position])
    return 1
