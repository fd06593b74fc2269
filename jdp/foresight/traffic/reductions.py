"""A cell of the contract's row (`Promise`), and the cells of gradients that are encoded (`core/gradients/wire.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jdp.base.words import Encoding
from jdp.core.gradients.wire import encodes, row_bytes
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.placement import Placement
from jdp.core.step_settings import StepSettings


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

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step."""
        return ring_bytes(self.kind, self.payload_bytes, self.devices)


def encoded_reductions(
    plan: Plan, settings: StepSettings, leaves: Sequence[tuple[int, Placement]], rounds: int
) -> list[Promise]:
    """Return what reducing encoded gradients promises to send: rows of the contract of their own.

    `leaves` are (elements of a device, placement) of each trained parameter; a gradient that is reduced for every
    microbatch is so `rounds` times a step.
    """
    sizes, r, wire = dict(plan.mesh.shape), settings.precision.reduce_dtype.itemsize, settings.wire
    assert wire is not None
    n, replicas, everyone = sizes[DATA], sizes.get(REPLICA, 1), plan.batch_shards
    whole = [count for count, leaf in leaves if leaf.dim is None]
    if plan.row.shard_state:  # parameters too small to shard, as if they were sharded (`Unsharded`)
        whole = [count for count in whole if count >= plan.min_shard_size]
    sharded = [count for count, leaf in leaves if leaf.dim is not None]
    return [
        *_scattered(wire, sharded, n, rounds, r),
        *_summed(wire, [count // n for count in sharded], (REPLICA,), replicas, r),
        *_summed(wire, whole, plan.batch_axes, everyone, r),
    ]


def _scattered(wire: Encoding, counts: Sequence[int], devices: int, rounds: int, r: int) -> Iterator[Promise]:
    codes, plain = _by_encoding(wire, counts, devices)
    if codes and devices > 1:
        payload = rounds * devices * sum(row_bytes(wire, count // devices) for count in codes)
        yield Promise("all-to-all", payload, (DATA,), devices, rounds, 1, sum(codes))
    if plain and devices > 1:
        yield Promise("reduce-scatter", rounds * r * sum(plain), (DATA,), devices, rounds, r, sum(plain))


def _summed(wire: Encoding, counts: Sequence[int], axes: tuple[str, ...], devices: int, r: int) -> Iterator[Promise]:
    codes, plain = _by_encoding(wire, counts, devices)
    if devices == 1:
        return
    for kind in ("all-to-all", "all-gather") if codes else ():
        payload = devices * sum(row_bytes(wire, -(-count // devices)) for count in codes)
        yield Promise(kind, payload, axes, devices, 1, 1, sum(codes))
    if plain:
        yield Promise("all-reduce", r * sum(plain), axes, devices, 1, r, sum(plain))


def _by_encoding(wire: Encoding, counts: Sequence[int], devices: int) -> tuple[list[int], list[int]]:
    encoded = [c for c in counts if encodes(wire, c, devices)]
    return encoded, [c for c in counts if not encodes(wire, c, devices)]
