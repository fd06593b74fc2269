"""Prove from a loss' program that it is a sum over rows, or find the line where it mixes them.

The loss is traced for two numbers of rows, and both programs are read side by side (`reader.py`). A total and a weight
that are sums over rows, and grow alike with the rows, make Σtotal / Σweight the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from jdp.core.gradients.loss_trace import LossTrace
from jdp.core.gradients.row_proof.quotients import Quotient, Reading, quotient_of
from jdp.core.gradients.row_proof.reader import RowReader
from jdp.core.gradients.row_proof.states import Const, Mixed, Rows, RowSum, State, Unknown


@dataclass(frozen=True)
class Proof:
    """What a loss' program says of its total and weight.

    Attributes:
        verdict: "sum", "mixes", or "unknown".
        why: of "mixes" and "unknown": a sentence's part with the source line.
        of_metrics: True if the metrics are sums over rows too, or means of them.
        means: True if total and weight do not grow with the rows, such as a mean and 1.
        reading: of a scalar that ends in a quotient of sums how it is read; None for other losses.
    """

    verdict: str
    why: str = ""
    of_metrics: bool = True
    means: bool = False
    reading: Reading | None = None


def ends_in_quotient(trace: LossTrace) -> bool:
    """Return True for a scalar loss that ends in a quotient whose denominator is free of parameters."""
    return not trace.is_sum and _quotient(trace, trace.written_out) is not None


def _quotient(trace: LossTrace, program: ClosedJaxpr) -> Quotient | None:
    params, batch = ([program.jaxpr.invars[i] for i in places] for places in trace.inputs)
    return quotient_of(program, params, batch, program.jaxpr.outvars[0])


def prove(first: LossTrace, second: LossTrace, group: int = 1) -> Proof:
    """Read a loss' program, traced for two numbers of rows."""
    programs = [each.closed if each.is_sum else each.written_out for each in (first, second)]
    try:
        return _proof(first, second, [programs[0], programs[1]], group)
    except Exception as error:  # a program of a form that nobody has thought of: the loss is tried on values instead
        return Proof("unknown", f"its program could not be read: {type(error).__name__}: {error}"[:300], False)


def _tail_growth(
    reader: RowReader, program: ClosedJaxpr, other: ClosedJaxpr, quotient: Quotient, values: dict[Any, State]
) -> int | None:
    """Return how a scalar grows with the rows by what follows its quotient: 1, as it is counted by its rows."""
    pairs = zip(program.jaxpr.eqns, other.jaxpr.eqns, strict=True)
    others = {eqn.outvars[0]: second for eqn, second in pairs if eqn.outvars}

    def growth(var: Any) -> int | None:
        eqn, found = quotient.tail[var], list[int | None]()
        inside = [not isinstance(atom, Literal) and atom in quotient.tail for atom in eqn.invars]
        if not any(inside):
            return 0
        for atom, second, is_tail in zip(eqn.invars, others[var].invars, inside, strict=True):
            state = reader.constant(atom.val, getattr(second, "val", atom.val)) if isinstance(atom, Literal) else None
            state = values[atom] if state is None and not is_tail else state
            found.append(growth(atom) if is_tail else (state.power if isinstance(state, Const) else None))
        if None in found:
            return None
        name, powers = eqn.primitive.name, [power for power in found if power is not None]
        if name == "mul":
            return sum(powers)
        if name == "div":
            return powers[0] - powers[1]
        return powers[0] if len(set(powers)) == 1 else None

    return growth(program.jaxpr.outvars[0])


def _proof(first: LossTrace, second: LossTrace, programs: Sequence[ClosedJaxpr], group: int) -> Proof:
    (program, other), rows = programs, second.rows
    reader = RowReader((first.rows // group, rows // group), rows / first.rows)
    states: list[State] = [reader.constant(*pair) for pair in zip(program.consts, other.consts, strict=True)]
    _, batch = first.inputs
    inputs = program.jaxpr.invars
    states += [
        Rows((0,), inner=(group, group)) if batch.start <= i < batch.stop else Const() for i in range(len(inputs))
    ]
    values = dict[Any, State](zip([*program.jaxpr.constvars, *inputs], states, strict=True))
    total, weight, *metrics = reader.read_all(program.jaxpr, other.jaxpr, values)
    metrics, outputs = metrics[: len(metrics) - first.outputs], metrics[len(metrics) - first.outputs :]
    by_row = Rows((0,), inner=(group, group))
    for state in outputs:
        if isinstance(state, Mixed):
            return Proof("mixes", f"in aux, {state.why}, at {state.line}")
        if state not in (by_row, Const()):
            return Proof("unknown", "an array of aux is not of single rows, as far as its program tells")
    if not first.is_sum:
        quotient = _quotient(first, program)
        if quotient is not None and not isinstance(total, RowSum):
            proofs = [_verdict(values[n], values[quotient.denominator]) for n in quotient.numerators]
            proof = next((proof for proof in proofs if proof.verdict != "sum"), proofs[0])
            again = _quotient(second, other)
            if (
                again is None
                or again.guards != quotient.guards
                or _tail_growth(reader, program, other, quotient, values) != 1
            ):
                return Proof("unknown", "what is done to the quotient depends on the number of rows")
            if proof.means and quotient.guards:
                return Proof("unknown", "a mean is divided by a mean and a constant")
            return replace(proof, reading=Reading(quotient.guards, proof.means)) if proof.verdict == "sum" else proof
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    of_metrics = all(_verdict(*pair).verdict == "sum" for pair in pairs)
    return replace(_verdict(total, weight), of_metrics=of_metrics)


def _verdict(total: State, weight: State) -> Proof:
    for state, noun in ((total, "total"), (weight, "weight")):
        if isinstance(state, Mixed | Unknown):
            verdict = "mixes" if isinstance(state, Mixed) else "unknown"
            return Proof(verdict, f"{state.why}, at {state.line}")
        if _growth(state) is None:
            return Proof("unknown", f"the {noun} is no sum over all rows, as far as its program tells")
    if _growth(total) != _growth(weight):
        if isinstance(weight, Const) or isinstance(total, Const):
            noun = "weight" if isinstance(weight, Const) else "total"
            return Proof("mixes", f"the {noun} does not grow with the rows as the {_OTHER[noun]} does")
        return Proof("mixes", "total and weight grow differently with the rows, such as a sum and a mean")
    return Proof("sum", means=_growth(total) == 0) if _growth(total) in (0, 1) else Proof("unknown", "a factor grows")


_OTHER = {"total": "weight", "weight": "total"}


def _growth(state: State) -> int | None:
    """Return how a scalar grows with the rows: 1 as they do, 0 not at all; None for no sum over rows."""
    if isinstance(state, Const):
        return state.power if not state.varies else None
    if isinstance(state, RowSum) and not state.dims and state.part is None:
        return state.power + 1
    return None
