"""The traffic of a step, tensor by tensor: kind of collective, source line, and the arguments with its shape.

Under zero3 also the gathers of each parameter in the step's trace, by layer or at the top.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jdp.base.formatting import format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.traffic.contract import TINY, MeshCollective
from jdp.foresight.traffic.origin import Reading

_LISTED = 12  # rows of a table
_SHARE = 0.01  # of the bytes that a device sends: a source line with less gets no sentence
_LINES = 4  # most source lines with a sentence


@dataclass(frozen=True)
class Sent:
    """Tensors of one shape that one kind of collective sends from one line."""

    kind: str  # of collective
    dtype: str  # of each tensor
    dims: tuple[int, ...]  # an all-gather's result, a reduce-scatter's shard, else the operand, on one device
    axes: tuple[str, ...]  # mesh axes of the collective
    over_batch: bool  # they include batch axes
    source: str | None  # "file:line" that the user wrote, else the library's; None: the program has neither
    like: tuple[str, ...]  # paths of the arguments with this shape, whole or a shard; empty for activations
    count: int  # executions a step, in all rounds of loops
    wire_bytes: float  # bytes that each device sends for all of them, a step, by the ring algorithms
    caveats: tuple[str, ...] = ()  # why `count` may be inexact

    def __str__(self) -> str:
        times = f" {self.count} times" if self.count > 1 else ""
        what = f"the shape of {listed(self.like)}" if self.like else "no argument has this shape"
        at = f", at {self.source}" if self.source else ""
        tensor = f"{self.kind} of {self.dtype}{list(self.dims)}{times}{at}"
        return f"{tensor} ({what}): {format_bytes(self.wire_bytes)} a device"


def sent_by(reading: Reading, collectives: Sequence[MeshCollective]) -> tuple[Sent, ...]:
    """Return the tensors that a compiled step sends, most bytes first."""
    sent = dict[tuple[Any, ...], Sent]()
    for each in collectives:
        c, axes = each.collective, each.axes
        for piece in reading.sites.pieces(c):
            like = tuple(placement.path for placement in reading.parameters.like(piece.dims))
            wire = c.wire_bytes * piece.payload_bytes / max(c.payload_bytes, 1)
            key = (c.kind, piece.dtype, piece.dims, axes, each.over_batch, piece.source_line, like)
            before = sent.get((*key, c.caveats), Sent(*key, 0, 0.0, c.caveats))
            sent[*key, c.caveats] = replace(before, count=before.count + c.count, wire_bytes=before.wire_bytes + wire)
    return tuple(sorted(sent.values(), key=lambda entry: -entry.wire_bytes))


def sent_table(sent: Sequence[Sent]) -> list[tuple[str, ...]]:
    rows = [("collective", "tensor", "times", "axes", "wire a device", "at", "the shape of")]
    for each in sent[:_LISTED]:
        tensor, like = f"{each.dtype}{list(each.dims)}", listed(each.like, 2) or "no argument"
        wire, axes = format_bytes(each.wire_bytes), ", ".join(each.axes)
        rows.append((each.kind, tensor, str(each.count), axes, wire, each.source or "", like))
    rest = sum(each.wire_bytes for each in sent[_LISTED:])
    return [*rows, *([("others", "", "", "", format_bytes(rest), "", "")] if rest else [])]


def activations(sent: Sequence[Sent], batch_axes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each line that sends tensors without an argument's shape along the batch's axes."""
    total, by_line = sum(tensor.wire_bytes for tensor in sent), dict[str | None, list[Sent]]()
    for tensor in sent:
        if tensor.over_batch and not tensor.like:
            by_line.setdefault(tensor.source, []).append(tensor)
    sums = {line: sum(tensor.wire_bytes for tensor in tensors) for line, tensors in by_line.items()}
    for line, wire in sorted(sums.items(), key=lambda pair: -pair[1])[:_LINES]:
        if wire >= _SHARE * total and wire > TINY:
            tensors = by_line[line]
            kinds = ", ".join(f"{tensor.kind} of {tensor.dtype}{list(tensor.dims)}" for tensor in tensors[:2])
            yield (
                f"Activations: {format_bytes(wire)} a device, {format_percent(wire / total)} of its traffic, are "
                f"{kinds}{' and others' * (len(tensors) > 2)}{f' ({line})' if line else ''}: no argument has these "
                f"shapes, so activations or parts of the batch travel along {', '.join(batch_axes)}. Keep each row on "
                "its device: apply jax.lax.with_sharding_constraint(x, "
                f"PartitionSpec({', '.join(map(repr, batch_axes))})) to that line's inputs."
            )


# zero3's gathers come from the step's own trace, not from the program that is compared with it. Every device holds a
# weight that is gathered at the top until the backward pass is done with it. If most weights are, the strategy is
# zero3 by name, but zero2 by memory.

MOSTLY = 0.5
"""Share of the gathered parameters' bytes: a zero3 that gathers more at the top is reported as like zero2."""
_TWICE = 1.5
"""Gathers a microbatch: above this, the backward pass gathers again, and nothing is held."""


@dataclass(frozen=True)
class Gather:
    """The gathers of one parameter in a step, at the top or by layer."""

    parameter: str  # its path
    where: str  # "top" or "layer"
    times_a_microbatch: float  # gathers of the whole parameter
    payload_bytes: int  # a step


def gathers(step: Step, state: TrainState) -> tuple[Gather, ...] | None:
    """Return the gathers of a step as last lowered; None if it is not zero3, or was not lowered."""
    if step.sends is None or step.plan.row.gather != "use":
        return None
    sizes = dict(step.plan.mesh.shape)
    placements: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    elements = {leaf.path: math.prod(leaf.shape) // shards(leaf.compute, sizes) for leaf in placements}
    found = list[Gather]()
    for each in step.sends.gathered:
        times, where = each.elements / max(elements[each.path], 1), "top" if each.at_top else "layer"
        found.append(Gather(each.path, where, times / step.settings.accumulate, each.payload_bytes))
    return tuple(found)


def like_zero2(gathered: Sequence[Gather], accumulate: int) -> str:
    """Return a sentence if most of the parameters' bytes are gathered at the top and held, else ""."""
    copies = [(each, each.payload_bytes / (accumulate * each.times_a_microbatch or 1)) for each in gathered]
    at_top = {each.parameter: held for each, held in copies if each.where == "top" and each.times_a_microbatch < _TWICE}
    top, layered = sum(at_top.values()), sum(held for each, held in copies if each.parameter not in at_top)
    if top <= MOSTLY * (top + layered):
        return ""
    remedy = "run the layers through jdp.scan_layers, which gathers one at a time; cast weights inside the block"
    if layered:
        unchanged = "only parameters that reach jdp.scan_layers unchanged are gathered by layer"
        remedy = f"{unchanged}; cast or reshape them inside the block"
    return (
        f"This zero3 holds its weights like zero2: {format_bytes(top)} of {format_bytes(top + layered)} gathered "
        f"weights a device ({format_percent(top / (top + layered))}) are gathered at the top of the step and held "
        f"until the backward pass is done with them ({listed(sorted(at_top, key=lambda path: -at_top[path]))}). "
        f"Remedy: {remedy}."
    )
