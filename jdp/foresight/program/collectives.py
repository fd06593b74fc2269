"""The collectives of a compiled program, each counted as often as it runs.

`collectives(compiled.as_text())` walks the call graph from the entry. A loop multiplies its body by its trip count, a
conditional counts the branch that sends most, an asynchronous pair counts once, at its start. Other transfers (`send`,
`recv`, custom calls) are not counted.
"""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from jdp.base.errors import UserError
from jdp.base.link_times import DIRECT, RINGS
from jdp.foresight.program.module import Instruction, Program, array_bytes, elements, ints, parse, shapes

KINDS = (*RINGS, *DIRECT, "collective-broadcast")
_CALLERS = ("while", "conditional", "call", "fusion", "custom-call", "async")


@dataclass(frozen=True)
class Collective:
    """One collective instruction, at one place in the call graph."""

    kind: str  # one of `KINDS`
    dtype: str  # XLA's element type; the distinct types of combined tensors, joined by "+"
    # the whole logical tensor, once: the operand of an all-reduce or reduce-scatter, the result of an all-gather, one
    # device's operand for the other kinds (for a ragged-all-to-all, the most that it can receive). Combined tensors
    # are summed.
    payload_bytes: int
    # devices that exchange data, as positions in the mesh's device order; (source, target) pairs for a permute
    groups: tuple[tuple[int, ...], ...] = field(repr=False)
    is_async: bool  # other work may run between its start and its done
    name: str  # the instruction's; for an asynchronous pair the start's
    op_name: str | None = None  # jax's path to the operation; None if the text lacks it
    source_lines: tuple[str, ...] = ()  # "file:line" of the operation and of its callers, innermost first
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of each tensor of the result
    loops: tuple[int | None, ...] = ()  # trip counts around it, outermost first; None: unknown
    in_conditional: bool = False  # it is in a branch of a conditional

    @property
    def source(self) -> str | None:
        return self.source_lines[0] if self.source_lines else None

    @property
    def group_size(self) -> int:
        """Devices in a group; 2 for a permute; 1 if nothing leaves a device."""
        return max(len(set(group)) for group in self.groups)

    @property
    def count(self) -> int:
        """Executions a step: the product of `loops`, an unknown trip count taken as 1."""
        return math.prod(1 if trips is None else trips for trips in self.loops)

    @property
    def caveats(self) -> tuple[str, ...]:
        """The reasons why `count` may be inexact, a sentence each."""
        reasons = {
            "inside a loop of unknown trip count: counted once": None in self.loops,
            "inside a conditional: the branch that sends most is counted": self.in_conditional,
        }
        return tuple(words for words, applies in reasons.items() if applies)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends a step, by the ring algorithms (Patarasuk and Yuan 2009; nccl-tests).

        Payload × `count` × 2(N−1)/N for an all-reduce, 1 for permute and broadcast, else (N−1)/N.
        """
        payload, devices = self.payload_bytes * self.count, self.group_size
        if devices > 1 and self.kind in ("collective-permute", "collective-broadcast"):
            return float(payload)
        return ring_bytes(self.kind, payload, devices)


def ring_bytes(kind: str, payload: float, devices: int) -> float:
    """Return the bytes that each of `devices` sends: 2(N-1)/N of the payload for an all-reduce, else (N-1)/N."""
    return (2 if kind == "all-reduce" else 1) * payload * (devices - 1) / devices


def collectives(text: str | Program) -> list[Collective]:
    """Return every collective that a compiled program runs, in schedule order, with the loops around it."""
    program = text if isinstance(text, Program) else parse(text)

    @functools.cache  # computations may be shared
    def of_computation(name: str) -> tuple[Collective, ...]:
        return tuple(c for step in program[name] for c in of_instruction(step))

    def of_instruction(step: Instruction) -> Iterable[Collective]:
        if step.opcode.endswith("-done") or step.kind not in (*KINDS, *_CALLERS):
            return []
        if step.kind in KINDS:
            return [collective_of(step, program)]
        if step.kind == "while":
            trips = step.trip_count
            tests = trips if trips is None else trips + 1  # the condition is evaluated once more than the body
            rounds = {"condition": tests, "body": trips}
            runs = [(rounds[a], c) for a in rounds for name in step.called[a] for c in of_computation(name)]
            return [replace(c, loops=(times, *c.loops)) for times, c in runs]
        branches = list(map(of_computation, step.callees))
        if step.kind == "conditional":
            return [replace(c, in_conditional=True) for c in max(branches, key=total_wire_bytes)]
        inside = [c for each in branches for c in each]
        return [replace(c, name=step.name, is_async=overlaps(step)) for c in inside] if step.is_start else inside

    return list(of_computation(program.entry))


def total_wire_bytes(counted: Iterable[Collective]) -> float:
    return sum((c.wire_bytes for c in counted), 0.0)


def traffic(counted: Iterable[Collective]) -> dict[str, int]:
    """Return payload bytes a step by kind, as in the communication contract. A group of one sends nothing."""
    totals: dict[str, int] = {}
    for c in counted:
        if c.group_size > 1:
            totals[c.kind] = totals.get(c.kind, 0) + c.payload_bytes * c.count
    return totals


def collective_of(step: Instruction, program: Program) -> Collective:
    """Return an instruction of one of `KINDS` as a `Collective`, without the loops around it."""
    match = _GROUPS.search(step.bare)
    if match is None:
        raise UserError(f"no device groups in a known notation: {step.bare.strip()[:300]}")
    # in a permute `{}` means that no device sends, in groups it means all devices
    groups = ((0,),) if "source_target_pairs={}" in step.bare else _expanded(match[1], program.devices)
    results = shapes(_result_type(step))
    # The result of a reduce-scatter is one device's shard: the operand has a shard for every device of the group.
    times = max(map(len, groups)) if step.kind == "reduce-scatter" else 1
    return Collective(
        kind=step.kind,
        dtype="+".join(sorted({dtype for dtype, _ in results})),
        payload_bytes=times * sum(array_bytes(dtype, dims) for dtype, dims in results),
        groups=groups,
        is_async=overlaps(step),
        name=step.name,
        op_name=step.op_name,
        source_lines=program.source_lines(step),
        shapes=results,
    )


def overlaps(step: Instruction) -> bool:
    """Return True if other work may run between start and done; jax 0.10 marks synchronous pairs."""
    return step.is_start and '"is_sync":true' not in step.line


def _result_type(step: Instruction) -> str:
    """Return the result in an instruction's type.

    A start has the type (operand, result) or ((operands), (results)), perhaps with more elements. But jax 0.10's
    all-reduce-start has the type of its result alone, a flat tuple for several.
    """
    if not step.is_start or not step.type.startswith("("):
        return step.type
    parts = elements(step.type)
    return parts[1] if parts[0].startswith("(") or step.kind != "all-reduce" else step.type


_LISTED = r"\{(?:\{[\d,]*\},?)*\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? \{[^}]*\}"
_GROUPS = re.compile(rf"\b(?:replica_groups|source_target_pairs)=({_LISTED}|{_IOTA}|{_MESH})")


@functools.lru_cache(maxsize=256)
def _expanded(notation: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`; `{}` is one of all."""
    if notation.startswith("{"):
        listed = tuple(map(ints, re.findall(r"\{([\d,]+)\}", notation)))
        return listed or (tuple(range(devices)),)
    if notation.startswith("["):
        shape, _, order = notation.partition("<=")
        ids = _iota(order).reshape(ints(shape))
    else:
        ids = _mesh_groups(notation)
    return tuple(tuple(map(int, group)) for group in ids)


