"""Which arrays of a program share memory.

`Aliases(program)` reads each instruction once, in the order of the schedule, and joins
1. views: bitcasts, tuples and their elements, what a start hands on to its done;
2. what calls pass on: a loop's operand, its body's parameter and result, and the loop's own result;
3. updates in place: dynamic-update-slice and scatter, fusions of them, what custom calls declare;
4. results that are written into donated arguments.

The rules are those of openxla/xla: hlo/analysis/hlo_alias_analysis.cc, and `GetInPlaceInputOutputPairs` of
hlo/analysis/hlo_dataflow_analysis.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jdp.foresight.program.module import HOST_MEMORY, Instruction, Program, elements, ints, shapes

Path = tuple[int, ...]
"""The position of an array in a result: () for a plain array, (1, 0) for the first of the second tuple."""

Array = tuple[str, str, Path]
"""(computation, instruction, path)."""

CALLS = ("call", "call-start", "async-start")


class Aliases:
    """The arrays of a scheduled program, and which share memory.

    Attributes:
        schedule: (computation, instruction) in the order of execution. A loop's condition and body are in it once,
            before the loop; so are called computations and every branch of a conditional.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.schedule = [*_schedule(program, program.entry)]
        self._above: dict[Array, Array] = {}
        self._arrays: dict[tuple[str, str], dict[Path, tuple[str, tuple[int, ...]]]] = {}
        for computation, step in self.schedule:
            self._join_views(computation, step)
            self._join_calls(computation, step)
            for number, path in updates(program, step):
                self._join((computation, step.operands[number], ()), (computation, step.name, path))
        self._join_donated()

    def of(self, array: Array) -> Array:
        """Return the array that represents all that share memory with this one."""
        above = self._above
        while (parent := above.get(array, array)) != array:
            above[array] = above.get(parent, parent)
            array = parent
        return array

    def arrays(self, computation: str, name: str) -> dict[Path, tuple[str, tuple[int, ...]]]:
        """Return the arrays of an instruction's result: path -> (element type, dimensions)."""
        key = (computation, name)
        if key not in self._arrays:
            self._arrays[key] = dict(_arrays(self.program.by_name[computation][name].type))
        return self._arrays[key]

    def on_host(self, computation: str, name: str) -> set[Path]:
        """Return the paths of the arrays of an instruction's result that are in host memory."""
        text = self.program.by_name[computation][name].type
        return {path for path, array in _elements(text) if HOST_MEMORY in array} if HOST_MEMORY in text else set()

    def taken(self, computation: str, step: Instruction) -> Iterator[tuple[int, Array]]:
        """Yield (operand number, array) of everything that an instruction takes."""
        for number, name in enumerate(step.operands):
            for path in self.arrays(computation, name):
                yield number, (computation, name, path)

    def result(self, computation: str) -> Array:
        """Return the result of a computation."""
        return computation, next(step.name for step in self.program[computation] if step.is_root), ()

    def _join(self, a: Array, b: Array) -> None:
        self._above[self.of(b)] = self.of(a)

    def _same(self, a: Array, b: Array) -> None:
        """Join all arrays at and under `b` with those at and under `a`."""
        depth = len(b[2])
        for path in self.arrays(*b[:2]):
            if path[:depth] == b[2]:
                self._join((*a[:2], a[2] + path[depth:]), (*b[:2], path))

    def _join_views(self, computation: str, step: Instruction) -> None:
        result: Array = (computation, step.name, ())
        if step.opcode in ("bitcast", "optimization-barrier"):
            self._same(result, (computation, step.operands[0], ()))
        elif step.opcode == "get-tuple-element":
            self._same(result, (computation, step.operands[0], (int(step.attribute("index") or 0),)))
        elif step.opcode == "tuple":
            for i, name in enumerate(step.operands):
                self._same((computation, step.name, (i,)), (computation, name, ()))
        elif step.is_start:
            handed = [path for path in self.arrays(computation, step.name) if is_handed_on(step, path)]
            for (_, array), path in zip(self.taken(computation, step), handed, strict=False):
                self._join(array, (computation, step.name, path))
        elif step.opcode.endswith(("-done", "-update")):
            start = self.program.by_name[computation][step.operands[0]]
            whole = step.opcode.endswith("-update") or _is_flat_all_reduce(start)
            self._same(result, (computation, start.name, () if whole else (int(step.kind != "copy"),)))

    def _join_calls(self, computation: str, step: Instruction) -> None:
        result: Array = (computation, step.name, ())
        operands: list[Array] = [(computation, name, ()) for name in step.operands]
        if step.opcode == "while":
            self._same(result, operands[0])
            for called in inside(step):
                self._same(result, self._parameter(called, 0))
            self._same(result, self.result(step.called["body"][0]))
        elif step.opcode == "conditional":
            for operand, branch in zip(operands[1:], inside(step), strict=True):
                self._same(operand, self._parameter(branch, 0))
                self._same(result, self.result(branch))
        elif step.opcode in CALLS:
            (called,) = inside(step)
            for number, operand in enumerate(operands):
                self._same(operand, self._parameter(called, number))
            self._same((computation, step.name, (1,) if step.is_start else ()), self.result(called))

    def _join_donated(self) -> None:
        entry, root, _ = self.result(self.program.entry)
        for output, number, path in self.program.written_into:
            _, name, _ = self._parameter(entry, number)
            self._join((entry, name, path), (entry, root, output))

    def _parameter(self, computation: str, number: int) -> Array:
        steps = self.program[computation]
        return computation, next(step.name for step in steps if step.parameter_number == number), ()


