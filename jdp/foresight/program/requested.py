"""The products that a step asks for in float8, read off its program before XLA compiles it.

XLA drops a cast to float8 and back (`x.astype(float8).astype(bfloat16)`) beside a product that it has no float8 kernel
for: the compiled program has no trace of it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

_FLOAT8 = re.compile(r"xf8E|<f8E")
_NAMES = ("bitcast_convert", "broadcast_in_dim", "convert", "divide", "multiply", "reshape", "slice", "transpose")
_MOVES = frozenset(f"stablehlo.{name}" for name in _NAMES)
_NAME = re.compile(r'loc\("((?:[^"\\]|\\.)*)"\(')
_PLACE = re.compile(r'"([^"]+)":(\d+):')


@dataclass(frozen=True)
class Request:
    """A product of the program that XLA is given."""

    source_line: str  # "file:line", the innermost
    name: str  # jax's path to it, from the innermost function that is called
    float8: bool  # whether both operands come from float8 numbers


def has_float8(lowered: jax.stages.Lowered) -> bool:
    """Return True if some number of a program is float8."""
    return _FLOAT8.search(lowered.as_text()) is not None


def requests(lowered: jax.stages.Lowered) -> tuple[Request, ...]:
    """Return the products of each source line that asks for some in float8."""
    if not has_float8(lowered):
        return ()
    module: Any = lowered.compiler_ir("stablehlo")
    found = [_request(op) for op in _every(module.operation) if op.name == "stablehlo.dot_general"]
    lines = {each.source_line for each in found if each.float8}
    return tuple(dict.fromkeys(each for each in found if each.source_line in lines))


def asks_for_float8(asked: Iterable[Request], source_line: str | None, op_name: str | None) -> bool:
    """Return True if a compiled product is one that was asked for in float8.

    XLA's name of it ends in jax's. Where that is so of several products of the line, the longest names decide, and all
    of them must be asked for.
    """
    known = [each for each in asked if each.source_line == source_line and _ends_in(op_name or "", each.name)]
    longest = max((len(each.name) for each in known), default=0)
    decisive = [each.float8 for each in known if len(each.name) == longest]
    return bool(decisive) and all(decisive)


def _ends_in(op_name: str, name: str) -> bool:
    return op_name == name or op_name.endswith(f"/{name}")


def _every(op: Any) -> Iterator[Any]:
    for inner in (each.operation for region in op.regions for block in region for each in block):
        yield inner
        yield from _every(inner)


def _request(op: Any) -> Request:
    location = str(op.location)
    name, place = _NAME.search(location), _PLACE.search(location)
    float8 = all(_is_float8(operand) for operand in (*op.operands,)[:2])
    return Request(f"{place[1]}:{place[2]}" if place else "", name[1] if name else "", float8)


def _is_float8(value: Any) -> bool:
    """Return True if a value is in float8, or was before casts, scales and moves."""
    ahead, seen = [value], set[Any]()
    while ahead:
        if (value := ahead.pop()) in seen:
            continue
        seen.add(value)
        if _FLOAT8.search(str(value.type)):
            return True
        owner = getattr(value.owner, "operation", None)  # of a block's argument it is the block
        if owner is not None and owner.name in _MOVES:
            ahead += owner.operands
    return False
