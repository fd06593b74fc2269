"""Whether a compiled step keeps the communication contract: its traffic, compared with `theory.py`.

A step keeps the contract if a device sends at most 1.02 times the theory's bytes along the batch axes. Each kind of
collective that the row does not name may send at most 1% of them, and so may traffic that belongs to no parameter
(`breaches.strays`). zero3's gathers alone may send at most 1.02 times the gathers of the trace. The plan all-reduces
gradients of parameters too small to shard (`theory.Unsharded`), within the same total. Collectives along the model's
own axes only, batch norm statistics and metrics are counted separately (`origin.BatchStatistics`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jdp.base.formatting import format_bytes
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
        """Bytes a step, without batch statistics."""
        return self.collective.payload_bytes * self.collective.count - self.statistics_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step, without batch statistics."""
        total = self.payload_bytes + self.statistics_bytes
        return self.collective.wire_bytes * (self.payload_bytes / total if total else 1)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp verify --json` prints for one collective."""
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
    count: int = 0  # collectives of more than a few bytes in a step

    @property
    def ratio(self) -> float | None:
        return self.found_bytes / self.expected_bytes if self.expected_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp verify --json` prints for one kind."""
        return {**asdict(self), "ratio": self.ratio}

    def cells(self) -> tuple[str, str, str, str, str, str]:
        looped = "no"
        if self.in_loop_bytes:
            looped = "yes" if self.in_loop_bytes == self.found_bytes else f"{format_bytes(self.in_loop_bytes)} of it"
        expected, ratio = ("–", "–") if self.ratio is None else (format_bytes(self.expected_bytes), f"{self.ratio:.3f}")
        return self.kind, expected, format_bytes(self.found_bytes), ratio, looped, format_bytes(self.wire_bytes)


class Verdict(NamedTuple):
    """Whether a program keeps the contract."""

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
    """Return one kind's row; without a promise (None) it is always kept."""
    same = [each for each in collectives if each.collective.kind == kind]
    payload, wire = sum(each.payload_bytes for each in same), sum(each.wire_bytes for each in same)
    looped = sum(each.payload_bytes for each in same if each.in_accumulation_loop)
    if promised is None:
        return Row(kind, 0.0, payload, looped, wire, 0.0, kept=True)
    promises, planned = promised.of_kind(kind), promised.unsharded.wire_bytes if kind == "all-reduce" else 0.0
    count = sum(each.collective.count for each in same if each.collective.payload_bytes > TINY)
    if not promises:
        return Row(kind, 0.0, payload, looped, wire, 0.0, wire <= SLACK * promised.wire_bytes + planned, count)
    expected = sum(promise.wire_bytes for promise in promises)
    kept = wire <= TOLERANCE * (expected + planned)
    return Row(kind, promised.payload_bytes[kind], payload, looped, wire, expected, kept, count)
