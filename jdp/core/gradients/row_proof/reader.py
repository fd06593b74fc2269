"""Read two programs of one loss side by side, operation by operation: each value gets a state (`states.py`).

Calls, branches and loops are read here, single operations by the rules of `rules.py`, `shapes.py`, `products.py` and
`gathers.py`. Where the programs differ in their operations, such as in a Python loop over rows, nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from jax.extend.core import Jaxpr, Literal

from jdp.base.tree_paths import PACKAGE
from jdp.core.gradients.row_proof.gathers import gather, scatter
from jdp.core.gradients.row_proof.products import PRODUCTS
from jdp.core.gradients.row_proof.rules import Op, apply, dims_of, first_bad
from jdp.core.gradients.row_proof.shapes import SHAPES
from jdp.core.gradients.row_proof.states import (
    Const,
    Mixed,
    Pair,
    Pieces,
    Rows,
    RowSum,
    State,
    Unknown,
    moved,
    power_of,
    scales,
)
from jdp.core.tracing.graph import CALLS, called
from jdp.core.tracing.jaxprs import scan_counts, source_lines, user_line

PLACEWISE = ("optimization_barrier",)

_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter_max", "scatter_min", "scatter_mul")
RULES = {**SHAPES, **PRODUCTS, **dict.fromkeys(_SCATTERS, scatter), "gather": gather}


@dataclass(frozen=True)
class RowReader:
    """Reads two programs of one loss.

    Attributes:
        units: rows of each, or groups of rows that belong together.
        ratio: rows of the second over those of the first.
        caller: as in `Op`.
    """

    units: Pair
    ratio: float
    caller: Op | None = None

    def run(self, jaxpr: Jaxpr, other: Jaxpr, states: Sequence[State]) -> list[State]:
        """Return the states of a program's outputs, given those of its constants and inputs."""
        values = dict[Any, State](zip([*jaxpr.constvars, *jaxpr.invars], states, strict=True))
        return self.read_all(jaxpr, other, values)

    def read_all(self, jaxpr: Jaxpr, other: Jaxpr, values: dict[Any, State]) -> list[State]:
        """Fill in the state of every variable of `jaxpr`; return those of the outputs."""
        if [eqn.primitive for eqn in jaxpr.eqns] != [eqn.primitive for eqn in other.eqns]:
            line = user_line(jaxpr.eqns[0]) if jaxpr.eqns else "the loss"
            odd = Unknown("the loss runs other operations for another number of rows", line)
            values.update(dict.fromkeys((var for eqn in jaxpr.eqns for var in eqn.outvars), odd))
            return [odd for _ in jaxpr.outvars]
        for first, second in zip(jaxpr.eqns, other.eqns, strict=True):
            pairs = zip(first.invars, second.invars, strict=True)
            operands = [self._literal(a, b) if isinstance(a, Literal) else values[a] for a, b in pairs]
            op = Op(first, second, operands, self.units, self.ratio, self.caller)
            values.update(zip(first.outvars, self._results(op), strict=True))
        outputs = zip(jaxpr.outvars, other.outvars, strict=True)
        return [self._literal(a, b) if isinstance(a, Literal) else values[a] for a, b in outputs]

    def _literal(self, first: Any, second: Any) -> State:
        return self.constant(first.val, getattr(second, "val", first.val))

    def constant(self, first: Any, second: Any) -> Const:
        """Return the state of a number or an array that the programs hold."""
        known = Const(known=(lambda: first, lambda: second))
        try:
            counted = scales(first.shape, second.shape) if hasattr(first, "shape") else frozenset[int]()
            power = 0 if first is second or counted else power_of(known.values(), self.ratio)
        except (TypeError, ValueError):  # keys, tracers, other numbers of dimensions
            return Const(power=0 if first is second else None)
        return replace(known, varies=counted, power=power)

    def _results(self, op: Op) -> list[State]:
        name, count = op.name, len(op.eqn.outvars)
        if name in PLACEWISE:
            return list(op.operands)
        if name in CALLS:
            return self._called(op)
        if name in ("scan", "while", "cond"):
            if (bad := first_bad(op.operands)) is not None and not any(map(_has_rows, op.operands)):
                return [bad] * count
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](op)
        return [apply(op, RULES)] * count

    def _called(self, op: Op) -> list[State]:
        if op.name.startswith("custom_vjp") and not _is_of_library(op):
            unread = op.unknown("a gradient of the user's own (custom_vjp) is not read")
            return [first_bad(op.operands) or unread] * len(op.eqn.outvars)
        first, second = called(op.eqn), called(op.other)
        if first is None or second is None:
            return [op.unknown()] * len(op.eqn.outvars)
        return self._inner(op, first, second, op.operands)

    def _inner(self, op: Op, inner: Any, other: Any, states: Sequence[State]) -> list[State]:
        first, second = getattr(inner, "jaxpr", inner), getattr(other, "jaxpr", other)
        pairs = zip(getattr(inner, "consts", ()), getattr(other, "consts", ()), strict=True)
        return replace(self, caller=op).run(first, second, [*starmap(self.constant, pairs), *states])

    def _cond(self, op: Op) -> list[State]:
        index, *operands = op.operands
        if not isinstance(index, Const) or index.varies or index.power != 0:
            bad = index if isinstance(index, Mixed | Unknown) else op.unknown("rows decide on a branch")
            return [bad] * len(op.eqn.outvars)
        pairs = zip(op.params["branches"], op.other.params["branches"], strict=True)
        branches = [self._inner(op, *pair, operands) for pair in pairs]
        return [_join(op, states) for states in zip(*branches, strict=True)]

    def _while(self, op: Op) -> list[State]:
        tests, bodies = op.params["cond_nconsts"], op.params["body_nconsts"]
        first = tests + bodies
        carried = list(op.operands[first:])

        def body(carry: Sequence[State]) -> list[State]:
            given = [*op.operands[tests:first], *carry]
            return self._inner(op, op.params["body_jaxpr"], op.other.params["body_jaxpr"], given)

        carried = _fixpoint(op, carried, body)
        given = [*op.operands[:tests], *carried]
        [ends] = self._inner(op, op.params["cond_jaxpr"], op.other.params["cond_jaxpr"], given)
        if isinstance(ends, Rows) or (isinstance(ends, Const) and not ends.varies and ends.power == 0):
            return carried
        bad = op.unknown("rows decide how often a loop runs")
        return [state if isinstance(state, Mixed) else bad for state in carried]

    def _scan(self, op: Op) -> list[State]:
        first, carried = scan_counts(op.eqn)
        constants, start = list(op.operands[:first]), list(op.operands[first : first + carried])
        slices = [_first_round(op, state) for state in op.operands[first + carried :]]
        if any(0 in dims_of(state) for state in op.operands[first + carried :]):
            return self._scan_of_rows(op, constants, start, slices)

        def body(carry: Sequence[State]) -> list[State]:
            return self._inner(op, op.params["jaxpr"], op.other.params["jaxpr"], [*constants, *carry, *slices])

        if op.params["length"] != op.other.params["length"]:
            return self._scan_of_chunks(op, constants, start, slices)
        carry = _fixpoint(op, start, lambda carry: body(carry)[:carried])
        return [*carry, *(_stacked(state) for state in body(carry)[carried:])]

    def _scan_of_chunks(self, op: Op, constants: list[State], start: list[State], slices: list[State]) -> list[State]:
        """Read a loop over chunks of all rows, more of them where there are more rows: what is carried is their sum."""
        count, inner = len(start), op.params["jaxpr"]
        places = inner.jaxpr.invars[len(constants) : len(constants) + count]
        same = [a is b for a, b in zip(places, inner.jaxpr.outvars[:count], strict=True)]
        odd = op.unknown("a loop's length depends on the number of rows")
        zero = [RowSum(part="every") if isinstance(state, Const) and state.is_zero else odd for state in start]
        carry: list[State] = [state if kept else sums for state, sums, kept in zip(start, zero, same, strict=True)]
        slices = [replace(x, order=("chunk", x.place)) if isinstance(x, Rows) else x for x in slices]
        out = self._inner(op, inner, op.other.params["jaxpr"], [*constants, *carry, *slices])
        lengths = op.other.params["length"] / op.params["length"]
        more = {self.ratio: 1, 1 / self.ratio: -1}.get(lengths)
        ends: list[State] = [
            replace(after, part=None, power=after.power + more)
            if isinstance(after, RowSum) and after.part == "every" and more is not None and not kept
            else (after if kept or isinstance(after, Mixed) else odd)
            for after, kept in zip(out[:count], same, strict=True)
        ]
        return [*ends, *(odd for _ in out[count:])]

    def _scan_of_rows(self, op: Op, constants: list[State], start: list[State], slices: list[State]) -> list[State]:
        """Read a loop over rows: what is carried is a sum so far, or does not change."""
        count, inner = len(start), op.params["jaxpr"]
        places = inner.jaxpr.invars[len(constants) : len(constants) + count]
        same = [a is b for a, b in zip(places, inner.jaxpr.outvars[:count], strict=True)]

        def begin(state: State, unchanged: bool) -> State:
            if unchanged:
                return state
            return RowSum(part="all") if isinstance(state, Const) and state.is_zero else op.unknown("from row to row")

        carry = [begin(*pair) for pair in zip(start, same, strict=True)]
        if any(isinstance(state, RowSum) and state.dims for state in slices):
            return [op.unknown()] * len(op.eqn.outvars)
        out = self._inner(op, inner, op.other.params["jaxpr"], [*constants, *carry, *slices])
        ends = list[State]()
        for before, after, unchanged in zip(carry, out[:count], same, strict=True):
            if unchanged or isinstance(after, Mixed | Unknown):
                ends.append(after)
            elif isinstance(after, RowSum) and after.part == "all" and isinstance(before, RowSum):
                ends.append(replace(after, part=None))
            else:
                ends.append(op.mixed("a value is carried from row to row"))
        layout = next((x for x in op.operands[len(constants) + count :] if isinstance(x, Rows) and 0 in x.dims), None)
        return [*ends, *(_stacked_rows(op, state, layout) for state in out[count:])]


