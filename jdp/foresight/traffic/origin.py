"""Where what a collective carries comes from: the loop, the tensors, the line that made them, the parameters.

1. The loop: a collective runs once a microbatch when a `while` around it is the scan over the microbatches.
2. The tensors: XLA joins many into one collective, and flattens an all-reduce's into one vector; both are taken apart.
3. The line: of the places that jax kept, the first that the user wrote.
4. The parameters: those that have a tensor's shape, whole or one device's shard, stacked or one layer's slice. A shape
   is evidence, not proof.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jdp.core.paths import PACKAGE
from jdp.core.sharding.placement import Placement, axes_of, spec_entry
from jdp.foresight.program.collectives import Collective
from jdp.foresight.program.module import Instruction, Program, array_bytes

Names = dict[str, Instruction]
"""The instructions of one computation, in schedule order."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a collective.

    Attributes:
        dtype, dims: as one device holds it: an all-gather's result, a reduce-scatter's shard, else the operand.
        payload_bytes: of the whole tensor, once, as `Collective.payload_bytes` counts.
        line: "file:line" of what sends it: of the collective, else of what made or uses the tensor.
    """

    dtype: str
    dims: tuple[int, ...]
    payload_bytes: int
    line: str | None = None


@dataclass(frozen=True)
class Sites:
    """A program's call graph, turned upside down.

    Attributes:
        program: the compiled step.
        accumulate: its microbatches, K.
    """

    program: Program
    accumulate: int = 1
    _where: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict[str, str])
    _callers: dict[str, tuple[str, Instruction]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, tuple[str, Instruction]]
    )

    def __post_init__(self) -> None:
        for computation, steps in self.program.computations.items():
            for step in steps:
                self._where[step.name] = computation
                for called in (name for names in step.called.values() for name in names):
                    self._callers.setdefault(called, (computation, step))

    def loops(self, name: str) -> list[Instruction]:
        """The `while`s around an instruction, innermost first."""
        found, computation = list[Instruction](), self._where.get(name, "")
        while computation in self._callers:
            computation, caller = self._callers[computation]
            if caller.opcode == "while":
                found.append(caller)
        return found

    @cached_property
    def _scan(self) -> Instruction | None:
        """The loop over the microbatches, where XLA left one."""
        loops = [s for steps in self.program.computations.values() for s in steps if s.opcode == "while"]
        return next((loop for loop in loops if self._is_scan(loop)), None)

    def _is_scan(self, loop: Instruction) -> bool:
        """jdp's own scan, by the line that wrote it; where XLA dropped that, by its rounds and what is inside."""
        if places := self.program.source_lines(loop):
            return places[0].replace("\\", "/").startswith(_SCANNED_IN)
        inside = [step for name in loop.called.get("body", ()) for step in self.program[name]]
        peeled = loop.trip_count in (self.accumulate, self.accumulate - 1)
        return peeled and any(_in_scan(step.op_name) for step in inside)

    def in_accumulation_loop(self, collective: Collective) -> bool:
        """Whether it runs for every microbatch.

        The call graph tells: what XLA moved out of the loop runs once, whatever jax's path says. Only where XLA took
        rounds off the loop (its trip count is not K), the path tells what the copies outside are copies of.
        """
        if self.accumulate == 1:
            return False
        if any(self._is_scan(loop) for loop in self.loops(collective.name)):
            return True
        whole = self._scan is not None and self._scan.trip_count == self.accumulate
        return not whole and _in_scan(collective.op_name)

    def pieces(self, collective: Collective) -> list[Piece]:
        """The tensors of a collective, taken apart."""
        names = self.program.by_name.get(self._where.get(collective.name, ""), {})
        step = names.get(collective.name)
        operands = [names[name] for name in step.operands if name in names] if step is not None else []
        times = collective.group_size if collective.kind == "reduce-scatter" else 1
        if len(operands) != len(collective.shapes):
            line = line_of(collective.source_lines)
            return [Piece(dtype, dims, times * array_bytes(dtype, dims), line) for dtype, dims in collective.shapes]
        found = list[Piece]()
        for index, ((dtype, dims), operand) in enumerate(zip(collective.shapes, operands, strict=True)):
            for part in self._parts(operand, names):
                shape = dims if part is operand else _unflattened(part, names)
                line = self._line(collective, index, part, names)
                found.append(Piece(dtype, shape, times * array_bytes(dtype, shape), line))
        return found

    def _line(self, collective: Collective, index: int, made_by: Instruction, names: Names) -> str | None:
        """Where a tensor's sending was written. Of collectives that XLA joined, only the first kept its place."""
        alone = len(collective.shapes) == 1
        above = (self.program.source_lines(step) for step in _upwards(made_by, names))
        below = (self.program.source_lines(step) for step in _uses(collective.name, index, alone, names))
        found = [*([collective.source_lines] if alone else []), *above, *below, collective.source_lines]
        written = (line for places in found if (line := users_line(places)) is not None)
        return next(written, next((places[0] for places in found if places), None))

    def _parts(self, operand: Instruction, names: Names) -> list[Instruction]:
        """What was concatenated into an operand; the operand itself where nothing was."""
        if operand.opcode == "concatenate":
            return [names[name] for name in operand.operands]
        for called in operand.called.get("calls", ()):
            inner = self.program.by_name[called]
            root = next((step for step in inner.values() if step.is_root), None)
            if root is not None and root.opcode == "concatenate":
                numbers = [_parameter_number(inner[name]) for name in root.operands]
                if None not in numbers:
                    return [names[operand.operands[number]] for number in numbers if number is not None]
        return [operand]


