"""What a step under zero3 gathers and where, in words: by layer, or at the top of the step like zero2.

Read off the step's own trace (`gradients.gathers`), not off the program that is judged by it. A weight that is gathered
at the top stays whole on every device until the backward pass is done with it: where most of them are, the strategy is
zero3 by name, and zero2 by memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdp.core.formatting import align_columns, format_bytes, format_percent
from jdp.core.gradients.gathers import Gathered
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.traffic.breaches import listed

MOSTLY = 0.5
"""Share of the gathered parameters' bytes; a zero3 that gathers more than this at the top is called a zero2."""
_HEADERS = ("gathered", "times a microbatch", "parameters", "payload", "")


@dataclass(frozen=True)
class Gathering:
    """What the step gathers, a microbatch at a time.

    Attributes:
        gathered: as the trace has it.
        accumulate: microbatches, K.
        elements: path -> elements of the parameter that a device computes with.
    """

    gathered: tuple[Gathered, ...]
    accumulate: int
    elements: dict[str, int]

    def times(self, each: Gathered) -> float:
        """How often the whole parameter is gathered for a microbatch."""
        return each.elements / (self.accumulate * max(self.elements[each.path], 1))

    def held_bytes(self, each: Gathered) -> float:
        """The parameter's working copy, once."""
        return self.elements[each.path] * each.payload_bytes / max(each.elements, 1)

    @property
    def top_bytes(self) -> float:
        """What is held whole from the top of the loss to the backward pass, a device."""
        return sum(map(self.held_bytes, self._top))

    @property
    def layer_bytes(self) -> float:
        """What is gathered where a layer loop uses it, all layers together."""
        top = {each.path for each in self._top}
        return sum(self.held_bytes(each) for each in self.gathered if each.path not in top)

    @property
    def _top(self) -> list[Gathered]:
        return [each for each in self.gathered if each.at_top]

    def like_zero2(self) -> str:
        """A sentence where most of the parameters' bytes are gathered at the top; empty where they are not."""
        top, layered = self.top_bytes, self.layer_bytes
        if top <= MOSTLY * (top + layered):
            return ""
        first = sorted(self._top, key=lambda each: -self.held_bytes(each))
        remedy = "run the layers through jdp.scan_layers, which gathers one at a time; cast weights inside the block"
        if layered:
            remedy = (
                "only what goes through jdp.scan_layers as it stands in the model is gathered by layer; cast or "
                "reshape it inside the block"
            )
        gathered = format_bytes(top + layered)
        return (
            f"This zero3 holds its weights like zero2: {format_bytes(top)} of {gathered} gathered weights a device "
            f"({format_percent(top / (top + layered))}) are gathered at the top of the step and stay whole until the "
            f"backward pass is done with them ({listed(each.path for each in first)}). Remedy: {remedy}."
        )

    def table(self) -> list[str]:
        """Lines: what is gathered where and how often, the alike together."""
        groups: dict[tuple[str, str], list[Gathered]] = {}
        for each in self.gathered:
            where = "at the top" if each.at_top else "by layer"
            groups.setdefault((where, f"{self.times(each):g}"), []).append(each)
        return align_columns([_HEADERS, *(_row(*key, same) for key, same in groups.items())])

    def to_json(self) -> list[dict[str, Any]]:
        """One object a parameter and place."""
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
    """What a step gathers, as it was lowered; None where its strategy is not zero3, or nothing was lowered."""
    if step.sends is None or step.plan.row.gather != "use":
        return None
    sizes = dict(step.plan.mesh.shape)
    places: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    elements = {place.path: math.prod(place.shape) // shards(place.compute, sizes) for place in places}
    return Gathering(step.sends.gathered, step.accumulate, elements)


def _row(where: str, times: str, same: Sequence[Gathered]) -> tuple[str, ...]:
    return where, times, str(len(same)), format_bytes(_payload(same)), listed(each.path for each in same)


def _payload(gathered: Iterable[Gathered]) -> int:
    return sum(each.payload_bytes for each in gathered)
