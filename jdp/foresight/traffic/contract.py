"""The communication contract: what a strategy promises to send, and whether a compiled step keeps it.

1. Theory: payload bytes a step by kind of collective, from the plan's placements (design, "Communication contract").
   zero3 promises at most 2·K·c·Ψ of gathers; which of them a step makes, its own trace tells (`gradients.gathers`).
2. What was found: each collective of the program, with the mesh axes it runs along, in or out of the loop over the
   microbatches. What runs along the model's own axes only is that model's business and is counted apart; so are the
   statistics of batch norms (`batch_statistics`), up to what they take.
3. The verdict: kept when a device sends at most 1.02 times the theory's bytes along the batch axes, and every kind of
   collective that the row does not name at most 1% of them, and so what belongs to no parameter (`breach.strays`);
   zero3's gathers by themselves at most 1.02 times those of the trace. Parameters too small to shard are all-reduced
   whole by plan (`Whole`): an all-reduce may carry them besides, within the same total.

Bytes on the wire are those of the ring algorithms (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdp.core.gradients.gathers import Gathered
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import DATA, REPLICA, batch_axes
from jdp.core.sharding.placement import Placement, shards
from jdp.core.sharding.plan import MIN_SHARD_SIZE, Plan
from jdp.core.state import Static
from jdp.core.types import PyTree
from jdp.foresight.program.collectives import Collective
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.traffic.batch_statistics import BatchStatistics
from jdp.foresight.traffic.origin import Sites

TOLERANCE = 1.02
"""Wire bytes over theory that still keep the contract."""
SLACK = 0.01
"""Share of theory that any other kind of collective may carry, beside `Whole`: scalars, leaves that do not divide."""


def ring_bytes(kind: str, payload: float, devices: int) -> float:
    """Bytes that each of `devices` sends: 2(N-1)/N of the payload for an all-reduce, (N-1)/N for the other kinds."""
    return (2 if kind == "all-reduce" else 1) * payload * (devices - 1) / devices


@dataclass(frozen=True)
class Promise:
    """One cell of the contract's row.

    Attributes:
        kind: of collective.
        payload_bytes: a step, over all microbatches.
        axes: the mesh axes it runs along.
        devices: how many take part in one.
        parameters: how many it covers: of what is gathered all, of what is reduced those that are trained.
        rounds: how often a step it runs: K where it runs for every microbatch, else 1.
        itemsize: bytes an element.
    """

    kind: str
    payload_bytes: float
    axes: tuple[str, ...]
    devices: int
    rounds: int
    itemsize: int
    parameters: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step."""
        return ring_bytes(self.kind, self.payload_bytes, self.devices)


@dataclass(frozen=True)
class Whole:
    """Trained parameters that a ZeRO strategy leaves whole by plan, so that their gradients are all-reduced.

    Those of fewer than `Plan.min_shard_size` elements; where that was raised, of fewer than its default all the same: a
    plan that hardly shards does not keep a ZeRO contract. What is larger and does not divide is no plan but a breach.

    Attributes:
        paths: of the parameters.
        fewer_than: elements that each has less than.
        payload_bytes: a step: r for each element, in every microbatch under zero2 and zero3.
        devices: that sum them: all that share the batch.
    """

    paths: tuple[str, ...] = ()
    fewer_than: int = 0
    payload_bytes: int = 0
    devices: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step."""
        return ring_bytes("all-reduce", self.payload_bytes, self.devices)


@dataclass(frozen=True)
class Theory:
    """A row of the contract, in bytes.

    Attributes:
        parameters: Ψ, frozen ones among them; with axes of the model's own, the part that each of their shards
            computes with.
        promises: the kinds of collective that the row names.
        statistics: what batch norms send besides, as their part of the model asks; counted apart.
        whole: what of Ψ is all-reduced by plan, where the row does not; no promise of its own.
        gathered: under zero3, what the step's own trace gathers; None: not known, and the row is its upper bound.
        most_gathered_bytes: that upper bound, 2·K·c·Ψ; what the row of another strategy has.
    """

    parameters: int
    promises: tuple[Promise, ...]
    statistics: BatchStatistics = field(default_factory=BatchStatistics)
    whole: Whole = field(default_factory=Whole)
    gathered: tuple[Gathered, ...] | None = None
    most_gathered_bytes: float = 0.0

    @property
    def payload_bytes(self) -> dict[str, float]:
        """kind -> payload a step."""
        return {promise.kind: promise.payload_bytes for promise in self.promises}

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step."""
        return sum(promise.wire_bytes for promise in self.promises)

    def promise(self, kind: str) -> Promise | None:
        return next((promise for promise in self.promises if promise.kind == kind), None)

    def allowed(self, kind: str) -> float:
        """Bytes that each device may send a step by one kind of collective, whatever the others send."""
        promise, planned = self.promise(kind), self.whole.wire_bytes if kind == "all-reduce" else 0.0
        return SLACK * self.wire_bytes + planned if promise is None else TOLERANCE * (promise.wire_bytes + planned)