def inside(step: Instruction) -> tuple[str, ...]:
    """Return the computations that an instruction runs, in the order in which they are scheduled."""
    called = step.called
    if step.opcode == "while":
        return (*called["condition"], *called["body"])
    return tuple(name for names in called.values() for name in names)


def is_fusion(step: Instruction) -> bool:
    """Return True if an instruction is a fusion, or the start of one that runs beside other work."""
    return step.opcode in ("fusion", "fusion-start")


def is_handed_on(step: Instruction, path: Path) -> bool:
    """Return True if an array in a start's tuple is one of its operands, passed on to the done."""
    return step.is_start and not _is_flat_all_reduce(step) and path[:1] == (int(step.kind == "copy"),)


def updates(program: Program, step: Instruction) -> list[tuple[int, Path]]:
    """Return (operand number, path in the result) of arrays that an instruction updates in place."""
    if step.opcode in ("dynamic-update-slice", "scatter"):
        return [(0, ())]
    pairs = list[tuple[int, Path]]()
    if "output_to_operand_aliasing=" in step.line:
        declared = re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", step.bare)
        pairs += [(int(number), ints(path)) for path, number in declared]
    if is_fusion(step):
        within = (1,) if step.is_start else ()
        pairs += [(number, within + path) for number, path in _fused_updates(program, step.called["calls"][0])]
    return pairs


def _fused_updates(program: Program, fused: str) -> Iterator[tuple[int, Path]]:
    """Yield (parameter number, path in the result) of a fused computation's results that update its parameters."""
    steps = program.by_name[fused]
    root = next(step for step in program[fused] if step.is_root)
    results = [(steps[name], (i,)) for i, name in enumerate(root.operands)] if root.opcode == "tuple" else [(root, ())]
    for result, path in results:
        step = _behind(result, steps)
        if step.opcode in ("dynamic-update-slice", "scatter"):
            number = _behind(steps[step.operands[0]], steps).parameter_number
            if number is not None:
                yield number, path


def _behind(step: Instruction, steps: dict[str, Instruction]) -> Instruction:
    """Follow first operands through casts and copies, to what they are made from."""
    while step.opcode in ("bitcast", "copy", "convert", "reshape"):
        step = steps[step.operands[0]]
    return step


def _is_flat_all_reduce(step: Instruction) -> bool:
    """Return True for an all-reduce's start as in jax 0.10, whose type has its results without the operands."""
    if step.opcode != "all-reduce-start":
        return False
    return not step.type.startswith("((") and (len(step.operands) > 1 or not step.type.startswith("("))


def _schedule(program: Program, computation: str) -> Iterator[tuple[str, Instruction]]:
    for step in program[computation]:
        if step.opcode in ("while", "conditional", *CALLS):
            for called in inside(step):
                yield from _schedule(program, called)
        yield computation, step


def _arrays(type_text: str, at: Path = ()) -> Iterator[tuple[Path, tuple[str, tuple[int, ...]]]]:
    """Yield (path, (element type, dimensions)) of every array in a type."""
    for path, text in _elements(type_text, at):
        for array in shapes(text):
            yield path, array


def _elements(type_text: str, at: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of every array in a type: its element type, dimensions and layout."""
    if not type_text.startswith("("):
        yield at, type_text
        return
    for number, element in enumerate(elements(type_text)):
        yield from _elements(element, (*at, number))
