"""The origin of a collective: the loop around it, its tensors, their source lines, their parameters.

A collective runs once a microbatch if a `while` around it is the scan over the microbatches. XLA joins many tensors
into one collective and flattens an all-reduce's; both are undone. A tensor's source line is the innermost line in jax's
traceback that the user wrote. Its parameters are those with its shape, whole or one device's shard, stacked or one
layer's slice, so the match may be wrong. Every report is made from a `Reading`, a step with its known arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, tee
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jdp.base.tree_paths import PACKAGE
from jdp.core.plan import Plan
from jdp.core.sharding.placement import Placement, axes_of, spec_entry
from jdp.core.state import TrainState
from jdp.foresight.program.collectives import Collective
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.program.module import Instruction, Program, array_bytes

Names = dict[str, Instruction]
"""The instructions of one computation, in schedule order."""


class Piece(NamedTuple):
    dtype: str  # on one device
    dims: tuple[int, ...]  # of an all-gather's result, a reduce-scatter's shard, else the operand
    payload_bytes: int  # of the whole tensor, once, as in `Collective.payload_bytes`
    source_line: str | None = None  # "file:line" of the collective; else of the tensor's producer or consumer


class Sites:
    """The call graph of a step with `accumulate` microbatches, from each instruction up to its callers."""

    def __init__(self, program: Program, accumulate: int) -> None:
        self.program, self.accumulate = program, accumulate
        self._computation_of, self._callers = dict[str, str](), dict[str, tuple[str, Instruction]]()
        for computation, steps in program.computations.items():
            for step in steps:
                self._computation_of[step.name] = computation
                for called in step.callees:
                    self._callers.setdefault(called, (computation, step))

    def loops(self, name: str) -> list[Instruction]:
        """Return the `while`s around the instruction called `name`, innermost first."""
        loops, computation = list[Instruction](), self._computation_of.get(name, "")
        while computation in self._callers:
            computation, caller = self._callers[computation]
            if caller.opcode == "while":
                loops.append(caller)
        return loops

    @cached_property
    def _scan(self) -> Instruction | None:
        loops = [s for steps in self.program.computations.values() for s in steps if s.opcode == "while"]
        return next((loop for loop in loops if self._is_scan(loop)), None)

    def _is_scan(self, loop: Instruction) -> bool:
        """Recognise jdp's scan by its source line; if XLA dropped it, by its rounds and its contents."""
        if lines := self.program.source_lines(loop):
            return lines[0].replace("\\", "/").startswith(_SCANNED_IN)
        inside = [step for name in loop.called.get("body", ()) for step in self.program[name]]
        peeled = loop.trip_count in (self.accumulate, self.accumulate - 1)
        return peeled and any(_in_scan(step.op_name) for step in inside)

    def in_accumulation_loop(self, collective: Collective) -> bool:
        """Return True if a collective runs for every microbatch.

        The call graph decides: instructions that XLA moved out of the loop run once. Only if XLA peeled rounds off the
        loop (its trip count is not K), jax's path shows whether an instruction outside is a copy of one inside.
        """
        if self.accumulate == 1:
            return False
        if any(self._is_scan(loop) for loop in self.loops(collective.name)):
            return True
        unpeeled = self._scan is not None and self._scan.trip_count == self.accumulate
        return not unpeeled and _in_scan(collective.op_name)

    def pieces(self, collective: Collective) -> list[Piece]:
        """Return the tensors that XLA joined into a collective, each with its original dimensions."""
        names = self.program.by_name.get(self._computation_of.get(collective.name, ""), {})
        step = names.get(collective.name)
        operands = [names[name] for name in step.operands if name in names] if step is not None else []
        times = collective.group_size if collective.kind == "reduce-scatter" else 1
        if len(operands) != len(collective.shapes):
            line = line_of(collective.source_lines)
            return [Piece(dtype, dims, times * array_bytes(dtype, dims), line) for dtype, dims in collective.shapes]
        pieces = list[Piece]()
        for index, ((dtype, dims), operand) in enumerate(zip(collective.shapes, operands, strict=True)):
            sources = self._concatenated(operand, names)
            shapes = [dims if source is operand else _unflattened(source, names) for source in sources]
            sizes = [array_bytes(dtype, shape) for shape in shapes]
            total = times * array_bytes(dtype, dims)
            for source, shape, size in zip(sources, shapes, sizes, strict=True):
                line = self._source_line(collective, index, source, names)
                pieces.append(Piece(dtype, shape, total * size // max(sum(sizes), 1), line))
        return pieces

    def _source_line(self, collective: Collective, index: int, made_by: Instruction, names: Names) -> str | None:
        """Return a tensor's source line. If XLA joined collectives, only the first kept its lines."""
        alone = len(collective.shapes) == 1
        steps = chain(_upwards(made_by, names), _uses(collective.name, index, alone, names))
        own = [collective.source_lines]
        found, again = tee(chain(own if alone else [], map(self.program.source_lines, steps), own))
        written = (line for lines in found if (line := users_line(lines)) is not None)
        return next(written, None) or next((lines[0] for lines in again if lines), None)

    def _concatenated(self, operand: Instruction, names: Names) -> list[Instruction]:
        if operand.opcode == "concatenate":
            return [names[name] for name in operand.operands]
        for called in operand.called.get("calls", ()):
            inner = self.program.by_name[called]
            for root in (step for step in inner.values() if step.is_root and step.opcode == "concatenate"):
                numbers = [inner[name].parameter_number for name in root.operands]
                if None not in numbers:
                    return [names[operand.operands[number]] for number in numbers if number is not None]
        return [operand]


_PACKAGE = PACKAGE.as_posix()
_SCANNED_IN = f"{_PACKAGE}/core/gradients/accumulate.py:"
_SCAN_PATH = re.compile(r"jit\([^)]*\)/(?:shard_map/)?while/body")


def _in_scan(op_name: str | None) -> bool:
    return op_name is not None and _SCAN_PATH.match(op_name) is not None


def _upwards(step: Instruction, names: Names, steps: int = 8) -> Iterator[Instruction]:
    for _ in range(steps):
        yield step
        above = next((names[name] for name in step.operands if name in names), None)
        if above is None:
            return
        step = above


def _uses(name: str, index: int, alone: bool, names: Names, steps: int = 8) -> Iterator[Instruction]:
    """Yield the readers of a collective's tensor number `index`, their readers, and so on, in its computation."""
    reached = {name}
    for step in names.values():
        if not steps or reached.isdisjoint(step.operands):
            continue
        if step.opcode == "get-tuple-element" and not alone and step.attribute("index") != str(index):
            continue
        reached.add(step.name)
        if alone or not step.opcode.endswith("-done"):  # a joined collective's done has the lines of its first tensor
            steps -= 1
            yield step


def _unflattened(flat: Instruction, names: Names) -> tuple[int, ...]:
    dims = flat.shapes[0][1]
    for above in _upwards(flat, names):
        if len(above.shapes) != 1 or math.prod(above.shapes[0][1]) != math.prod(dims):
            break
        if len(above.shapes[0][1]) > 1:
            return above.shapes[0][1]
        if above.opcode not in ("bitcast", "reshape", "copy"):
            break
    return dims


_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages)/(?:jax|jaxlib|flax|optax|equinox|haliax)/")
_OWN = re.compile(rf"{re.escape(_PACKAGE)}/(?!models/)")
_STEP = re.compile(rf"{re.escape(_PACKAGE)}/(?:core/(?:step|gradients/loss_call)|foresight/any_step/traced)\.py:")


def line_of(source_lines: Sequence[str]) -> str | None:
    """Return the innermost line that the user wrote, else the innermost, else None."""
    return users_line(source_lines) or next(iter(source_lines), None)


def users_line(source_lines: Iterable[str]) -> str | None:
    """Return the innermost line outside jax, the libraries on it and jdp (whose models are the user's), else None."""
    for line in source_lines:
        posix = line.replace("\\", "/")
        if _STEP.match(posix):
            return None  # the next line calls the step
        if not _LIBRARIES.search(posix) and not _OWN.match(posix):
            return line
    return None


@dataclass(frozen=True)
class Parameters:
    """A plan's parameters, looked up by the shape of a tensor on one device."""

    placements: tuple[Placement, ...]  # of each parameter, with its path without "params/"
    mesh_shape: dict[str, int]  # axis -> size
    of_any_step: bool = False  # layers may be stacked on any dimension that is not sharded, not only on the first

    @classmethod
    def of(cls, plan: Plan, state: TrainState) -> Parameters:
        placements: list[Placement] = jax.tree.leaves(plan.param_placements(state.params, state.static))
        return cls(tuple(placements), dict(plan.mesh.shape))

    def like(self, dims: tuple[int, ...]) -> tuple[Placement, ...]:
        """Return the parameters with these dimensions, in any order and without dimensions of 1: XLA chooses layouts.

        The order of preference: the working copy or the shard; one layer of either; the global array. Then all shards,
        or those of one layer, stacked along a new dimension, as CPUs gather them. Last, for a step that jdp did not
        make, the parameter reshaped to a matrix.
        """
        key = _key(dims)
        return next((tuple(table[key]) for table in self._tables if key and key in table), ())

    @cached_property
    def _tables(self) -> tuple[dict[tuple[int, ...], list[Placement]], ...]:
        tables = tuple(dict[tuple[int, ...], list[Placement]]() for _ in range(5))
        for placement in self.placements:
            working, shard = self.local(placement), self.local(placement, at_rest=True)
            stacks = self._stacked_on(placement)
            slices = [(*dims[:dim], *dims[dim + 1 :]) for dims in (working, shard) for dim in stacks]
            count = math.prod(working) // max(math.prod(shard), 1)
            beside = [(count, *dims) for dims in (shard, *([shard[1:]] if stacks else []))]
            ranks = range(1, len(working)) if self.of_any_step and len(working) > 2 else ()
            matrices = [(math.prod(working[:rank]), math.prod(working[rank:])) for rank in ranks]
            rows = ((working, shard), slices, (placement.shape,), beside, matrices)
            for table, row in zip(tables, rows, strict=True):
                for key in {_key(dims) for dims in row}:
                    table.setdefault(key, []).append(placement)
        return tables

    def _stacked_on(self, placement: Placement) -> list[int]:
        """Return the dimensions that may be layers: unsharded, and either first in a stack or shared by others."""
        alike = sum(other.shape[:1] == placement.shape[:1] for other in self.placements)
        rank = len(placement.shape)
        first = [0] if rank > 1 and placement.dim != 0 and (alike > 1 or rank > 2) else []
        if not self.of_any_step or rank < 3:
            return first
        return [dim for dim in range(rank) if not axes_of(spec_entry(placement.rest, dim))]

    def local(self, placement: Placement, *, at_rest: bool = False) -> tuple[int, ...]:
        """Return a parameter's dimensions on one device: of the working copy, or of the shard at rest."""
        spec = placement.rest if at_rest else placement.compute
        return tuple(
            size // math.prod(self.mesh_shape[axis] for axis in axes_of(spec_entry(spec, dim)))
            for dim, size in enumerate(placement.shape)
        )

    def working_elements(self, placements: Iterable[Placement]) -> int:
        return sum(math.prod(self.local(placement)) for placement in placements)


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))