def _is_of_library(op: Op) -> bool:
    """Return True if an installed package or jdp calls a function with a gradient of its own."""
    line = next(iter(source_lines(op.eqn)), "")
    return "site-packages" in line or line.startswith(f"{PACKAGE}{os.sep}")


def _has_rows(state: State) -> bool:
    return isinstance(state, Rows | RowSum | Const)


def _join(op: Op, states: Sequence[State]) -> State:
    """Return what is true of each of several states."""
    if (bad := first_bad(states)) is not None:
        return bad
    rest = [state for state in states if not isinstance(state, Const)]
    constants = [state for state in states if isinstance(state, Const)]
    if not rest:
        powers = {state.power for state in constants}
        values = constants[0] if all(state is constants[0] for state in constants) else None
        varies = frozenset[int]().union(*(state.varies for state in constants))
        return values or Const(varies, powers.pop() if len(powers) == 1 else None)
    same = all(state == rest[0] for state in rest)
    if isinstance(rest[0], RowSum):
        fine = same and all(state.is_zero for state in constants)
        return rest[0] if fine else op.unknown()
    fine = same and not any(state.varies or state.power != 0 for state in constants)
    return rest[0] if fine and isinstance(rest[0], Rows) else op.unknown("places of rows change from round to round")


def _fixpoint(op: Op, carry: list[State], body: Any) -> list[State]:
    """Return states of what a loop carries that its body keeps."""
    for _ in range(len(carry) + 3):
        joined = [_join_carried(op, *pair) for pair in zip(carry, body(carry), strict=True)]
        if joined == carry and all(_is_known(a) == _is_known(b) for a, b in zip(joined, carry, strict=True)):
            return joined
        carry = joined
    return [op.unknown()] * len(carry)


