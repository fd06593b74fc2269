"""A loss that returns `(nll * mask).sum() / mask.sum()`, read as the total and the weight that it is made of.

Such a scalar is no sum over examples, and no mean: on parts of the batch it has another denominator. Where it ends in a
quotient whose denominator is free of parameters, its program is run so that it returns total and weight instead. The
denominator may be `max(sum, c)` or `sum + c`; then that is done with the sum over the whole batch (`Reading`). What
follows the quotient is linear: factors, terms free of the batch, other quotients with the same denominator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jdp.core.tracing.graph import PLAIN, called, run
from jdp.core.tracing.jaxprs import bind

_KEEPS = frozenset(("convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum"))
Guards = tuple[tuple[str, float], ...]
"""What is done to a denominator's sum, innermost first: ("max", c) or ("add", c)."""


@dataclass(frozen=True)
class Reading:
    """How a scalar loss is read as a total and a weight.

    Attributes:
        guards: what is done to the denominator's sum over the whole batch.
        of_means: True if numerator and denominator are means, to be counted by their rows.
    """

    guards: Guards = ()
    of_means: bool = False

    def divisor(self, weight: jax.Array) -> jax.Array:
        """Return what the loss divides by, of the sum over the whole batch."""
        for name, number in self.guards:
            weight = jnp.maximum(weight, number) if name == "max" else weight + number
        return weight


@dataclass(frozen=True)
class Quotient:
    """The quotient that a scalar loss ends in.

    Attributes:
        denominator: the variable that is summed over the batch.
        guarded: the variable that is divided by.
        numerators: of each quotient; all have this denominator.
        tail: the operations from the quotients to the loss, by what they make.
        guards: what is done to the denominator before it is divided by.
    """

    denominator: Any
    guarded: Any
    numerators: tuple[Any, ...]
    tail: dict[Any, JaxprEqn]
    guards: Guards


def flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program with the functions that it only calls written out."""

    def operation(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        inner = called(eqn, PLAIN)
        return bind(eqn, operands) if inner is None else run(inner, operands, operation)

    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in closed.in_avals)
    return jax.make_jaxpr(lambda *arguments: run(closed, arguments, operation))(*shapes)


def quotient_of(closed: ClosedJaxpr, params: Sequence[Any], batch: Sequence[Any], result: Any) -> Quotient | None:
    """Return the quotient that a scalar `result` of a flattened program ends in; None if it does not."""
    return _Finder(closed, params, batch).find(result)


class _Finder:
    def __init__(self, closed: ClosedJaxpr, params: Sequence[Any], batch: Sequence[Any]) -> None:
        eqns = closed.jaxpr.eqns
        self.makers = {var: eqn for eqn in eqns for var in eqn.outvars}
        self.of_params, self.of_batch = (_reached(eqns, found) for found in (params, batch))
        self.digests: dict[Any, str] = {}
        self.tail: dict[Any, JaxprEqn] = {}
        self.quotients: list[tuple[Any, Any]] = []

    def find(self, result: Any) -> Quotient | None:
        if not self._follow(result) or not self.quotients:
            return None
        divisors = [divisor for _, divisor in self.quotients]
        if len({self._digest(divisor) for divisor in divisors}) > 1:
            return None
        denominator, guards = divisors[0], list[tuple[str, float]]()
        while (step := self._guard(denominator)) is not None:
            denominator, guard = step
            guards.insert(0, guard)
        added = any(eqn.primitive.name in ("add", "sub") and self._constants(eqn) for eqn in self.tail.values())
        if guards and added:
            return None
        return Quotient(denominator, divisors[0], tuple(n for n, _ in self.quotients), self.tail, tuple(guards))

    def _constants(self, eqn: JaxprEqn) -> list[Any]:
        return [atom for atom in eqn.invars if not self._needs_batch(atom)]

    def _follow(self, var: Any) -> bool:
        """Record the linear operations that lead from quotients to `var`; return False if others do."""
        eqn = self.makers.get(var) if not isinstance(var, Literal) else None
        if eqn is None or getattr(var.aval, "shape", None) != ():
            return False
        name, operands = eqn.primitive.name, eqn.invars
        if name == "div" and self._is_weight(operands[1]):
            self.quotients.append((operands[0], operands[1]))
        elif name in _KEEPS or name == "neg":
            if operands[0].aval.shape not in ((), (1,)) or not self._follow(operands[0]):  # pyright: ignore[reportAttributeAccessIssue]
                return False
        elif name in ("mul", "add", "sub", "div", "add_any"):
            left = [atom for atom in operands if self._needs_batch(atom)]
            if (name == "mul" and len(left) > 1) or (name == "div" and left != [operands[0]]):
                return False
            if not all(map(self._follow, left)):
                return False
        else:
            return False
        self.tail[var] = eqn
        return True

    def _is_weight(self, atom: Any) -> bool:
        return self._needs_batch(atom) and atom not in self.of_params and not atom.aval.shape

    def _needs_batch(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.of_batch

    def _guard(self, var: Any) -> tuple[Any, tuple[str, float]] | None:
        """Return what a `max(x, c)` or `x + c` is of, and that; None for another value. Casts are looked through."""
        eqn = self.makers.get(var)
        if eqn is None:
            return None
        if eqn.primitive.name in ("convert_element_type", "copy"):
            inner = eqn.invars[0]
            return self._guard(inner) if not isinstance(inner, Literal) else None
        if eqn.primitive.name not in ("max", "add"):
            return None
        numbers = [number for atom in eqn.invars if (number := self._number(atom)) is not None]
        others = [atom for atom in eqn.invars if self._number(atom) is None]
        if len(others) != 1 or others[0].aval.shape or not self._needs_batch(others[0]):  # pyright: ignore[reportAttributeAccessIssue]
            return None
        return others[0], (eqn.primitive.name, numbers[0])

    def _number(self, atom: Any) -> float | None:
        """Return a scalar that the program holds."""
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        eqn = self.makers.get(atom)
        if eqn is None or eqn.primitive.name not in ("convert_element_type", "copy"):
            return None
        return self._number(eqn.invars[0])

    def _digest(self, atom: Any) -> str:
        """Return a text that is equal for variables of the same computation."""
        if isinstance(atom, Literal):
            return repr(atom.val)
        if atom not in self.digests:
            eqn = self.makers.get(atom)
            if eqn is None:
                self.digests[atom] = f"input {id(atom)}"
            else:
                operands = [self._digest(each) for each in eqn.invars]
                place = eqn.outvars.index(atom)
                text = repr((eqn.primitive.name, place, sorted((k, str(v)) for k, v in eqn.params.items()), operands))
                self.digests[atom] = hashlib.sha256(text.encode()).hexdigest()
        return self.digests[atom]


def _reached(eqns: Sequence[JaxprEqn], variables: Sequence[Any]) -> set[Any]:
    """Return the variables that depend on `variables`."""
    found = set(variables)
    for eqn in eqns:
        if any(not isinstance(atom, Literal) and atom in found for atom in eqn.invars):
            found.update(eqn.outvars)
    return found


def sums_of_quotient(
    program: ClosedJaxpr, params: range, batch: range, place: int, arguments: Sequence[Any]
) -> tuple[Any, Any, list[Any]]:
    """Run a program so that total and weight of the scalar at `place` of its results come out; and all results."""
    closed = flattened(program)
    variables = closed.jaxpr.invars
    result = closed.jaxpr.outvars[place]
    quotient = quotient_of(closed, [variables[i] for i in params], [variables[i] for i in batch], result)
    assert quotient is not None, "the loss ended in a quotient when it was first traced"
    values = dict(zip([*closed.jaxpr.constvars, *variables], [*closed.consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        if any(var in quotient.tail for var in eqn.outvars):
            values[eqn.outvars[0]] = _times_denominator(eqn, quotient, read)
        else:
            values.update(zip(eqn.outvars, bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return read(result), read(quotient.denominator), [read(atom) for atom in closed.jaxpr.outvars]


def _times_denominator(eqn: JaxprEqn, quotient: Quotient, read: Callable[[Any], Any]) -> Any:
    """Return the result of an operation of the tail, times the denominator; so are its operands that depend on it."""
    name, operands = eqn.primitive.name, [read(atom) for atom in eqn.invars]
    of_tail = [not isinstance(atom, Literal) and atom in quotient.tail for atom in eqn.invars]
    if not any(of_tail):
        return operands[0].astype(eqn.outvars[0].aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    if name in ("add", "sub", "add_any"):
        weight = read(quotient.denominator)
        operands = [x if inside else (x * weight).astype(x.dtype) for x, inside in zip(operands, of_tail, strict=True)]
    return bind(eqn, operands)[0]
