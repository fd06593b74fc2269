"""What a step under zero3 holds gathered: by layer, or from the top of the step on, as zero2 does.

It is read from the step's own trace, not from the program that is compared with it. A weight that is gathered at the
top is held by every device until the backward pass is done with it. Where most weights are, the strategy is zero3 by
name, and zero2 by memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jdp.base.formatting import format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step

MOSTLY = 0.5
"""Share of the gathered parameters' bytes; a zero3 that gathers more than this at the top is called a zero2."""


@dataclass(frozen=True)
class Gather:
    """What a step gathers of one parameter, at the top or by layer."""

    parameter: str  # its path
    where: str  # "top" or "layer"
    times_a_microbatch: float  # how often the whole parameter is gathered
    payload_bytes: int  # a step


def gathers(step: Step, state: TrainState) -> tuple[Gather, ...] | None:
    """Return what a step gathers, as it was last lowered; None where it is not zero3, or nothing was lowered."""
    if step.sends is None or step.plan.row.gather != "use":
        return None
    sizes = dict(step.plan.mesh.shape)
    placements: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    elements = {leaf.path: math.prod(leaf.shape) // shards(leaf.compute, sizes) for leaf in placements}
    found = list[Gather]()
    for each in step.sends.gathered:
        times, where = each.elements / max(elements[each.path], 1), "top" if each.at_top else "layer"
        found.append(Gather(each.path, where, times / step.accumulate, each.payload_bytes))
    return tuple(found)


def like_zero2(gathered: Sequence[Gather], accumulate: int) -> str:
    """Return a sentence if most of the parameters' bytes are gathered at the top, else an empty string."""
    copies = [(each, each.payload_bytes / (accumulate * each.times_a_microbatch or 1)) for each in gathered]
    at_top = {each.parameter: held for each, held in copies if each.where == "top"}
    top, layered = sum(at_top.values()), sum(held for each, held in copies if each.parameter not in at_top)
    if top <= MOSTLY * (top + layered):
        return ""
    remedy = "run the layers through jdp.scan_layers, which gathers one at a time; cast weights inside the block"
    if layered:
        remedy = (
            "only what goes through jdp.scan_layers as it stands in the model is gathered by layer; cast or reshape it "
            "inside the block"
        )
    return (
        f"This zero3 holds its weights like zero2: {format_bytes(top)} of {format_bytes(top + layered)} gathered "
        f"weights a device ({format_percent(top / (top + layered))}) are gathered at the top of the step and held "
        f"until the backward pass is done with them ({listed(sorted(at_top, key=lambda path: -at_top[path]))}). "
        f"Remedy: {remedy}."
    )