def theory(
    plan: Plan,
    params: PyTree,
    *,
    accumulate: int,
    precision: Precision,
    static: Static | None = None,
    sync_batch_norm: bool = True,
    gathered: tuple[Gathered, ...] | None = None,
) -> Theory:
    """What a training step promises to send.

    With Ψ parameters, c and r bytes an element of the working copy and of the reduced gradient, K microbatches:
    ddp all-reduces r·Ψ; zero1 reduce-scatters r·Ψ and gathers c·Ψ; zero2 K·r·Ψ and c·Ψ; zero3 K·r·Ψ and at most
    2·K·c·Ψ. With R > 1 replicas the gradient's shards, r·Ψ/N, are also all-reduced over `replica`; under ddp the whole
    gradients are all-reduced once, over all R·N devices. Frozen parameters have no gradients: where there are some, the
    reductions' Ψ is that of the trained ones, and c of a frozen one its own element's size where that is less.

    Args:
        plan: mesh and strategy.
        params: the parameters, real or abstract.
        accumulate: K.
        precision: c is the size of its `compute` dtype, r of its `reduce`.
        static: the state's: what is trained, what the model's metadata asks, which batch norms there are.
        sync_batch_norm: batch norms normalise by the whole batch.
        gathered: of `Step.sends`: zero3's gathers are those then, and of what is too small to shard as if it were.
    """
    sizes = dict(plan.mesh.shape)
    places: list[Placement] = jax.tree.leaves(plan.param_placements(params, static))
    counts = [math.prod(place.shape) // shards(place.compute, sizes) for place in places]
    psi = sum(counts)
    trained = sum(count for count, place in zip(counts, places, strict=True) if place.trained)
    c, r = precision.compute_dtype.itemsize, precision.reduce_dtype.itemsize
    working = [count * _working_itemsize(place, c) for count, place in zip(counts, places, strict=True)]
    n, replicas = sizes[DATA], sizes.get(REPLICA, 1)
    rounds = accumulate if plan.row.reduce_each_microbatch else 1
    gathers = {"never": 0, "step": 1, "use": 2 * accumulate}[plan.row.gather]
    looped = accumulate if plan.row.gather == "use" else 1
    most = exact = gathers * sum(working)
    if plan.row.gather != "use":
        gathered = None
    elif gathered is not None:
        whole = gathers * sum(size for size, place in zip(working, places, strict=True) if place.dim is None)
        exact = min(most, whole + sum(each.payload_bytes for each in gathered))
    if plan.row.shard_state:
        promises = (
            Promise("reduce-scatter", rounds * r * trained, (DATA,), n, rounds, r, trained),
            Promise("all-gather", exact, (DATA,), n, looped, c, psi),
            Promise("all-reduce", r * trained / n, (REPLICA,), replicas, 1, r, trained),
        )
    else:
        promises = (Promise("all-reduce", r * trained, plan.batch_axes, plan.batch_shards, 1, r, trained),)
    adapter = static.adapter if static is not None and sync_batch_norm else None
    statistics = BatchStatistics(() if adapter is None else adapter.batch_statistics, accumulate)
    whole = _whole(plan, places, counts, rounds * r)
    promises = tuple(promise for promise in promises if promise.devices > 1)
    return Theory(psi, promises, statistics, whole, gathered, most)


def _whole(plan: Plan, places: Sequence[Placement], counts: Sequence[int], bytes_each: int) -> Whole:
    """`counts` are the elements that a device computes with, `bytes_each` what is reduced of each in a step."""
    limit = min(plan.min_shard_size, MIN_SHARD_SIZE)
    if not plan.row.shard_state or plan.mesh.shape[DATA] == 1:
        return Whole()
    small = [
        (place.path, count)
        for place, count in zip(places, counts, strict=True)
        if place.trained and place.dim is None and math.prod(place.shape) < limit
    ]
    payload = bytes_each * sum(count for _, count in small)
    return Whole(tuple(path for path, _ in small), limit, payload, plan.batch_shards)


def _working_itemsize(place: Placement, itemsize: int) -> int:
    """Bytes an element that a parameter is gathered in: frozen ones go as they rest where that is less."""
    own = jnp.dtype(place.dtype)
    return itemsize if place.trained and jnp.issubdtype(own, jnp.floating) else min(itemsize, own.itemsize)


# What was found.


@dataclass(frozen=True)
class Sent:
    """A collective of the program, placed.

    Attributes:
        collective: as read.
        axes: the mesh axes that its groups vary along; empty when nothing leaves a device.
        in_accumulation_loop: it runs for every microbatch.
        over_batch: it varies along `replica` or `data`, so the contract counts it.
        statistics_bytes: the part of its payload, a step, that is batch statistics; the contract leaves that out.
    """

    collective: Collective
    axes: tuple[str, ...]
    in_accumulation_loop: bool
    over_batch: bool
    statistics_bytes: int = 0

    @property
    def payload_bytes(self) -> int:
        """A step, without batch statistics."""
        return self.collective.payload_bytes * self.collective.count - self.statistics_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step, without batch statistics."""
        whole = self.payload_bytes + self.statistics_bytes
        return self.collective.wire_bytes * (self.payload_bytes / whole if whole else 1)

    def to_json(self) -> dict[str, Any]:
        c = self.collective
        return {
            "kind": c.kind,
            "dtype": c.dtype,
            "payload_bytes": c.payload_bytes,
            "count": c.count,
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


def sent(compiled: Compiled, mesh: Mesh, accumulate: int, statistics: BatchStatistics | None = None) -> list[Sent]:
    """Every collective that sends something, in schedule order; `statistics` as `theory` has them."""
    sites, along = Sites(compiled.program, accumulate), set(batch_axes(mesh))
    found, left = list[Sent](), statistics.payload_bytes if statistics is not None else 0
    for c in compiled.collectives:
        if c.group_size > 1:
            axes = axes_along(c.groups, mesh)
            over_batch, apart = bool(along & set(axes)), 0
            if statistics is not None and left and over_batch and c.kind == "all-reduce":
                apart = min(statistics.among(sites.pieces(c)) * c.count, left)
                left -= apart
            found.append(Sent(c, axes, sites.in_accumulation_loop(c), over_batch, apart))
    return found


def axes_along(groups: Sequence[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in mesh order.

    `groups` hold positions in the mesh's device order; a permute's are its (source, target) pairs.
    """
    return _axes_along(tuple(groups), tuple(mesh.devices.shape), tuple(mesh.axis_names))


@lru_cache(maxsize=256)
def _axes_along(groups: tuple[tuple[int, ...], ...], shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    varies = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), shape))
        varies |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(names, varies, strict=True) if differs)


