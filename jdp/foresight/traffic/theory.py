"""The communication contract's row of a strategy: payload bytes a step by kind of collective, from a plan's placements.

There are Ψ parameters, c and r bytes an element of the working copy and of the reduced gradient, and K microbatches.
N devices are along `data`, R along `replica` (nothing is sent over replica if R is 1):

    strategy  all-reduce           reduce-scatter  all-gather
    ddp       r·Ψ, over all R·N    –               –
    zero1     r·Ψ/N over replica   r·Ψ             c·Ψ
    zero2     r·Ψ/N over replica   K·r·Ψ           c·Ψ
    zero3     r·Ψ/N over replica   K·r·Ψ           2·K·c·Ψ at most, read from its own trace

A leaf that no dimension divides is replicated and sent as under ddp: r for each element, over all R·N, once a step.
Encoded gradients (`wire`) have rows of their own, with b bytes of codes and scales for an element (int8: 1 + 4/256):

    ddp        b·Ψ all-to-all and b·Ψ all-gather; leaves with fewer elements than devices × 256 as above
    zero1-3    (K·)b·Ψ all-to-all over data; over replica b·Ψ/N all-to-all and b·Ψ/N all-gather

`jdp.muon` also sends, for stacks of S bytes of matrices, padded to a multiple of N (`core/update/muon.py`):

    ddp        all-gather of S
    zero1-3    all-to-all of S/N each way; stacks of replicated leaves as ddp

A table whose rows are exchanged (`core/lookup.py`) is neither gathered nor reduced over data; its row is what the trace
sends in its place: an all-gather of row numbers, and all-to-alls of rows, their gradients, and shards.

Bytes on the wire are those of the ring algorithms (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jdp.base.errors import UserError
from jdp.base.words import Encoding
from jdp.core.gradients.wire import is_encoded, row_bytes
from jdp.core.plan import MIN_SHARD_SIZE, Plan
from jdp.core.reading import Gathered, TracedCollectives
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.placement import Placement, shards
from jdp.core.sharding.strategy import STRATEGIES, strategy
from jdp.core.state import Static
from jdp.core.step_settings import StepSettings
from jdp.core.types import PyTree
from jdp.foresight.program.collectives import ring_bytes
from jdp.foresight.traffic.origin import BatchStatistics

Leaf = tuple[int, Placement]
"""The elements of a parameter on a device, and its placement."""


@dataclass(frozen=True)
class Promise:
    """One cell of the contract's row."""

    kind: str  # of collective
    payload_bytes: float  # a step, over all microbatches
    axes: tuple[str, ...]  # the mesh axes it runs along
    devices: int  # members of a group
    rounds: int  # runs a step: K if it runs for every microbatch, else 1
    itemsize: int  # bytes an element
    parameters: int  # elements it covers: all for gathers, trained ones for reductions

    @property
    def wire_bytes(self) -> float:
        return ring_bytes(self.kind, self.payload_bytes, self.devices)


