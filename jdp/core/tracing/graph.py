"""A traced program as a graph: one reader, one runner, and one list of the operations that only call a function.

`read` returns the values and operations of a program, its calls inlined; loops and conditions stay operations, whose
inner programs `bodies` gives. `run` evaluates a program with a hook for each operation, `evaluate` operations of a
graph, and `run_bodies` a loop, condition or call around other functions.

From jax 0.12 on ClosedJaxpr is Jaxpr: its `jaxpr` is itself, and wrapping it again drops its constants. So nothing
outside of this file and `jaxprs.py` asks which of the two an operation holds: `closed` gives the one with constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jdp.core.tracing.jaxprs import bind, scan_counts

_T = TypeVar("_T")
PLAIN = frozenset(("jit", "closed_call", "call"))
"""Calls that are nothing but the function they call."""
REMATERIALISED = frozenset(("remat2", "checkpoint"))
"""Calls that say which of the function's values the backward pass computes again."""
WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))
"""Calls of a function with a derivative of its own."""
CALLS = PLAIN | WITH_RULES | REMATERIALISED | {"composite"}
"""Operations that only call a function: its operands are theirs, in order, and so are its results."""


@dataclass(eq=False, slots=True)
class Value:
    """A value of a program; compared by identity.

    Attributes:
        aval: its shape and dtype.
        constant: the number or array, where the program holds it.
        is_literal: the program has it in its text, and not beside it.
        maker: the operation that computes it; None for an input or a constant.
    """

    aval: Any
    constant: Any = None
    is_literal: bool = False
    maker: Operation | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """An operation of a program: its place in it, the equation, operands and results; compared by identity."""

    place: int
    eqn: JaxprEqn
    operands: list[Value]
    results: list[Value]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclass(frozen=True, eq=False)
class Graph:
    """A program that was read: its inputs, its operations in order, and its results."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


Env = dict[Value, Any]
"""What is known of the values of a graph."""


# Read.


def closed(program: Any) -> ClosedJaxpr:
    """Return a program with its constants, of what an operation holds: from 0.12 on the same class as without."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def called(eqn: JaxprEqn, names: Collection[str] = CALLS) -> ClosedJaxpr | None:
    """Return the program that an operation only calls; None if it is none of `names`."""
    if eqn.primitive.name not in names:
        return None
    program: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return None if program is None else closed(program)


def read(program: ClosedJaxpr, calls: Collection[str] = CALLS) -> Graph:
    """Read a program with `calls` inlined."""
    operations = list[Operation]()

    def add(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        if eqn.primitive.name in calls and (inner := called(eqn, calls)) is not None:
            return run(inner, operands, add, _constant)
        operation = Operation(len(operations), eqn, operands, [])
        operation.results = [Value(var.aval, maker=operation) for var in eqn.outvars]
        operations.append(operation)
        return operation.results

    inputs = [Value(var.aval) for var in program.jaxpr.invars]
    outputs = run(program, inputs, add, _constant)
    return Graph(inputs, operations, outputs)


def _constant(atom: Any, value: Any) -> Value:
    return Value(atom.aval, value, isinstance(atom, Literal))


def after(operations: Iterable[Operation], values: Iterable[Value]) -> set[Operation]:
    """Return the operations, given in order, that depend on `values`."""
    known, found = set(values), set[Operation]()
    for operation in operations:
        if not known.isdisjoint(operation.operands):
            known.update(operation.results)
            found.add(operation)
    return found


def before(
    values: Iterable[Value], stop: Callable[[Value], Any] = lambda value: False
) -> tuple[list[Operation], list[Value]]:
    """Return the operations, in order, that `values` need, and what they take: no `maker`, or one to `stop` at."""
    found, taken, waiting = dict[Operation, None](), dict[Value, None](), list(values)
    while waiting:
        value = waiting.pop()
        if value.maker is None or stop(value):
            taken[value] = None
        elif value.maker not in found:
            found[value.maker] = None
            waiting += value.maker.operands
    return sorted(found, key=lambda operation: operation.place), list(taken)


# Run.


def run(
    program: ClosedJaxpr,
    arguments: Iterable[_T],
    operation: Callable[[JaxprEqn, list[_T]], Sequence[_T]] = bind,
    constant: Callable[[Any, Any], _T] = lambda atom, value: value,
) -> list[_T]:
    """Evaluate a program: `operation` gives the results of each, `constant` what (variable, value) is among them."""
    jaxpr, values = program.jaxpr, dict[Any, _T]()
    values.update((var, constant(var, value)) for var, value in zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def values_of(atoms: Iterable[Any]) -> list[_T]:
        found = list[_T]()
        for atom in atoms:
            found.append(constant(atom, atom.val) if isinstance(atom, Literal) else values[atom])
        return found

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, operation(eqn, values_of(eqn.invars)), strict=True))
    return values_of(jaxpr.outvars)


