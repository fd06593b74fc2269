"""The products of a compiled program that were asked for in float8, and which of them run in a wider type.

A product is asked for in float8 if both operands come from float8 numbers, by casts, scales and moves alone. That may
be so in the compiled program, or in the one that XLA was given (`program/requested.py`).

- It runs in float8 as a call of cuBLASLt (`__cublas$lt$matmul$f8`): XLA rewrites some patterns only (openxla/xla issue
  17887).
- It runs in float8 as a Triton kernel on float8 operands, with tiles of 64 rows and 4 warps. With smaller ones its
  instructions are float16's, as the PTX says that XLA of jax 0.10.2 makes for the H100.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jdp.foresight.program.module import Instruction, Program
from jdp.foresight.program.requested import Request, asks_for_float8
from jdp.foresight.timing.matmuls import custom_call_target

FLOAT8_CALL = "__cublas$lt$matmul$f8"
_LIBRARIES = ("__cublas$", "__onednn$matmul")
_MOVES = {
    *("bitcast", "broadcast", "concatenate", "convert", "copy", "divide", "dynamic-slice", "multiply", "pad"),
    *("reshape", "slice", "transpose"),
}
_TILES = re.compile(r'"num_warps":"(\d+)","output_tiles":\[\{"sizes":\[([^\]]*)\]')


@dataclass(frozen=True)
class Wider:
    """A product that was asked for in float8 and runs in another type."""

    dtype: str  # that it is multiplied in, by XLA's name
    source_lines: tuple[str, ...]  # where it was written, innermost first
    is_triton: bool = False  # whether a Triton kernel has float8 operands and widens them


@dataclass(frozen=True)
class Float8Products:
    """The products of one program that were asked for in float8; one in a loop's body counts once."""

    asked: int
    wider: tuple[Wider, ...]

    @property
    def run(self) -> int:
        """How many run in float8."""
        return self.asked - len(self.wider)

    def __str__(self) -> str:
        return f"fp8 products: {self.run} of {self.asked}"

    def to_json(self) -> dict[str, int]:
        """Return the counts."""
        return {"asked": self.asked, "run": self.run}


def float8_products(program: Program, requests: Sequence[Request] = ()) -> Float8Products:
    """Return the products that were asked for in float8."""
    found, asked, wider = _Origins(program), 0, list[Wider]()
    for name, steps in program.computations.items():
        for step in steps:
            if not _is_product(step):
                continue
            line = next(iter(found.source_lines(step, name)), None)
            in_float8 = all(found.is_float8(each, name) for each in step.operands[:2])
            if not in_float8 and not asks_for_float8(requests, line, step.op_name):
                continue
            asked += 1
            if (dtype := found.wider_type(step, name)) is not None:
                is_triton = program.by_name[name][step.operands[0]].shapes[0][0].startswith("f8")
                wider.append(Wider(dtype, found.source_lines(step, name), is_triton))
    return Float8Products(asked, tuple(wider))


def _is_product(step: Instruction) -> bool:
    library = step.opcode == "custom-call" and custom_call_target(step).startswith(_LIBRARIES)
    return step.opcode in ("dot", "scaled-dot") or library


@dataclass(frozen=True)
class _Origins:
    """A program, and which fusion each of its fused computations belongs to."""

    program: Program

    @cached_property
    def _fusions(self) -> Mapping[str, tuple[str, Instruction]]:
        """Fused computation -> (computation that has the fusion, the fusion)."""
        every = ((name, step) for name, steps in self.program.computations.items() for step in steps)
        return {called: (name, step) for name, step in every for called in step.called.get("calls", ())}

    def is_float8(self, name: str, computation: str) -> bool:
        """Return True if a value is in float8, or was before casts, scales and moves."""
        ahead, seen = [(name, computation)], set[tuple[str, str]]()
        while ahead:
            if (value := ahead.pop()) in seen:
                continue
            seen.add(value)
            step = self.program.by_name[value[1]][value[0]]
            if len(step.shapes) == 1 and step.shapes[0][0].startswith("f8"):
                return True
            ahead += self._made_of(step, value[1])
        return False

    def _made_of(self, step: Instruction, computation: str) -> Iterator[tuple[str, str]]:
        """Yield the values that a value is a copy of, in another type, scale or place."""
        if (number := step.parameter_number) is not None and computation in self._fusions:
            outer, fusion = self._fusions[computation]
            yield fusion.operands[number], outer
        elif step.opcode == "fusion":
            yield from ((root.name, inner) for inner, root in self._roots(step))
        elif step.opcode == "get-tuple-element":
            yield from self._element(step, computation)
        elif step.opcode in _MOVES:
            yield from ((name, computation) for name in step.operands)

    def _roots(self, fusion: Instruction) -> Iterator[tuple[str, Instruction]]:
        for inner in fusion.called.get("calls", ()):
            yield from ((inner, step) for step in self.program[inner] if step.is_root)

    def _element(self, step: Instruction, computation: str) -> Iterator[tuple[str, str]]:
        """Yield the value that a fusion of several results has at a place."""
        made, index = self.program.by_name[computation][step.operands[0]], int(step.attribute("index") or 0)
        for inner, root in self._roots(made) if made.opcode == "fusion" else ():
            if root.opcode == "tuple":
                yield root.operands[index], inner

    def wider_type(self, step: Instruction, computation: str) -> str | None:
        """Return the type that a product is multiplied in, if that is not float8."""
        if custom_call_target(step) == FLOAT8_CALL:
            return None
        dtypes = [self.program.by_name[computation][name].shapes[0][0] for name in step.operands[:2]]
        if not all(dtype.startswith("f8") for dtype in dtypes):
            return next(dtype for dtype in dtypes if not dtype.startswith("f8"))
        _, kernel = self._fusions.get(computation, ("", step))
        tiles = _TILES.search(kernel.line)
        if tiles is None:
            return "f16"
        rows = [int(size) for size in re.findall(r"\d+", tiles[2])][-2:][0]
        return None if rows >= 64 and int(tiles[1]) >= 4 else "f16"

    def source_lines(self, step: Instruction, computation: str) -> tuple[str, ...]:
        """Return where a product was written: its own lines, else those of the fusion that it is in."""
        _, fusion = self._fusions.get(computation, ("", step))
        return self.program.source_lines(step) or self.program.source_lines(fusion)
