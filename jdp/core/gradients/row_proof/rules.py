"""How operations carry on what a value depends on (`states.py`): a rule for each primitive that a loss may contain.

What is certain to combine rows in another way than by a sum gives `Mixed`; what no rule covers gives `Unknown`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jdp.core.gradients.row_proof.states import (
    LARGEST,
    Const,
    Known,
    Mixed,
    Pair,
    Pieces,
    Rows,
    RowSum,
    Shapes,
    State,
    Unknown,
    power_of,
    scales,
)
from jdp.core.tracing.jaxprs import ELEMENTWISE, bind, source_lines, user_line

MORE_ELEMENTWISE = frozenset(
    """
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitcast_convert_type clz complex conj cosh digamma erfc
    igamma igammac imag lgamma name one_minus_square random_clone random_unwrap random_wrap real
    regularized_incomplete_beta optimization_barrier polygamma population_count reducible_barrier sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sinh zeta
    """.split()  # noqa: SIM905
)
KEEPS = frozenset(
    "neg convert_element_type copy copy_p name reduce_precision stop_gradient real sharding_constraint".split()  # noqa: SIM905
)
"""Operations on one value that keep its power, and sums over rows."""


STATISTICS = "a batch norm takes its statistics over rows"
_NORMS = ("normalization.py", "batch_norm.py", "norms.py")


@dataclass(frozen=True)
class Op:
    """An operation in both traces, and what its operands depend on.

    Attributes:
        eqn, other: the operation in the first and in the second trace.
        operands: a state for each operand.
        units: rows of each trace, or groups of rows that belong together.
        ratio: rows of the second trace over those of the first.
        caller: the operation that runs this one, which may have a source line where this has none.
    """

    eqn: JaxprEqn
    other: JaxprEqn
    operands: Sequence[State]
    units: Pair
    ratio: float
    caller: Op | None = None

    @functools.cached_property
    def name(self) -> str:
        return self.eqn.primitive.name

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def shape(self, i: int) -> tuple[int, ...]:
        return self.eqn.invars[i].aval.shape  # pyright: ignore[reportAttributeAccessIssue]

    def shapes(self, i: int) -> Shapes:
        return self.shape(i), self.other.invars[i].aval.shape  # pyright: ignore[reportAttributeAccessIssue]

    @functools.cached_property
    def out_shapes(self) -> Shapes:
        return getattr(self.eqn.outvars[0].aval, "shape", ()), getattr(self.other.outvars[0].aval, "shape", ())

    def counts(self, i: int) -> frozenset[int]:
        """Return the dimensions of an operand that count rows."""
        return scales(*self.shapes(i))

    def growth(self, i: int, axes: Collection[int]) -> int | None:
        """Return how the number of elements along some of an operand's dimensions grows with the rows."""
        sizes = [math.prod(shape[dim] for dim in axes) for shape in self.shapes(i)]
        powers = {1.0: 0, self.ratio: 1, 1 / self.ratio: -1, self.ratio**2: 2}
        return powers.get(sizes[1] / sizes[0]) if sizes[0] else None

    @property
    def line(self) -> str:
        line = user_line(self.eqn)
        return self.caller.line if self.caller is not None and "(" not in line else line

    def mixed(self, why: str) -> Mixed:
        of_norm = any(file in line for line in source_lines(self.eqn) for file in _NORMS)
        return Mixed(STATISTICS if of_norm else why, self.line)

    def unknown(self, why: str | None = None) -> Unknown:
        return Unknown(why or f"what {self.name} makes of rows is not known", self.line)

    def known(self, states: Sequence[State]) -> Known | None:
        """Return how to compute the result, where all operands are known."""
        ways = [state.known for state in states if isinstance(state, Const) and state.known]
        if len(ways) < len(states) or max(map(math.prod, self.out_shapes)) > LARGEST or len(self.eqn.outvars) > 1:
            return None

        def compute(eqn: JaxprEqn, which: int) -> Any:
            with jax.ensure_compile_time_eval():
                return bind(eqn, [way[which]() for way in ways])[0]

        return functools.cache(lambda: compute(self.eqn, 0)), functools.cache(lambda: compute(self.other, 1))


Rule = Callable[[Op], State]
"""What an operation's results depend on."""


