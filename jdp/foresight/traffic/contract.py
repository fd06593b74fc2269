"""Whether a compiled step keeps the communication contract: its traffic, compared with `theory.py`.

A step keeps the contract if a device sends at most 1.02 times the theory's bytes along the batch axes. Each kind of
collective that the row does not name may send at most 1% of them, and so may traffic that belongs to no parameter
(`faults.strays`). zero3's gathers alone may send at most 1.02 times the gathers of the trace. The plan all-reduces
gradients of parameters too small to shard (`theory.Unsharded`), within the same total. Collectives along the model's
own axes only, batch norm statistics and metrics are counted separately (`origin.BatchStatistics`).

`sent_by` lists the same traffic tensor by tensor: kind, source line, and the arguments with its shape. `gathers` lists
zero3's gathers from the step's own trace.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.base.formatting import format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.program.collectives import Collective
from jdp.foresight.traffic.origin import BatchStatistics, Reading
from jdp.foresight.traffic.theory import Theory

TOLERANCE = 1.02
"""Largest ratio of wire bytes to theory that keeps the contract."""
SLACK = 0.01
"""Share of theory for any other kind of collective, beside `Unsharded`: scalars, indivisible leaves."""
TINY = 256
"""Bytes: sums of no parameter's shape up to this size are counts and metrics."""


@dataclass(frozen=True)
class MeshCollective:
    """A collective of the program, placed on the mesh."""

    collective: Collective
    axes: tuple[str, ...]  # the mesh axes along which its groups vary; empty if nothing leaves a device
    in_accumulation_loop: bool  # it runs for every microbatch
    over_batch: bool  # it varies along `replica` or `data`, so the contract counts it
    statistics_bytes: int = 0  # batch statistics in its payload, a step, which the contract leaves out

    @property
    def payload_bytes(self) -> int:
        """Bytes a step, without batch statistics; so are the bytes that each device sends."""
        return self.collective.payload_bytes * self.collective.count - self.statistics_bytes

    @property
    def wire_bytes(self) -> float:
        total = self.payload_bytes + self.statistics_bytes
        return self.collective.wire_bytes * (self.payload_bytes / total if total else 1)

    def to_json(self) -> dict[str, Any]:
        c = self.collective
        return {
            **{name: getattr(c, name) for name in ("kind", "dtype", "payload_bytes", "count")},
            "in_accumulation_loop": self.in_accumulation_loop,
            "axes": list(self.axes),
            "counted": self.over_batch,
            "statistics_bytes": self.statistics_bytes,
            "group_size": c.group_size,
            "wire_bytes_per_device": c.wire_bytes,
            "asynchronous": c.is_async,
            "operation": c.op_name,
            "source": c.source,
        }


def collectives_on(reading: Reading, statistics: BatchStatistics | None = None) -> list[MeshCollective]:
    """Return every collective of a program that sends something, in schedule order."""
    placed, statistics_left = list[MeshCollective](), statistics.payload_bytes if statistics else 0
    for c in reading.compiled.collectives:
        if c.group_size > 1:
            axes = axes_along(c.groups, reading.mesh)
            over_batch, statistics_bytes = not set(axes).isdisjoint(reading.batch_axes), 0
            if statistics and statistics_left and over_batch and c.kind == "all-reduce":
                candidates = sum(piece.payload_bytes for piece in reading.sites.pieces(c) if statistics.fits(piece))
                statistics_bytes = min(candidates * c.count, statistics_left)
                statistics_left -= statistics_bytes
            placed.append(MeshCollective(c, axes, reading.sites.in_accumulation_loop(c), over_batch, statistics_bytes))
    return placed


@lru_cache(maxsize=256)
def axes_along(groups: tuple[tuple[int, ...], ...], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group, positions in the mesh's device order, differ."""
    varies = np.zeros(mesh.devices.ndim, bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), mesh.devices.shape))
        varies |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(mesh.axis_names, varies, strict=True) if differs)