# The verdict.


@dataclass(frozen=True)
class Row:
    """One kind of collective along the batch axes: what was promised and what was found.

    Attributes:
        kind: of collective.
        expected_bytes, found_bytes: payload a step.
        in_loop_bytes: the part of `found_bytes` that is sent in the loop over the microbatches.
        wire_bytes, theory_wire_bytes: what each device sends a step, found and promised.
        kept: whether this kind alone stays in bounds (`Theory.allowed`): promised kinds within the tolerance, others
            within the slack, an all-reduce with what is reduced whole by plan.
    """

    kind: str
    expected_bytes: float
    found_bytes: int
    in_loop_bytes: int
    wire_bytes: float
    theory_wire_bytes: float
    kept: bool

    @property
    def ratio(self) -> float | None:
        """Found over expected payload; None where none is expected."""
        return self.found_bytes / self.expected_bytes if self.expected_bytes else None

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**own, "ratio": self.ratio}


@dataclass(frozen=True)
class Verdict:
    """Whether a program keeps the contract.

    Attributes:
        kept: it does.
        wire_bytes, theory_wire_bytes: what each device sends a step along the batch axes, found and promised.
        rows: one a kind; the promised ones first.
        own: one a kind of what runs along the model's own axes only; nothing is promised about it.
        statistics: of the batch norms' statistics; None where there are none.
    """

    kept: bool
    wire_bytes: float
    theory_wire_bytes: float
    rows: tuple[Row, ...]
    own: tuple[Row, ...] = field(default=())
    statistics: Row | None = None

    @property
    def ratio(self) -> float:
        """Found over promised wire bytes; 0 where nothing is promised, because there is no other device."""
        return self.wire_bytes / self.theory_wire_bytes if self.theory_wire_bytes else 0.0