def evaluate(
    operations: Iterable[Operation], env: Env, operation: Callable[[Operation, list[Any]], Sequence[Any]] | None = None
) -> None:
    """Add the results of operations, given in order, to `env`; `operation` computes those of one."""
    for each in operations:
        operands = [known(value, env) for value in each.operands]
        results = bind(each.eqn, operands) if operation is None else operation(each, operands)
        env.update(zip(each.results, results, strict=True))


def known(value: Value, env: Env) -> Any:
    """Return what `env` has of a value, or its constant."""
    return env[value] if value in env or value.constant is None else value.constant


# Loops, conditions and calls.


def bodies(eqn: JaxprEqn, operands: Sequence[_T], calls: Collection[str] = CALLS) -> list[tuple[ClosedJaxpr, list[_T]]]:
    """Return the programs that a loop, a condition or one of `calls` runs, each with the operands that enter it.

    A slice enters a scan's body in place of the operand that it is of. An operation of another kind has none.
    """
    name, params, given = eqn.primitive.name, eqn.params, list(operands)
    if name == "cond":
        return [(branch, given[1:]) for branch in params["branches"]]
    if name == "while":
        tests, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return [(params["cond_jaxpr"], given[:tests] + given[first:]), (params["body_jaxpr"], given[tests:])]
    inner = called(eqn, {"scan", *calls})
    return [] if inner is None else [(inner, given)]


def carried(eqn: JaxprEqn) -> slice:
    """Return which operands of an operation go from round to round of it."""
    if eqn.primitive.name == "while":
        return slice(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], None)
    first, count = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, 0)
    return slice(first, first + count)


def traced_like(program: ClosedJaxpr, function: Callable[..., Any]) -> ClosedJaxpr:
    """Trace a function for the arguments of a program."""
    weak = lambda x: getattr(x, "weak_type", False)  # noqa: E731
    return jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak(x)) for x in program.in_avals)
    )


def run_bodies(eqn: JaxprEqn, arrays: Sequence[Any], functions: Sequence[Callable[..., list[Any]]]) -> list[Any]:
    """Run a loop, a condition, a `jit` or a rematerialised call with `functions` as its `bodies`."""
    params, name, where = eqn.params, eqn.primitive.name, carried(eqn)
    [function, *others], constants, carry = functions, list(arrays[: where.start]), list(arrays[where])
    if name == "scan":
        count = len(carry)

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            out = function(*constants, *carry, *slices)
            return out[:count], out[count:]

        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, stacks = jax.lax.scan(step, carry, list(arrays[where.stop :]), **settings)
        return [*carry, *stacks]
    if name == "while":
        return _while(params["cond_nconsts"], constants, carry, function, *others)
    if name == "cond":
        return jax.lax.switch(arrays[0], functions, *arrays[1:])
    if name in REMATERIALISED:
        return jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])(*arrays)
    assert name == "jit", name
    function.__name__ = params["name"]
    return jax.jit(function)(*arrays)


def _while(
    tests: int, constants: list[Any], carry: list[Any], test: Callable[..., list[Any]], body: Callable[..., list[Any]]
) -> list[Any]:
    """Run a loop while a condition holds; under vmap each row stops by itself."""

    def goes_on(carry: list[Any]) -> jax.Array:
        return test(*constants[:tests], *carry)[0]

    def once(carry: list[Any]) -> list[Any]:
        new, more = body(*constants[tests:], *carry), goes_on(carry)
        spread = lambda x: more.reshape(more.shape + (1,) * (x.ndim - more.ndim))  # noqa: E731
        return [jnp.where(spread(a), a, b) for a, b in zip(new, carry, strict=True)] if more.ndim else new

    return jax.lax.while_loop(lambda carry: goes_on(carry).any(), once, carry)