def first_bad(states: Sequence[State]) -> State | None:
    """Return the first state that nothing can be said of any more: `Mixed` before `Unknown`."""
    kinds = list(map(type, states))
    kind = Mixed if Mixed in kinds else Unknown
    return states[kinds.index(kind)] if kind in kinds else None


def apply(op: Op, rules: Mapping[str, Rule]) -> State:
    """Return the state of an operation's results, the same for all of them."""
    name, operands = op.name, op.operands
    if (bad := first_bad(operands)) is not None:
        return bad
    kinds = set(map(type, operands))
    if Pieces in kinds and name not in ("gather", "convert_element_type"):
        return op.unknown("a row's number counts")
    if name in rules:
        state = rules[name](op)
    elif name in ELEMENTWISE or name in MORE_ELEMENTWISE:
        state = elementwise(op)
    elif kinds <= {Const} and not any(map(dims_of, operands)) and not any(scales(*op.out_shapes)):
        state = Const(power=0 if {getattr(x, "power", None) for x in operands} <= {0} else None)
    else:
        state = op.unknown()
    if isinstance(state, Const):
        known = op.known(operands)
        if state.power is None and known is not None and not op.out_shapes[0]:
            state = replace(state, power=power_of(Const(known=known).values(), op.ratio))
        state = _that_varies(replace(state, known=known))
    return state


def _that_varies(state: Const) -> Const:
    """Return the state without dimensions along which the elements turn out to be equal."""
    values = state.values() if state.varies else None
    if values is None or max(value.size for value in values) > LARGEST >> 6:
        return state
    same = {dim for dim in state.varies if all(np.array_equal(v, v.take([0] * v.shape[dim], dim)) for v in values)}
    return replace(state, varies=state.varies - same)


# One element of each operand makes one element of the result.


def elementwise(op: Op) -> State:
    states = op.operands
    if str(op.params.get("y")) != str(op.other.params.get("y")):  # the exponent of integer_pow
        return op.unknown("single rows count by how many rows there are")
    if op.name == "convert_element_type" and isinstance(states[0], Pieces):
        return states[0]
    sums, rows, varies = _by_kind(states)
    if not sums and not rows:
        return Const(varies, _power(op, states))
    if varies:
        return op.unknown("a row's number counts")
    if sums:
        return _of_sums(op, sums, rows)
    if len(rows) > 1 and len({state.place for state in rows}) > 1:
        return op.mixed("rows are compared with other rows")
    power = _power(op, states)
    if power is None:
        return op.unknown("single rows count by how many rows there are")
    return replace(rows[0], power=power)


def _by_kind(states: Sequence[State]) -> tuple[list[RowSum], list[Rows], frozenset[int]]:
    """Return the sums, the rows, and the dimensions along which constants vary by row."""
    sums, rows, varies = list[RowSum](), list[Rows](), frozenset[int]()
    for state in states:
        if isinstance(state, RowSum):
            sums.append(state)
        elif isinstance(state, Rows):
            rows.append(state)
        elif isinstance(state, Const):
            varies |= state.varies
    return sums, rows, varies


def _power(op: Op, states: Sequence[State]) -> int | None:
    """Return the power of an elementwise result; None if it grows in no simple way."""
    powers = [getattr(state, "power", None) for state in states]
    if op.name == "mul" and None not in powers:
        return sum(powers)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if op.name == "div" and None not in powers:
        return powers[0] - powers[1]  # pyright: ignore[reportOptionalOperand]
    if op.name in KEEPS:
        return powers[0]
    if op.name in ("add", "sub", "add_any", "max", "min", "select_n"):
        terms = states[1:] if op.name == "select_n" else states
        return common_power(terms) if op.name != "select_n" or powers[0] == 0 else None
    return 0 if set(powers) == {0} else None


def common_power(terms: Sequence[State]) -> int | None:
    """Return the power that all terms have but zeros; None if they differ."""
    powers = {getattr(state, "power", None) for state in terms}
    if len(powers) > 1:
        powers = {getattr(x, "power", None) for x in terms if not (isinstance(x, Const) and x.is_zero)}
    return powers.pop() if len(powers) == 1 else None