def judge(found: Iterable[Sent], promised: Theory, stray_bytes: float = 0.0) -> Verdict:
    """Hold what was found against what was promised; `stray_bytes` of it, on the wire, belong to no parameter."""
    found = list(found)
    counted, apart = [s for s in found if s.over_batch], [s for s in found if not s.over_batch]
    total, bound = sum(s.wire_bytes for s in counted), promised.wire_bytes
    kinds = dict.fromkeys((*promised.payload_bytes, *(s.collective.kind for s in counted)))
    rows = tuple(_row(kind, counted, promised) for kind in kinds)
    # Exact rows need no look at each kind: the total holds them. But reductions in a narrower dtype leave room in it.
    held = {"all-gather"} if promised.gathered is not None else set[str]()
    each = all(row.kept for row in rows if promised.promise(row.kind) is None or row.kind in held)
    kept = total <= TOLERANCE * bound and each and stray_bytes <= SLACK * bound
    own = tuple(_row(kind, apart, None) for kind in dict.fromkeys(s.collective.kind for s in apart))
    return Verdict(kept, total, bound, rows, own, _statistics(counted, promised))


def _statistics(found: list[Sent], promised: Theory) -> Row | None:
    """What batch norms send, against what they take; never more, as what is beyond counts as any other all-reduce."""
    expected, sums = promised.statistics.payload_bytes, [s for s in found if s.statistics_bytes]
    if not sums:
        return None
    payload = sum(s.statistics_bytes for s in sums)
    looped = sum(s.statistics_bytes for s in sums if s.in_accumulation_loop)
    wire = sum(s.collective.wire_bytes - s.wire_bytes for s in sums)
    return Row("all-reduce", expected, payload, looped, wire, wire * expected / payload, kept=True)


def _row(kind: str, found: Iterable[Sent], promised: Theory | None) -> Row:
    same = [s for s in found if s.collective.kind == kind]
    payload = [s.payload_bytes for s in same]
    looped = sum(size for s, size in zip(same, payload, strict=True) if s.in_accumulation_loop)
    wire = sum(s.wire_bytes for s in same)
    promise = promised.promise(kind) if promised is not None else None
    expected, theirs = (0.0, 0.0) if promise is None else (promise.payload_bytes, promise.wire_bytes)
    kept = promised is None or wire <= promised.allowed(kind)
    return Row(kind, expected, sum(payload), looped, wire, theirs, kept)
