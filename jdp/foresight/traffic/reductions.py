"""What reducing gradients in buckets, or encoded, promises to send: rows of the contract of their own.

The formulas are written once more here, from the settings alone: `core/wire/buckets.py` has the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.placement import Placement, shards
from jdp.core.step_settings import StepSettings

_LATENCY_BYTES = 4e6  # "auto": buckets of √(M · 4 MB)


def ring_bytes(kind: str, payload: float, devices: int) -> float:
    """Return the bytes that each of `devices` sends: 2(N-1)/N of the payload for an all-reduce, else (N-1)/N."""
    return (2 if kind == "all-reduce" else 1) * payload * (devices - 1) / devices


@dataclass(frozen=True)
class Promise:
    """One cell of the contract's row."""

    kind: str  # of collective
    payload_bytes: float  # a step, over all microbatches
    axes: tuple[str, ...]  # the mesh axes it runs along
    devices: int  # how many take part in one
    rounds: int  # how often a step it runs: K where it runs for every microbatch, else 1
    itemsize: int  # bytes an element
    parameters: int  # elements it covers: of what is gathered all, of what is reduced those that are trained
    most: int | None = None  # how many collectives may carry it in a step; None: any number

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step."""
        return ring_bytes(self.kind, self.payload_bytes, self.devices)


@dataclass(frozen=True)
class Reductions:
    """The gradients of a step, and how they are sent."""

    plan: Plan  # of the step, as the settings are
    settings: StepSettings
    leaves: Sequence[tuple[int, Placement]]  # (elements of a device, placement) of each trained parameter

    def promises(self, rounds: int) -> list[Promise]:
        """Return the promises; what is reduced for every microbatch is so `rounds` times a step."""
        plan, sizes = self.plan, dict(self.plan.mesh.shape)
        n, replicas, everyone = sizes[DATA], sizes.get(REPLICA, 1), self.plan.batch_shards
        low_rank = [leaf for leaf in self.leaves if self._factors(leaf)]
        others = [leaf for leaf in self.leaves if not self._factors(leaf)]
        whole = [count for count, leaf in others if leaf.dim is None]
        if plan.row.shard_state:  # parameters too small to shard, as if they were sharded (`Unsharded`)
            limit = plan.min_shard_size
            whole = [count for count in whole if count >= limit]
        sharded = [count for count, leaf in others if leaf.dim is not None]
        axes, factors, most = plan.batch_axes, sum(map(self._factors, low_rank)), 2 * rounds * len(low_rank)
        powersgd = Promise("all-reduce", 4 * rounds * factors, axes, everyone, rounds, 4, factors, most)
        return [
            *([powersgd] if factors else []),
            *self._scattered(sharded, n, rounds),
            *self._summed([count // n for count in sharded], (REPLICA,), replicas),
            *self._summed(whole, axes, everyone),
        ]

    def _scattered(self, counts: Sequence[int], devices: int, rounds: int) -> Iterator[Promise]:
        r = self.settings.precision.reduce_dtype.itemsize
        codes, plain = self._by_encoding(counts, devices)
        if codes and devices > 1:
            payload = devices * sum(self.settings.wire.row_bytes(count // devices) for count in codes)
            most = self._collectives(codes, rounds)
            yield Promise("all-to-all", rounds * payload, (DATA,), devices, rounds, 1, sum(codes), most)
        if plain and devices > 1:
            most = self._collectives(plain, rounds)
            yield Promise("reduce-scatter", rounds * r * sum(plain), (DATA,), devices, rounds, r, sum(plain), most)

    def _summed(self, counts: Sequence[int], axes: tuple[str, ...], devices: int) -> Iterator[Promise]:
        r = self.settings.precision.reduce_dtype.itemsize
        codes, plain = self._by_encoding(counts, devices)
        if devices == 1:
            return
        for kind in ("all-to-all", "all-gather") if codes else ():
            payload = devices * sum(self.settings.wire.row_bytes(-(-count // devices)) for count in codes)
            yield Promise(kind, payload, axes, devices, 1, 1, sum(codes), self._collectives(codes))
        if plain:
            yield Promise("all-reduce", r * sum(plain), axes, devices, 1, r, sum(plain), self._collectives(plain))

    def _by_encoding(self, counts: Sequence[int], devices: int) -> tuple[list[int], list[int]]:
        encodes: Callable[[int], bool] = lambda count: self.settings.wire.encodes(count, devices)  # noqa: E731
        return [c for c in counts if encodes(c)], [c for c in counts if not encodes(c)]

    def _collectives(self, counts: Sequence[int], rounds: int = 1) -> int | None:
        """Return how many collectives carry these leaves at most; None where each has its own, once a layer (zero3).

        Buckets are filled in order, so that any two neighbours have more bytes than one may.
        """
        if self.plan.row.gather == "use":
            return None
        r = self.settings.precision.reduce_dtype.itemsize
        every = [r * count for count, _ in self.leaves]
        auto = math.sqrt(sum(every) * _LATENCY_BYTES)
        size = self.settings.buckets if isinstance(self.settings.buckets, int) else auto
        return rounds * min(len(counts), int(2 * r * sum(counts) / size) + 1)

    def _factors(self, leaf: tuple[int, Placement]) -> int:
        """Return the elements of the two factors that PowerSGD sends of a leaf; 0 where it sends the leaf itself."""
        shape, model_shards = leaf[1].own_shape, shards(leaf[1].compute, dict(self.plan.mesh.shape))
        if self.settings.wire.gradients != "powersgd" or len(shape) < 2 or model_shards > 1:
            return 0
        count, *rest = (1, *shape) if len(shape) == 2 else shape
        sides = [(math.prod(rest[:i]), math.prod(rest[i:])) for i in range(1, len(rest))]
        rows, columns = min(sides, key=sum)
        factors = self.settings.wire.rank * (rows + columns)
        return count * factors if factors < rows * columns else 0