@dataclass(frozen=True)
class Row:
    """One kind of collective: bytes promised and bytes sent."""

    kind: str  # of collective
    expected_bytes: float  # payload a step
    found_bytes: int  # payload a step
    in_loop_bytes: int  # the part of `found_bytes` in the loop over the microbatches
    wire_bytes: float  # bytes that each device sends a step
    theory_wire_bytes: float  # bytes promised
    # this kind alone is within bounds: the tolerance for a promised kind, the slack for any other; an all-reduce may
    # also send the gradients that the plan leaves unsharded
    kept: bool

    @property
    def ratio(self) -> float | None:
        return self.found_bytes / self.expected_bytes if self.expected_bytes else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def cells(self) -> tuple[str, str, str, str, str, str]:
        looped = "no"
        if self.in_loop_bytes:
            looped = "yes" if self.in_loop_bytes == self.found_bytes else f"{format_bytes(self.in_loop_bytes)} of it"
        expected, ratio = ("–", "–") if self.ratio is None else (format_bytes(self.expected_bytes), f"{self.ratio:.3f}")
        return self.kind, expected, format_bytes(self.found_bytes), ratio, looped, format_bytes(self.wire_bytes)


class Verdict(NamedTuple):
    kept: bool
    wire_bytes: float  # bytes that each device sends a step along the batch axes
    theory_wire_bytes: float  # bytes promised
    rows: tuple[Row, ...]  # by kind, promised kinds first
    model_axes: tuple[Row, ...]  # along the model's own axes only: nothing is promised
    statistics: Row | None  # batch norm statistics, if any

    @property
    def ratio(self) -> float:
        return self.wire_bytes / self.theory_wire_bytes if self.theory_wire_bytes else 0.0


def compare(collectives: Sequence[MeshCollective], promised: Theory, stray_bytes: float = 0.0) -> Verdict:
    counted = [placed for placed in collectives if placed.over_batch]
    along_model = [placed for placed in collectives if not placed.over_batch]
    total, bound = sum(each.wire_bytes for each in counted), promised.wire_bytes
    kinds = dict.fromkeys((*promised.payload_bytes, *(each.collective.kind for each in counted)))
    rows = tuple(_row(kind, counted, promised) for kind in kinds)
    # The total covers exact rows, so kinds need no check of their own. But narrower reductions leave a margin.
    checked = {"all-gather"} if promised.gathered is not None else set[str]()
    checked |= promised.packed.keys()
    each_kept = all(row.kept for row in rows if not promised.of_kind(row.kind) or row.kind in checked)
    kept = total <= TOLERANCE * bound and each_kept and stray_bytes <= SLACK * bound
    kinds_along_model = dict.fromkeys(placed.collective.kind for placed in along_model)
    model_axes = tuple(_row(kind, along_model, None) for kind in kinds_along_model)
    return Verdict(kept, total, bound, rows, model_axes, _statistics_row(counted, promised))


def _statistics_row(counted: Iterable[MeshCollective], promised: Theory) -> Row | None:
    """Return the row of batch statistics, sent and expected; any excess counts as other all-reduces."""
    expected, sums = promised.statistics.payload_bytes, [each for each in counted if each.statistics_bytes]
    if not sums:
        return None
    payload = sum(each.statistics_bytes for each in sums)
    looped = sum(each.statistics_bytes for each in sums if each.in_accumulation_loop)
    wire = sum(each.collective.wire_bytes - each.wire_bytes for each in sums)
    return Row("all-reduce", expected, payload, looped, wire, wire * expected / payload, kept=True)


def _row(kind: str, collectives: Iterable[MeshCollective], promised: Theory | None) -> Row:
    """Return one kind's row; without a promise it is always kept."""
    same = [each for each in collectives if each.collective.kind == kind]
    payload, wire = sum(each.payload_bytes for each in same), sum(each.wire_bytes for each in same)
    looped = sum(each.payload_bytes for each in same if each.in_accumulation_loop)
    if promised is None:
        return Row(kind, 0.0, payload, looped, wire, 0.0, kept=True)
    promises, planned = promised.of_kind(kind), promised.unsharded.wire_bytes if kind == "all-reduce" else 0.0
    if not promises:
        return Row(kind, 0.0, payload, looped, wire, 0.0, wire <= SLACK * promised.wire_bytes + planned)
    expected = sum(promise.wire_bytes for promise in promises)
    kept = wire <= TOLERANCE * (expected + planned)
    return Row(kind, promised.payload_bytes[kind], payload, looped, wire, expected, kept)


# The traffic tensor by tensor.

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


# Every device holds a weight that zero3 gathers at the top until the backward pass is done with it. If most weights
# are, the strategy is zero3 by name, but zero2 by memory.

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
