"""What a step under zero3 gathers and where, in words: by layer, or at the top of the step like zero2.

It is read from the step's own trace (`core/tracing/collectives.py`), not from the program that is compared with it. A
weight that is gathered at the top is held by every device until the backward pass is done with it. Where most weights
are, the strategy is zero3 by name, and zero2 by memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from jdp.base.formatting import align_columns, format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.tracing.collectives import Gathered

MOSTLY = 0.5
"""Share of the gathered parameters' bytes; a zero3 that gathers more than this at the top is called a zero2."""
_TWICE = 1.5
"""Times a microbatch above which the backward pass gathers again what is gathered at the top, and nothing is held."""
_HEADERS = ("gathered", "times a microbatch", "parameters", "payload", "")


@dataclass(frozen=True)
class Gathering:
    """What the step gathers, a microbatch at a time."""

    gathered: tuple[Gathered, ...]  # what the trace has of each parameter
    accumulate: int  # microbatches, K
    elements: dict[str, int]  # path -> elements of the parameter that a device computes with

    def times(self, each: Gathered) -> float:
        """Return how often the whole parameter is gathered for a microbatch."""
        return each.elements / (self.accumulate * max(self.elements[each.path], 1))

    def held_bytes(self, each: Gathered) -> float:
        """Return the bytes of the parameter's working copy."""
        return self.elements[each.path] * each.payload_bytes / max(each.elements, 1)

    def like_zero2(self) -> str:
        """Return a sentence if most of the parameters' bytes are held from the top on, else an empty string."""
        at_top = [each for each in self.gathered if each.at_top and self.times(each) < _TWICE]
        paths, top = {each.path for each in at_top}, sum(map(self.held_bytes, at_top))
        layered = sum(self.held_bytes(each) for each in self.gathered if each.path not in paths)
        if top <= MOSTLY * (top + layered):
            return ""
        first = sorted(at_top, key=lambda each: -self.held_bytes(each))
        remedy = "run the layers through jdp.scan_layers, which gathers one at a time; cast weights inside the block"
        if layered:
            remedy = (
                "only what goes through jdp.scan_layers as it stands in the model is gathered by layer; cast or "
                "reshape it inside the block"
            )
        gathered = format_bytes(top + layered)
        return (
            f"This zero3 holds its weights like zero2: {format_bytes(top)} of {gathered} gathered weights a device "
            f"({format_percent(top / (top + layered))}) are gathered at the top of the step and held until the "
            f"backward pass is done with them ({listed(each.path for each in first)}). Remedy: {remedy}."
        )

    def table(self) -> list[str]:
        """Return the lines of a table: what is gathered where and how often, those alike together."""
        groups: dict[tuple[str, str], list[Gathered]] = {}
        for each in self.gathered:
            groups.setdefault(("at the top" if each.at_top else "by layer", f"{self.times(each):g}"), []).append(each)
        rows: list[tuple[str, ...]] = [_HEADERS]
        for key, same in groups.items():
            payload = format_bytes(sum(each.payload_bytes for each in same))
            rows.append((*key, str(len(same)), payload, listed(each.path for each in same)))
        return align_columns(rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object for each parameter and whether it is gathered at the top or by layer."""
        return [
            {
                "parameter": each.path,
                "where": "top" if each.at_top else "layer",
                "times_a_microbatch": self.times(each),
                "payload_bytes": each.payload_bytes,
            }
            for each in self.gathered
        ]


def gathering(step: Step, state: TrainState) -> Gathering | None:
    """Return what a step gathers, as it was last lowered; None where it is not zero3, or nothing was lowered."""
    if step.sends is None or step.plan.row.gather != "use":
        return None
    sizes = dict(step.plan.mesh.shape)
    placements: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    elements = {leaf.path: math.prod(leaf.own_shape) // shards(leaf.compute, sizes) for leaf in placements}
    return Gathering(step.sends.gathered, step.accumulate, elements)
