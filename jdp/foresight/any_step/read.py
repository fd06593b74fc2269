"""Read any compiled step: what it holds by argument, what it sends by source line, and its symptoms.

1. `memory_of`: arguments by path, results, temporaries and code as XLA allocates them.
2. `sent_by`: every tensor of a collective, with the mesh axes, the user's line, and the arguments that have its shape.
   A shape is evidence, not proof.
3. `signs`: those of `traffic/symptoms.py`, activations that are sent, and arguments that should be donated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from jdp.base.formatting import format_bytes, format_percent, listed
from jdp.core.sharding.placement import Placement, axes_of
from jdp.foresight.any_step.relocate import Relocated
from jdp.foresight.any_step.traced import Argument
from jdp.foresight.memory import Headroom, headroom
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.resolve import Target
from jdp.foresight.traffic.contract import TINY, collectives_on
from jdp.foresight.traffic.origin import Parameters, Reading
from jdp.foresight.traffic.symptoms import symptoms

# Memory.


@dataclass(frozen=True)
class HeldArgument:
    """An argument on one device."""

    path: str  # in the call
    bytes: int  # of its shard, as the program takes it
    donated: bool  # its memory may take a result
    in_place: bool  # it does


@dataclass(frozen=True)
class StepMemory:
    """Bytes per device."""

    arguments: tuple[HeldArgument, ...]  # in the order of the call
    results: int  # those that are not written into an argument
    temporaries: int  # what else XLA allocates while the step runs
    code: int  # the program itself
    total: int  # the four together
    headroom: Headroom | None  # whether a device holds it; None where its memory is not known
    host: int = 0  # of arguments, results and temporaries that are in the host's memory; in none of the others


def memory_of(compiled: Compiled, moved: Relocated, target: Target) -> StepMemory:
    """Return what a compiled step holds on a device."""
    program, needed = compiled.program, compiled.total_bytes
    in_place, sizes = {number for _, number, _ in program.written_into}, program.argument_bytes
    return StepMemory(
        tuple(
            HeldArgument(each.path, sizes.get(number, ("", 0))[1], each.donated, number in in_place)
            for number, each in enumerate(moved.traced.arguments)
        ),
        compiled.output_bytes - compiled.alias_bytes,
        compiled.temp_bytes,
        compiled.code_bytes,
        needed,
        None if target.memory_bytes is None else headroom(needed, target.memory_bytes),
        compiled.host_bytes,
    )


# Traffic.


@dataclass(frozen=True)
class Sent:
    """Tensors of one shape that one kind of collective sends from one line."""

    kind: str  # of collective
    dtype: str  # of each tensor
    dims: tuple[int, ...]  # an all-gather's result, a reduce-scatter's shard, else the operand, on one device
    axes: tuple[str, ...]  # of the mesh, along which it is sent
    over_batch: bool  # among them are the batch's
    source: str | None  # "file:line" that the user wrote, else the library's; None: the program has neither
    like: tuple[str, ...]  # paths of the arguments that have the shape, whole or a shard; empty: an activation, say
    count: int  # how many a step, rounds of loops included
    wire_bytes: float  # what each device sends of all of them, a step, by the ring algorithms
    caveats: tuple[str, ...] = ()  # why `count` may differ from what runs

    def __str__(self) -> str:
        times = f" {self.count} times" if self.count > 1 else ""
        what = f"the shape of {listed(self.like)}" if self.like else "no argument has this shape"
        at = f", at {self.source}" if self.source else ""
        tensor = f"{self.kind} of {self.dtype}{list(self.dims)}{times}{at}"
        return f"{tensor} ({what}): {format_bytes(self.wire_bytes)} a device"


def reading_of(compiled: Compiled, moved: Relocated, arguments: Iterable[Argument]) -> Reading:
    """Read a step whose tensors are recognised as `arguments`: at rest, or gathered along the batch's axes."""

    def placement(each: Argument) -> Placement:
        rest = PartitionSpec() if each.sharding is None else each.sharding.spec
        compute = PartitionSpec(*(tuple(a for a in axes_of(e) if a not in moved.batch_axes) or None for e in rest))
        return Placement(each.path, each.shape, str(each.dtype), rest, compute, 0, "given")

    found = Parameters(tuple(placement(each) for each in arguments if each.shape), dict(moved.mesh.shape), True)
    donated = {number: each.path for number, each in enumerate(moved.traced.arguments) if each.donated}
    meant = [*(each.sharding for each in moved.traced.arguments), *moved.traced.out_shardings]
    offloads = any(each is not None and each.memory_kind == "pinned_host" for each in meant)
    return Reading(compiled, moved.mesh, moved.batch_axes, found, donated, offloads)