def encoded_reductions(plan: Plan, settings: StepSettings, leaves: Sequence[Leaf], rounds: int) -> list[Promise]:
    """Return the promises of reducing the trained parameters' encoded gradients `rounds` times a step."""
    sizes, r, wire = dict(plan.mesh.shape), settings.precision.reduce_dtype.itemsize, settings.wire
    assert wire is not None
    n, replicas, everyone = sizes[DATA], sizes.get(REPLICA, 1), plan.batch_shards
    least = plan.min_shard_size if plan.row.shard_state else 0  # smaller parameters are in `Unsharded`
    whole = [count for count, leaf in leaves if leaf.dim is None and count >= least]
    sharded = [count for count, leaf in leaves if leaf.dim is not None]
    sums = (
        (sharded, Promise("reduce-scatter", 0, (DATA,), n, rounds, r, 0)),
        ([count // n for count in sharded], Promise("all-reduce", 0, (REPLICA,), replicas, 1, r, 0)),
        (whole, Promise("all-reduce", 0, plan.batch_axes, everyone, 1, r, 0)),
    )
    return [promise for counts, plain in sums for promise in _encoded(wire, counts, plain)]


def _encoded(wire: Encoding, counts: Sequence[int], sums: Promise) -> Iterator[Promise]:
    """Yield the promises of leaves with these elements: their codes in place of `sums`, and `sums` for the others."""
    devices, rounds = sums.devices, sums.rounds
    codes = [count for count in counts if is_encoded(count, devices)]
    plain = sum(counts) - sum(codes)
    kinds = ("all-to-all", "all-gather") if sums.kind == "all-reduce" else ("all-to-all",)
    for kind in kinds if codes and devices > 1 else ():
        payload = rounds * devices * sum(row_bytes(wire, -(-count // devices)) for count in codes)
        yield replace(sums, kind=kind, payload_bytes=payload, itemsize=1, parameters=sum(codes))
    if plain and devices > 1:
        yield replace(sums, payload_bytes=rounds * sums.itemsize * plain, parameters=plain)


@dataclass(frozen=True)
class Unsharded:
    """Trained parameters that the plan leaves unsharded under a ZeRO strategy, so their gradients are all-reduced.

    They have fewer than `Plan.min_shard_size` elements, or than its default: larger values do not keep a contract.
    """

    paths: tuple[str, ...] = ()  # of the parameters
    fewer_than: int = 0  # bound on the elements of each
    payload_bytes: int = 0  # a step: r for each element, in every microbatch under zero2 and zero3
    devices: int = 1  # all devices that share the batch

    @property
    def wire_bytes(self) -> float:
        return ring_bytes("all-reduce", self.payload_bytes, self.devices)


@dataclass(frozen=True)
class Theory:
    """A row of the contract, in bytes."""

    parameters: int  # Ψ, also frozen, in each shard of the model's axes
    promises: tuple[Promise, ...]  # the kinds of collective that the row names
    statistics: BatchStatistics = field(default_factory=BatchStatistics)  # batch norm statistics and array metrics
    unsharded: Unsharded = field(default_factory=Unsharded)  # their gradients are all-reduced by plan
    gathered: tuple[Gathered, ...] | None = None  # under zero3, by the step's trace; None: unknown
    most_gathered_bytes: float = 0.0  # upper bound, 2·K·c·Ψ; for other strategies the row's gathers
    # kind -> payload a step of collectives that carry codes or parts of matrices, without a parameter's shape
    packed: dict[str, float] = field(default_factory=dict[str, float])
    looked_up: frozenset[str] = frozenset()  # paths of tables whose rows are exchanged: neither gathered nor reduced

    @property
    def payload_bytes(self) -> dict[str, float]:
        kinds = dict.fromkeys(promise.kind for promise in self.promises)
        return {kind: sum(promise.payload_bytes for promise in self.of_kind(kind)) for kind in kinds}

    def of_kind(self, kind: str) -> list[Promise]:
        return [promise for promise in self.promises if promise.kind == kind]

    @property
    def wire_bytes(self) -> float:
        return sum(promise.wire_bytes for promise in self.promises)


def theory(
    plan: Plan,
    params: PyTree,
    settings: StepSettings,
    *,
    static: Static | None = None,
    sends: TracedCollectives | None = None,
    metrics: tuple[tuple[int, ...], ...] = (),
    exchanged: Mapping[tuple[str, int], int] | None = None,
) -> Theory:
    """Return the row of the contract that a training step promises.

    `sends` are the collectives of its trace, and `exchanged` is an update's traffic by `jdp.muon`.
    """
    sizes, r = dict(plan.mesh.shape), settings.precision.reduce_dtype.itemsize
    placements: list[Placement] = jax.tree.leaves(plan.param_placements(params, static))
    leaves = [(math.prod(leaf.shape) // shards(leaf.compute, sizes), leaf) for leaf in placements]
    trained = [(count, leaf) for count, leaf in leaves if leaf.trained]
    rounds = settings.accumulate if plan.row.reduce_each_microbatch else 1
    gathered = sends.gathered if sends is not None and plan.row.gather == "use" else None
    looked_up = frozenset[str]() if sends is None else sends.looked_up - {each.path for each in sends.gathered}
    gathers, most = _gathers(plan, settings, [each for each in leaves if each[1].path not in looked_up], gathered)
    first, *others = _reductions(plan, rounds, r, trained, looked_up)
    promises, packed = (first, *gathers, *others), defaultdict[str, float](float)
    unsharded = _unsharded(plan, trained, rounds * r)
    if settings.wire is not None and plan.batch_shards > 1:
        reductions = encoded_reductions(plan, settings, trained, rounds)
        promises = (*reductions, *gathers)
        for each in reductions:
            if each.itemsize == 1:
                packed[each.kind] += each.payload_bytes
    rows = {} if sends is None else {(kind, plan.mesh.shape[DATA]): size for kind, size in sends.exchanged.items()}
    for (kind, devices), payload in (*(exchanged or {}).items(), *rows.items()):
        promises = (*promises, Promise(kind, payload, (DATA,), devices, 1, 4, first.parameters))
        packed[kind] += payload
    adapter = None if static is None else static.adapter
    statistics = BatchStatistics(() if adapter is None else adapter.batch_statistics, settings.accumulate, metrics)
    promises = tuple(promise for promise in promises if promise.devices > 1)
    return Theory(
        sum(count for count, _ in leaves), promises, statistics, unsharded, gathered, most, dict(packed), looked_up
    )


def _reductions(
    plan: Plan, rounds: int, r: int, trained: Sequence[Leaf], looked_up: Collection[str]
) -> Sequence[Promise]:
    whole = sum(count for count, leaf in trained if leaf.is_indivisible or not plan.row.shard_state)
    by_all = Promise("all-reduce", r * whole, plan.batch_axes, plan.batch_shards, 1, r, whole)
    if not plan.row.shard_state:
        return [by_all]
    n, replicas = plan.mesh.shape[DATA], plan.mesh.shape.get(REPLICA, 1)
    rest = sum(count for count, _ in trained) - whole
    sums = rest - sum(count for count, leaf in trained if leaf.path in looked_up)
    return [
        Promise("reduce-scatter", rounds * r * sums, (DATA,), n, rounds, r, sums),
        Promise("all-reduce", r * rest / n, (REPLICA,), replicas, 1, r, rest),
        *([by_all] if whole else []),
    ]


def _gathers(
    plan: Plan, settings: StepSettings, leaves: Sequence[Leaf], gathered: Sequence[Gathered] | None
) -> tuple[list[Promise], float]:
    """Return (the promise of gathering weights, if the row has one; its upper bound in bytes)."""
    leaves = [(count, leaf) for count, leaf in leaves if not leaf.is_indivisible]
    n, c = plan.mesh.shape[DATA], settings.precision.compute_dtype.itemsize
    times = {"never": 0, "step": 1, "use": 2 * settings.accumulate}[plan.row.gather]
    rounds = settings.accumulate if plan.row.gather == "use" else 1
    working: list[tuple[int, Placement]] = []
    for count, leaf in leaves:
        dtype = jnp.dtype(leaf.dtype)
        is_cast = leaf.trained and jnp.issubdtype(dtype, jnp.floating)  # a frozen one is sent in its dtype at rest
        working.append((times * count * (c if is_cast else min(c, dtype.itemsize)), leaf))
    most = exact = sum(size for size, _ in working)
    if gathered is not None:
        small = sum(size for size, leaf in working if leaf.dim is None)
        exact = min(most, small + sum(each.payload_bytes for each in gathered))
    psi = sum(count for count, _ in leaves)
    promise = Promise("all-gather", exact, (DATA,), n, rounds, c, psi)
    return [promise] if plan.row.shard_state else [], most


def _unsharded(plan: Plan, trained: Sequence[Leaf], bytes_each: int) -> Unsharded:
    """Return the parameters left unsharded by the plan; a step reduces `bytes_each` of an element."""
    limit = min(plan.min_shard_size, MIN_SHARD_SIZE)
    if not plan.row.shard_state or plan.mesh.shape[DATA] == 1:
        return Unsharded()
    whole = ((count, each) for count, each in trained if each.dim is None and not each.is_indivisible)
    small = [(each.path, count) for count, each in whole if math.prod(each.shape) < limit]
    payload = bytes_each * sum(count for _, count in small)
    return Unsharded(tuple(path for path, _ in small), limit, payload, plan.batch_shards)


# ZeRO's memory in closed form. Section 3 and Figure 1 of Rajbhandari et al. 2019 (arXiv:1910.02054) count Ψ parameters
# in mixed precision with Adam: 2Ψ bytes for 16-bit weights, 2Ψ for 16-bit gradients, 12Ψ for the optimizer (fp32
# weights, momentum, variance). N devices share the optimizer's part (stage 1), also the gradients (2), and also the
# weights (3). jdp stores it differently (`jdp_bytes`): the fp32 master weights are the parameters, sharded at rest in
# every stage. The 16-bit weights are a working copy within a step, and gradients are summed in fp32 by default.


@dataclass(frozen=True)
class ZeroRow:
    """Bytes on a device, rounded up."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class JdpRow:
    """Bytes on a device under jdp, rounded up."""

    master: int  # at rest: fp32 master weights
    moments: int  # at rest: Adam's two moments in fp32
    gradients: int  # within a step: in the dtype of their sums
    working: int  # within a step: the working copy; 0 under zero3, which gathers layer by layer

    @property
    def at_rest(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.at_rest + self.gradients + self.working


def zero_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, optimizer: int = 12
) -> ZeroRow:
    stage = list(STRATEGIES).index(strategy(name).name)
    sizes = ((params, 3), (grads, 2), (optimizer, 1))  # bytes a parameter, and the first stage that shares them
    return ZeroRow(*(_share(size, parameters, devices, stage >= first) for size, first in sizes))


def jdp_bytes(parameters: int, devices: int, name: str) -> JdpRow:
    """Return the bytes of model state on each device under jdp, with Adam and more than one microbatch."""
    row = strategy(name)
    return JdpRow(
        _share(4, parameters, devices, row.shard_state),
        _share(8, parameters, devices, row.shard_state),
        _share(4, parameters, devices, row.reduce_each_microbatch),
        0 if row.gather == "use" else _share(2, parameters, devices, False),
    )


def sent_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, accumulate: int = 1
) -> int:
    """Return the bytes that each device sends a step by the ring algorithms, rounded up (section 7 of the paper)."""
    row = strategy(name)
    reductions = 2 if not row.shard_state else accumulate if row.reduce_each_microbatch else 1
    gathers = {"never": 0, "step": 1, "use": 2 * accumulate}[row.gather]
    return _share((devices - 1) * (reductions * grads + gathers * params), parameters, devices, True)


def _share(size: int, parameters: int, devices: int, shared: bool) -> int:
    if parameters < 1 or devices < 1:
        raise UserError(
            f"ZeRO's formula needs at least one parameter and one device; given {parameters} on {devices}. Give "
            "1 or more."
        )
    return -(-size * parameters // (devices if shared else 1))