@dataclass(frozen=True)
class BatchStatistics:
    """Batch statistics that a step computes over all devices."""

    shapes: tuple[tuple[int, ...], ...] = ()  # of the running averages, two for each BatchNorm, with stacked layers
    rounds: int = 1  # microbatches a step
    metrics: tuple[tuple[int, ...], ...] = ()  # shapes of array metrics, except shapes of parameters

    @property
    def elements(self) -> int:
        """Elements summed in one direction of one microbatch: 2C + 1 for each norm."""
        counts = sum(math.prod(shape[:-1]) for shape in self.shapes) // 2
        return sum(map(math.prod, self.shapes)) + counts

    @property
    def payload_bytes(self) -> int:
        """Bytes a step over all microbatches: forward and backward, plus the sum and weight of metrics."""
        float32 = 4  # bytes: statistics are summed in it for every compute dtype
        return 2 * self.rounds * float32 * (self.elements + sum(map(math.prod, self.metrics)))

    def fits(self, piece: Piece) -> bool:
        """Return True if a tensor may be statistics: C or 2C float32 channels, with or without the count; a metric."""
        if math.prod(piece.dims) in map(math.prod, self.metrics):
            return True
        channels = {shape[-1] for shape in self.shapes}
        sizes = {size for c in channels for size in (c, c + 1, 2 * c, 2 * c + 1)}
        return piece.dtype == "f32" and math.prod(piece.dims) in sizes


@dataclass(frozen=True)
class Reading:
    compiled: Compiled
    mesh: Mesh  # of the target's devices
    batch_axes: tuple[str, ...]  # the axes that shard a batch's rows
    parameters: Parameters  # the arguments that tensors are matched with
    donated: Mapping[int, str] = field(repr=False)  # number -> path of the arguments that a result should replace
    offloads: bool = False  # copies to the host's memory are intended
    accumulate: int = 1  # its microbatches, K

    @cached_property
    def sites(self) -> Sites:
        return Sites(self.compiled.program, self.accumulate)