def _join_carried(op: Op, before: State, after: State) -> State:
    return before if before is after else _join(op, (before, after))


def _is_known(state: State) -> bool:
    return isinstance(state, Const) and state.known is not None


def _first_round(op: Op, state: State) -> State:
    """Return the state of what one round of a scan gets of an operand."""
    if isinstance(state, Const):
        if 0 in state.varies:
            return op.unknown("a row's number counts")
        return Const(frozenset(dim - 1 for dim in state.varies), state.power)
    if isinstance(state, RowSum):
        return replace(state, dims=frozenset(dim - 1 for dim in state.dims))
    if isinstance(state, Rows):
        dims = tuple(dim - 1 for dim in state.dims if dim)
        return replace(state, dims=dims, order=("loop", state.place)) if 0 in state.dims else replace(state, dims=dims)
    return op.unknown() if isinstance(state, Pieces) else state


def _stacked(state: State) -> State:
    """Return the state of what the rounds of a scan give, one after another."""
    if isinstance(state, Const | Rows | RowSum):
        dims = state.varies if isinstance(state, Const) else state.dims
        shifted = moved(state, {dim: dim + 1 for dim in dims})
        return replace(shifted, known=None) if isinstance(shifted, Const) else shifted
    return state


def _stacked_rows(op: Op, state: State, layout: Rows | None) -> State:
    state = _stacked(state)
    if isinstance(state, Rows):
        if layout is not None and state.order == ("loop", layout.place):
            return replace(layout, power=state.power)
        return op.unknown("from row to row")
    if isinstance(state, RowSum):
        fine = state.part == "part"
        return RowSum(state.dims | {0}, state.power) if fine else op.mixed("a value is carried from row to row")
    return state