def _of_sums(op: Op, sums: list[RowSum], rows: list[Rows]) -> State:
    """Return the state of a function of sums over rows: a sum if it is linear in them."""
    first, states = sums[0], op.operands
    nonlinear = op.mixed("a sum over rows enters a product, a quotient or another function that is not linear")
    if op.name in KEEPS:
        kinds = [var.aval.dtype.kind for var in (op.eqn.invars[0], op.eqn.outvars[0])]  # pyright: ignore[reportAttributeAccessIssue]
        return nonlinear if kinds[1] == "b" or (kinds[1] in "iu" and kinds[0] not in "iub") else first
    if op.name in ("add", "sub", "add_any"):
        return _sum_of_terms(op, sums, rows)
    if op.name == "select_n":
        cases = [x for x in states[1:] if not (isinstance(x, Const) and x.is_zero)]
        same = isinstance(states[0], Const) and len(set(cases)) == 1 and isinstance(cases[0], RowSum)
        return cases[0] if same and first.part not in ("all", "every") else nonlinear
    scaled = op.name == "mul" or (op.name == "div" and isinstance(states[0], RowSum))
    if not scaled or len(sums) > 1 or rows or first.part in ("all", "every"):
        return nonlinear
    power = _power(op, states)
    return op.unknown("a factor grows with the rows in no simple way") if power is None else replace(first, power=power)


def _sum_of_terms(op: Op, sums: list[RowSum], rows: list[Rows]) -> State:
    """Return the state of sums over rows and other terms added up."""
    parts = {state.part for state in sums} | ({"part"} if rows else set())
    if parts == {"every", "chunk"}:
        parts = {"every"}
    if rows and (any(x.dims for x in rows) or parts - {"part", "all"}):
        return op.mixed("a sum over rows meets single rows")
    if len({frozenset(state.dims) for state in (*sums, *rows)}) > 1 or (len(parts) > 1 and parts != {"part", "all"}):
        return op.unknown("sums over different rows are added")
    if "all" in parts and op.name == "sub" and not isinstance(op.operands[0], RowSum):
        return op.unknown()
    constants = [x for x in op.operands if isinstance(x, Const)]
    powers = {state.power for state in (*sums, *rows)}
    if len({state.power for state in sums}) > 1 and parts != {"every"}:
        return op.mixed("a sum and a mean over rows are added")
    if parts == {"every"} and len({state.power for state in sums if state.part == "chunk"}) > 1:
        return op.unknown()
    odd = [c for c in constants if c.power is None or {c.power - 1} != powers or sums[0].dims]
    if (len(powers) > 1 and parts != {"every"}) or not all(constant.is_zero for constant in odd):
        return op.unknown("a sum over rows and what is none are added: they grow differently with the rows")
    if parts != {None} and not all(constant.is_zero for constant in constants):
        return op.unknown("a number is added for each round of a loop over rows")
    if parts == {"every"}:
        powers = {state.power for state in sums if state.part == "chunk"} or powers
        return RowSum(sums[0].dims, powers.pop(), "every")
    return replace(sums[0], part="all" if "all" in parts else sums[0].part)


def joined(op: Op, states: Sequence[State]) -> State:
    """Return the state of values that are combined place by place, in a way that need not be linear."""
    sums, rows, varies = _by_kind(states)
    if sums:
        return op.mixed("a sum over rows enters a function that is not linear")
    powers = {state.power for state in states if isinstance(state, Rows | Const)}
    if not rows:
        return Const(varies, powers.pop() if len(powers) == 1 else None)
    if len({state.place for state in rows}) > 1:
        return op.mixed("rows are compared with other rows")
    return op.unknown("a row's number counts") if varies or powers != {0} else rows[0]


def dims_of(state: State) -> frozenset[int]:
    if isinstance(state, Rows):
        return frozenset(state.dims)
    if isinstance(state, RowSum):
        return state.dims
    return state.varies if isinstance(state, Const) else frozenset()


def part_of(state: Rows) -> str | None:
    """Return which part of a sum rows make: in a loop over rows, or over chunks of all of them, that of a round."""
    kind = state.order[0] if isinstance(state.order, tuple) else None
    return {"loop": "part", "chunk": "chunk"}.get(kind or "")


def is_arange(state: State, dims: tuple[int, ...]) -> bool:
    """Return True for a known array that numbers the places of one dimension, the same along the others."""
    values = state.values() if isinstance(state, Const) else None
    if values is None or len(dims) != 1 or values[0].ndim <= dims[0]:
        return False
    numbers = [np.arange(v.shape[dims[0]]).reshape([-1 if d == dims[0] else 1 for d in range(v.ndim)]) for v in values]
    return all(bool(np.all(value == each)) for value, each in zip(values, numbers, strict=True))