_PACKAGE = PACKAGE.as_posix()
_SCANNED_IN = f"{_PACKAGE}/core/gradients/accumulate.py:"
_SCAN_PATH = re.compile(r"jit\([^)]*\)/(?:shard_map/)?while/body")


def _in_scan(op_name: str | None) -> bool:
    return op_name is not None and _SCAN_PATH.match(op_name) is not None


def _parameter_number(step: Instruction) -> int | None:
    match = re.search(r" parameter\((\d+)\)", step.line)
    return int(match[1]) if match else None


def _upwards(step: Instruction, names: Names, steps: int = 8) -> Iterator[Instruction]:
    """An instruction, its first operand, that one's first operand, …"""
    for _ in range(steps):
        yield step
        above = next((names[name] for name in step.operands if name in names), None)
        if above is None:
            return
        step = above


def _uses(name: str, index: int, alone: bool, names: Names, steps: int = 8) -> Iterator[Instruction]:
    """What reads a collective's tensor number `index`, and what reads that, … in the same computation."""
    reached = {name}
    for step in names.values():
        if not steps or reached.isdisjoint(step.operands):
            continue
        is_part = step.opcode == "get-tuple-element" and not alone
        if is_part and step.attribute("index") != str(index):
            continue
        reached.add(step.name)
        if alone or not step.opcode.endswith("-done"):  # the done of a joined one has the place of the first
            steps -= 1
            yield step


def _unflattened(part: Instruction, names: Names) -> tuple[int, ...]:
    """The dimensions that a flat part had before it was flattened."""
    dims = part.shapes[0][1]
    for above in _upwards(part, names):
        if len(above.shapes) != 1 or math.prod(above.shapes[0][1]) != math.prod(dims):
            break
        if len(above.shapes[0][1]) > 1:
            return above.shapes[0][1]
        if above.opcode not in ("bitcast", "reshape", "copy"):
            break
    return dims


# Lines.

_LIBRARIES = re.compile(r"/(?:site-packages|dist-packages)/(?:jax|jaxlib|flax|optax)/")
_OWN = re.compile(rf"{re.escape(_PACKAGE)}/(?!models/)")
_STEP = re.compile(rf"{re.escape(_PACKAGE)}/core/(?:step|gradients/loss_call)\.py:")


def line_of(places: Iterable[str]) -> str | None:
    """The innermost place that the user wrote; where there is none, the innermost."""
    found = tuple(places)
    return users_line(found) or next(iter(found), None)


def users_line(places: Iterable[str]) -> str | None:
    """The innermost place outside jax, flax, optax and jdp (whose models are the user's).

    What calls the step is no answer: the search ends at the step itself.
    """
    for place in places:
        posix = place.replace("\\", "/")
        if _STEP.match(posix):
            return None
        if not _LIBRARIES.search(posix) and not _OWN.match(posix):
            return place
    return None


# Parameters.


@dataclass(frozen=True)
class Parameters:
    """A plan's parameters, found by the shape of a tensor on one device.

    Attributes:
        places: each parameter's `Placement`, its path without "params/".
        mesh_shape: axis -> size.
    """

    places: tuple[Placement, ...]
    mesh_shape: dict[str, int]

    def like(self, dims: tuple[int, ...]) -> tuple[Placement, ...]:
        """The parameters with these dimensions, dimensions of 1 and their order aside: XLA chooses layouts.

        In the order of preference: the working copy or the shard in whole; one layer of either; the global array.
        """
        key = _key(dims)
        return next((tuple(table[key]) for table in self._tables if key and key in table), ())

    @cached_property
    def _tables(self) -> tuple[dict[tuple[int, ...], list[Placement]], ...]:
        tables = tuple(dict[tuple[int, ...], list[Placement]]() for _ in range(3))
        for place in self.places:
            whole, shard = self.local(place), self.local(place, at_rest=True)
            slices = [dims[1:] for dims in (whole, shard) if self._may_be_stacked(place)]
            for table, row in zip(tables, ((whole, shard), slices, (place.shape,)), strict=True):
                for key in {_key(dims) for dims in row}:
                    table.setdefault(key, []).append(place)
        return tables

    def _may_be_stacked(self, place: Placement) -> bool:
        """Whether the leading dimension may be layers: of matrices, or others have it too; and it is not sharded."""
        alike = sum(other.shape[:1] == place.shape[:1] for other in self.places)
        return len(place.shape) > 1 and place.dim != 0 and (alike > 1 or len(place.shape) > 2)

    def local(self, place: Placement, *, at_rest: bool = False) -> tuple[int, ...]:
        """A parameter's dimensions on one device: of the working copy, or of what rests there."""
        spec = place.rest if at_rest else place.compute
        return tuple(
            size // math.prod(self.mesh_shape[axis] for axis in axes_of(spec_entry(spec, dim)))
            for dim, size in enumerate(place.shape)
        )


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))
