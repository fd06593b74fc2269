"""A compiled XLA module as objects: computations in schedule order, instructions with operands, types and callees.

`parse(compiled.as_text())` takes one pass over the text; what takes time is read from an instruction's line on demand.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from jdp.base.errors import UserError


@dataclass(frozen=True)
class Instruction:
    name: str  # without "%"
    type: str  # the result's type as printed, such as "f32[8,4]{1,0}" or "(f32[], bf16[16,3])"
    opcode: str  # as printed, such as "fusion", "dot", "all-gather-start"
    line: str  # the whole line
    is_root: bool = False  # it is its computation's result

    @cached_property
    def bare(self) -> str:
        """The line with its strings emptied: an op_name may hold any text, even text that looks like an attribute."""
        return _STRING.sub('""', self.line)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self._arguments))

    @property
    def _arguments(self) -> str:
        line = self.line
        begin = line.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth = 1
        for match in _PARENTHESIS.finditer(line, begin):
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                return line[begin : match.start()]
        return line[begin:]

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations it calls, by attribute: {"body": (...,), "condition": (...,)}, {"calls": (...,)}, …"""
        names: dict[str, tuple[str, ...]] = {}
        for attribute, many, one in _CALLED.findall(self.bare):
            names[attribute] = (*names.get(attribute, ()), *_NAME.findall(many or one))
        return names

    @property
    def callees(self) -> tuple[str, ...]:
        return tuple(name for names in self.called.values() for name in names)

    @property
    def kind(self) -> str:
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def is_start(self) -> bool:
        return self.opcode.endswith("-start")

    @property
    def op_name(self) -> str | None:
        """jax's path to the operation; of a parameter of the entry, the argument's: "state.params['layers']['w']"."""
        match = _OP_NAME.search(self.line)
        return match[1].replace("\\'", "'") if match else None

    @property
    def parameter_number(self) -> int | None:
        return int(self._arguments) if self.opcode == "parameter" else None

    @property
    def trip_count(self) -> int | None:
        match = _TRIPS.search(self.line)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str | None:
        """Return a plain attribute's text: "{0}" for `lhs_contracting_dims={0}`, "kLoop" for `kind=kLoop`."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.bare)
        return match[1] if match else None

    @cached_property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return shapes(self.type)

    @property
    def result_bytes(self) -> int:
        return sum(array_bytes(dtype, dims) for dtype, dims in self.shapes)


@dataclass(frozen=True)
class Program:
    entry: str  # name of the computation that runs
    computations: dict[str, tuple[Instruction, ...]] = field(repr=False)  # in schedule order
    devices: int  # partitions × replicas
    header: str = field(repr=False)  # the module's first line: aliases of inputs and outputs, layouts
    frames: dict[str, tuple[str, ...]] = field(repr=False)  # id -> "file:line"s, innermost first

    def __getitem__(self, computation: str) -> tuple[Instruction, ...]:
        return self.computations[computation]

    @cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        return {key: {step.name: step for step in steps} for key, steps in self.computations.items()}

    def source_lines(self, step: Instruction) -> tuple[str, ...]:
        """Return the operation's source lines, "file:line", innermost first; empty if the text has none."""
        match = _FRAME.search(step.line)
        return self.frames.get(match[1], ()) if match else ()

    def source_line(self, step: Instruction) -> str | None:
        return next(iter(self.source_lines(step)), None)

    @cached_property
    def argument_bytes(self) -> dict[int, tuple[str, int]]:
        """Number of each parameter -> (jax's name of it, its bytes in device memory)."""
        sizes = dict[int, tuple[str, int]]()
        for step in self[self.entry]:
            if (number := step.parameter_number) is not None:
                sizes[number] = (step.op_name or "", 0 if HOST_MEMORY in step.type else step.result_bytes)
        return sizes

    @cached_property
    def written_into(self) -> tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]:
        """(path in the result, parameter's number, path in it) of each result written into an argument."""
        table = self.header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", table)
        return tuple((ints(output), int(number), ints(path)) for output, number, path in found)


