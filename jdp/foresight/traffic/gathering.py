"""What a step under zero3 holds gathered: by layer, or from the top of the step on, as zero2 does.

It is read from the step's own trace, not from the program that is compared with it. A weight that is gathered at the
top is held by every device until the backward pass is done with it. Where most weights are, the strategy is zero3 by
name, and zero2 by memory.
"""

from __future__ import annotations

import math
from collections import Counter

import jax

from jdp.base.formatting import format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step

MOSTLY = 0.5
"""Share of the gathered parameters' bytes; a zero3 that gathers more than this at the top is called a zero2."""


def like_zero2(step: Step, state: TrainState) -> str:
    """Return a sentence if a step of zero3, as it was last lowered, gathers most bytes at the top; else ""."""
    if step.sends is None or step.plan.row.gather != "use":
        return ""
    sizes = dict(step.plan.mesh.shape)
    placements: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    elements = {leaf.path: math.prod(leaf.own_shape) // shards(leaf.compute, sizes) for leaf in placements}
    at_top, by_layer = Counter[str](), Counter[str]()  # path -> bytes of the parameter's working copy
    for each in step.sends.gathered:
        held = elements[each.path] * each.payload_bytes // max(each.elements, 1)
        (at_top if each.at_top else by_layer)[each.path] = held
    top, layered = at_top.total(), sum(held for path, held in by_layer.items() if path not in at_top)
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
        f"until the backward pass is done with them ({listed(path for path, _ in at_top.most_common())}). "
        f"Remedy: {remedy}."
    )
