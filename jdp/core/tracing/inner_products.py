"""Inner products of arrays, as sums in the arrays' own shapes.

`jnp.vdot` makes one row of each array first. XLA gathers a sharded array for that, unless it is sharded on its first
dimension. A sum of products sends one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr

from jdp.core.tracing.graph import FORWARD, bodies, called, closed, run, run_bodies
from jdp.core.tracing.jaxprs import bind, every_eqn


@dataclass(frozen=True)
class _Row:
    """An array that a program makes a row of."""

    array: Any


def takes_inner_products(program: ClosedJaxpr) -> bool:
    """Return True for a program that has a product of two rows."""
    return any(map(_is_of_rows, every_eqn(program.jaxpr)))


def with_sums(program: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    """Run a program with inner products of reshaped arrays as sums in the arrays' own shapes."""
    return [_array(x) for x in run(program, arrays, _operation)]


def _body(program: ClosedJaxpr, *arrays: Any) -> list[Any]:
    return with_sums(program, arrays)


def _is_of_rows(eqn: Any) -> bool:
    return eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == () and eqn.invars[0].aval.ndim == 1


def _array(x: Any) -> Any:
    return x.array.reshape(-1) if isinstance(x, _Row) else x


def _operation(eqn: Any, operands: list[Any]) -> list[Any]:
    if _is_of_rows(eqn) and all(isinstance(x, _Row) for x in operands):
        one, other = (x.array for x in operands)
        if one.shape == other.shape:
            dtype = eqn.outvars[0].aval.dtype
            return [(one.astype(dtype) * other.astype(dtype)).sum()]
    arrays = [_array(x) for x in operands]
    if eqn.primitive.name == "reshape" and eqn.outvars[0].aval.ndim == 1 and arrays[0].ndim > 1:
        return [_Row(arrays[0])]
    if (inner := called(eqn, FORWARD)) is not None:
        return with_sums(inner, arrays)
    programs = [program for program, _ in bodies(eqn, arrays, ())]
    if any(map(takes_inner_products, programs)):
        return run_bodies(eqn, arrays, [partial(_body, closed(program)) for program in programs])
    return bind(eqn, arrays)