def sent_by(reading: Reading) -> tuple[Sent, ...]:
    """Return what a compiled step sends, most bytes first."""
    sent = dict[tuple[Any, ...], Sent]()
    for each in collectives_on(reading):
        c, axes = each.collective, each.axes
        for piece in reading.sites.pieces(c):
            like = tuple(placement.path for placement in reading.parameters.like(piece.dims))
            wire = c.wire_bytes * piece.payload_bytes / max(c.payload_bytes, 1)
            key = (c.kind, piece.dtype, piece.dims, axes, each.over_batch, piece.source_line, like)
            before = sent.get((*key, c.caveats), Sent(*key, 0, 0.0, c.caveats))
            after = replace(before, count=before.count + c.count, wire_bytes=before.wire_bytes + wire)
            sent[*key, c.caveats] = after
    return tuple(sorted(sent.values(), key=lambda each: -each.wire_bytes))


# Signs.

_SHARE = 0.01  # of what a device sends, below which a line is not worth a sentence
_LINES = 4  # that get one


def signs(reading: Reading, moved: Relocated, sent: Sequence[Sent]) -> tuple[str, ...]:
    """Return signs of something unintended, a sentence each."""
    placing = "no result has its shape, dtype and sharding. Return it so (out_shardings), or do not donate it."
    own = _not_donated(reading.compiled, moved)
    return (*_activations(sent, reading.batch_axes), *symptoms(reading, placing), *own)


def _activations(sent: Sequence[Sent], batch_axes: Sequence[str]) -> Iterator[str]:
    """Tensors that no argument has the shape of, sent along the batch's axes, by line."""
    total, lines = sum(each.wire_bytes for each in sent), dict[str | None, list[Sent]]()
    for each in sent:
        if each.over_batch and not each.like:
            lines.setdefault(each.source, []).append(each)
    for line, those in sorted(lines.items(), key=lambda pair: -sum(each.wire_bytes for each in pair[1]))[:_LINES]:
        wire = sum(each.wire_bytes for each in those)
        if wire >= _SHARE * total and wire > TINY:
            kinds = ", ".join(f"{each.kind} of {each.dtype}{list(each.dims)}" for each in those[:2])
            yield (
                f"Activations: {format_bytes(wire)} a device, {format_percent(wire / total)} of what it sends, are "
                f"{kinds}{' and others' * (len(those) > 2)}{f' ({line})' if line else ''}: no argument has these "
                f"shapes, so it is activations or a part of the batch that travels along {', '.join(batch_axes)}. Keep "
                "each row on its device: jax.lax.with_sharding_constraint(x, "
                f"PartitionSpec({', '.join(map(repr, batch_axes))})) on what that line computes with."
            )


def _not_donated(compiled: Compiled, moved: Relocated) -> Iterator[str]:
    """Arguments that a result of the same shape replaces, and that nobody donated."""
    if any(each.donated for each in moved.traced.arguments):
        return
    results = Counter((v.aval.shape, v.aval.dtype) for v in moved.traced.closed.jaxpr.outvars)
    sizes = {s.parameter_number: s.result_bytes for s in compiled.program[compiled.program.entry]}
    replaced = list[tuple[str, int]]()
    for number, each in enumerate(moved.traced.arguments):
        if each.number not in moved.batch and results[each.shape, each.dtype] > 0:
            results[each.shape, each.dtype] -= 1
            replaced.append((each.path, sizes.get(number, 0)))
    total = sum(size for _, size in replaced)
    if total >= _SHARE * compiled.total_bytes and total > TINY:
        first = [path for path, _ in sorted(replaced, key=lambda pair: -pair[1])]
        yield (
            f"Donation: no argument is donated, so {listed(first)} ({format_bytes(total)} a device) are held "
            "beside their new values. Give them up: jax.jit(step, donate_argnums=...), and use what the step returns."
        )