def parse(text: str) -> Program:
    entry = None
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    rows, steps = tables["FileNames"], list[Instruction]()
    header = ""
    for line in text.split("\n"):
        if line.startswith(" "):
            if (match := _INSTRUCTION.match(line)) is not None:
                steps.append(Instruction(match[2], match[3], match[4], line, is_root=match[1] is not None))
        elif line in tables:
            rows = tables[line]
        elif line[:1].isdigit():
            index, _, row = line.partition(" ")
            rows[index] = row
        elif line.startswith("HloModule"):
            header = line
        elif (match := _COMPUTATION.match(line)) is not None:
            steps = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
    if entry is None:
        raise UserError(
            "this is not the text of a compiled program: it has no ENTRY computation and begins "
            f"{text[:60]!r}; give `jitted.lower(...).compile().as_text()`"
        )
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    frozen = {name: tuple(steps) for name, steps in computations.items()}
    return Program(entry, frozen, math.prod(map(int, sizes)), header, _frames(tables))


@lru_cache(maxsize=4096)
def shapes(type_text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (element type, dimensions) of every array in a type as XLA prints it."""
    return tuple(
        (dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d)) for dtype, dims in _SHAPE.findall(type_text)
    )


def elements(type_text: str) -> list[str]:
    """Return the types in a tuple's type."""
    found, depth, begin = list[str](), 0, 1
    for match in re.finditer(r"[()\[\]{},]", type_text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == 0 or (depth == 1 and match[0] == ","):
            found.append(_COMMENT.sub("", type_text[begin : match.start()]))
            begin = match.end()
    return found


_COMMENT = re.compile(r"^\s*(?:/\*.*?\*/)?\s*")  # XLA numbers the elements of long tuples


def ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def array_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Return the bytes of an array; elements of less than 8 bits are packed."""
    return -(-math.prod(dims) * bits(dtype) // 8)


def bits(dtype: str) -> int:
    """Return the bits of an element: the digits in `bf16`, `f8e4m3fn`, `s4`, `c64`; "token" has none."""
    named = _BITS.match(dtype)
    if named is not None:
        return int(named[1])
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    raise UserError(f"the bytes of element type {dtype!r} in the HLO text are not known")


_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"[\w.\-]+")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"(?:bf|f|s|u|c)(\d+)")


def _frames(tables: dict[str, dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """Join the tables at the head of a module: frame -> source lines of it and its callers, innermost first."""
    files = {index: row.strip('"') for index, row in tables["FileNames"].items()}
    locations, stack = (
        {index: defaultdict(str, re.findall(r"\b(\w+)=(\d+)", row)) for index, row in tables[name].items()}
        for name in ("FileLocations", "StackFrames")
    )
    places = {index: f"{files.get(row['file_name_id'], '')}:{row['line']}" for index, row in locations.items()}
    frames = {  # frame -> (place, caller); printed plus one: 1 has no caller
        index: (places.get(row["file_location_id"]), str(int(row["parent_frame_id"] or 1) - 1))
        for index, row in stack.items()
    }

    def chain(index: str) -> Iterator[str]:
        seen = set[str]()
        while index in frames and index not in seen:
            seen.add(index)
            place, index = frames[index]
            if place is not None:
                yield place

    return {index: tuple(chain(index)) for index in frames}


HOST_MEMORY = "S(5)"
"""How XLA prints that an array is in the host's memory (openxla/xla, xla/layout.h, Layout::kHostMemorySpace)."""


def is_host_copy(step: Instruction, computation: str, program: Program) -> bool:
    """Return True if an instruction copies from or to host memory: an array, or a slice of one (a fusion of it)."""
    if step.kind not in ("copy", "fusion") or step.opcode.endswith("-done"):
        return False
    steps = [step, *(program.by_name[computation][name] for name in step.operands)]
    return any(HOST_MEMORY in each.type for each in steps)