def _mesh_groups(notation: str) -> np.ndarray:
    """Return the [groups, size] ids of `mesh['a'=2,'b'=4] {'b'}`: a group differs along the named axes only.

    `'b':(2)2` of size 4 splits the axis into 2 x 2 and takes the second factor; `, device_ids=([2,4]T(1,0))` is an
    order of devices (openxla/xla, xla/hlo/ir/mesh_and_axis.cc).
    """
    mesh, _, named = notation.rpartition(" {")
    axes, _, order = mesh.partition("]")
    sizes = {axis: int(size) for axis, size in re.findall(r"('[^']*'|[^\[,=]+)=(\d+)", axes)}
    total, group = math.prod(sizes.values()), 1
    fixed = dict(zip(sizes, np.unravel_index(np.arange(total), tuple(sizes.values())), strict=True))
    for axis, before, size in re.findall(r"('[^']*'|[^,:}]+)(?::\((\d+)\)(\d+))?", named):
        factor = int(size or sizes[axis])
        after = sizes[axis] // (int(before or 1) * factor)
        fixed[axis] = fixed[axis] - fixed[axis] // after % factor * after  # the coordinate without the named digit
        group *= factor
    key = np.ravel_multi_index(tuple(fixed.values()), tuple(sizes.values()))
    ids = _iota(order.partition("(")[2]) if order else np.arange(total)
    return ids[np.argsort(key, kind="stable")].reshape(-1, group)


def _iota(order: str) -> np.ndarray:
    """Return the ids of a device order: `[4,2]T(1,0)` is 0, 1, … in shape [4, 2], transposed; `0,4,1,5` is itself."""
    if not order.startswith("["):
        return np.array(ints(order))
    shape, _, axes = order.partition("T")
    ids = np.arange(math.prod(ints(shape))).reshape(ints(shape))
    return ids.transpose(ints(axes) or range(ids.ndim)).ravel()
