"""A traced loss run again, its draws by global row: operation by operation, next to the program for the whole batch.

Operations without a draw of the rows are repeated unchanged. Loops, branches and rematerialised functions with one are
built anew around their replayed bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jdp.base.notices import notice
from jdp.core.random.match_draws import (
    DRAWS,
    NUMBERED,
    RANDOM,
    GlobalProgram,
    NoRows,
    Thunk,
    bounds,
    drawing,
    pair_differs,
    paired,
    row_dim,
    shape_of,
    sorted_sizes,
)
from jdp.core.random.row_keys import BatchKey, plain
from jdp.core.tracing.graph import REMATERIALISED, bodies, carried, run, run_bodies
from jdp.core.tracing.jaxprs import bind, traced_at, user_line

Known = Sequence[Thunk | None] | None
"""For each operand of the counterpart how to compute it, or None; None where there is no counterpart."""

_REBUILT = ("jit", "scan", "while", "cond", *REMATERIALISED)
_EACH = "so each device draws for itself"
BY_ROW = "draw with the rows leading, e.g. normal(rng, (rows, length)).swapaxes(0, 1), or from split(rng, rows)"


@dataclass(frozen=True)
class Value:
    """An array of the local program.

    Attributes:
        array: the array.
        counts: True if it numbers local rows, or was carried from row to row: the global program has another value for
            this row.
    """

    array: Any
    counts: bool = False


@dataclass(frozen=True)
class Replay:
    """Runs jaxprs of the local rows that `key` names.

    Attributes:
        key: the step's key and the rows.
        line: inside a function of `jax.random` (which is traced once, whoever calls it) the user's source line.
    """

    key: BatchKey
    line: str | None = None

    def run(
        self, local: Jaxpr, consts: Sequence[Any], args: Sequence[Value], full: GlobalProgram | None
    ) -> list[Value]:
        """Return the outputs of `local`; where `full` is None its draws are read by their shapes."""
        others = dict(zip(map(id, drawing(local)), self._counterparts(local, full), strict=True))

        def operation(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
            if id(eqn) in others:
                return self._random(eqn, others[id(eqn)], operands, full)
            counts = any(_counts(operands))
            if eqn.primitive.name == "iota" and full is not None:
                counts = full.counts(eqn)
            return list(map(Value, bind(eqn, _arrays(operands)), repeat(counts)))

        return run(ClosedJaxpr(local, consts), args, operation, lambda _, value: Value(value))

    def _counterparts(self, local: Jaxpr, full: GlobalProgram | None) -> list[JaxprEqn | None]:
        if full is None:
            return [None for _ in drawing(local)]
        others, odd = paired(local, full.jaxpr)
        for eqn in odd:
            self._report(
                eqn,
                "the loss draws another number of times here for the whole batch than for a device's rows, so what it "
                f"draws is read by its shape: without leading rows it is the same on every device; {BY_ROW}",
            )
        return others

    def _report(self, eqn: JaxprEqn, message: str) -> None:
        notice(f"noise depends on the mesh, {self.line or user_line(eqn)}: {message}")

    def _random(
        self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], full: GlobalProgram | None
    ) -> list[Value]:
        if eqn.primitive.name in DRAWS:
            return [self._draw(eqn, other, operands)]
        if eqn.primitive.name in NUMBERED:
            return [self._numbered(eqn, other, operands, full)]
        same = not any(_counts(operands)) and not pair_differs(eqn, other)
        if eqn.primitive.name in RANDOM or same:
            if not same:
                self._report(eqn, f"{eqn.primitive.name} cannot be drawn by row; draw with jax.random from a typed key")
            return [Value(x, any(_counts(operands))) for x in bind(eqn, _arrays(operands))]
        with traced_at(eqn):
            return self._inner(eqn, other, operands, full)

    def _draw(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value]) -> Value:
        """Draw bits, keys or gamma samples of shape [*keys, *shape]."""
        key, *parameters = operands
        shape, leading, splits = shape_of(eqn.outvars[0]), key.array.ndim, eqn.primitive.name == "random_split"
        drawn = key.array
        try:
            dim = self._dim(shape, other, leading, splits)
        except NoRows:
            self._report(eqn, f"{list(shape)} has no one dimension of the {self.key.rows} rows, {_EACH}; {BY_ROW}")
            drawn, dim, key = self.key.apart(drawn), None, Value(drawn)
        if key.counts and not splits:
            self._report(
                eqn,
                f"the key is carried from row to row or made of a row's number, {_EACH}; loop over split(rng, rows)",
            )
            drawn = self.key.apart(drawn)
        elif dim is not None and dim >= leading:
            drawn = self.key.row_key(drawn, math.prod(shape[leading:dim]))
        [out] = bind(eqn, [drawn, *_arrays(parameters)])
        return Value(plain(out), key.counts) if splits else Value(out)

    def _dim(self, shape: tuple[int, ...], other: JaxprEqn | None, leading: int, splits: bool) -> int | None:
        rows = self.key.rows
        if other is not None:
            return row_dim(shape, shape_of(other.outvars[0]), rows, self.key.total)
        own = shape[leading:]
        if not math.prod(own) or not own or own[0] % rows or (splits and (len(own) > 1 or rows <= 2)):
            return None
        return leading

    def _numbered(
        self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], full: GlobalProgram | None
    ) -> Value:
        """Make keys from numbers; those that the global program knows, such as `arange(rows)`, are taken from there."""
        number, arrays, counts = operands[-1], _arrays(operands), any(_counts(operands))
        thunk = None if other is None or full is None else full.known(other.invars[-1:])[0]
        if other is not None and thunk is not None:
            shape, full_shape = shape_of(eqn.invars[-1]), shape_of(other.invars[-1])
            try:
                dim = row_dim(shape, full_shape, self.key.rows, self.key.total)
            except NoRows:
                self._report(
                    eqn, f"numbers {list(shape)} have no one dimension of the {self.key.rows} rows, {_EACH}; {BY_ROW}"
                )
                arrays[:-1], counts = map(self.key.apart, arrays[:-1]), False
            else:
                if dim is not None:
                    arrays[-1] = jnp.asarray(thunk()).take(self.key.global_indices(shape[dim]), axis=dim)
                elif isinstance(other.invars[-1], Literal):
                    arrays[-1] = jnp.asarray(thunk(), number.array.dtype)
                counts = any(_counts(operands[:-1]))
        return Value(bind(eqn, arrays)[0], counts)

    def _inner(
        self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], full: GlobalProgram | None
    ) -> list[Value]:
        """Rebuild an operation that runs others, until what it carries counts in each round as it did before."""
        name, where = eqn.primitive.name, carried(eqn)
        if name not in _REBUILT:
            return self._closed(eqn, operands)
        arrays, counts = _arrays(operands), self._from_row_to_row(eqn, other, _counts(operands))
        replay = self._inside(eqn, other)
        known: Known = None
        if other is not None and full is not None:
            known = full.known(other.invars)
            if name in ("scan", "while"):
                known[where.start :] = [None] * len(known[where.start :])
        while True:
            pairs = zip(bodies(eqn, counts), _others(eqn, other, known), strict=True)
            functions = [replay._body(*mine, *theirs) for mine, theirs in pairs]
            out = run_bodies(eqn, arrays, [function for function, _ in functions])
            marks = [any(each) for each in zip(*(marks for _, marks in functions[name == "while" :]), strict=True)]
            joined = [a or b for a, b in zip(counts[where], marks, strict=False)]
            if joined == counts[where]:
                marks = joined if name == "while" else [mark or (name == "cond" and counts[0]) for mark in marks]
                return list(map(Value, out, marks))
            counts[where] = joined

    def _inside(self, eqn: JaxprEqn, other: JaxprEqn | None) -> Replay:
        """Return what replays the inside of an operation: in JAX's own functions with the line of their caller."""
        if eqn.primitive.name != "jit":
            return self
        if other is not None and sorted_sizes(eqn.params["jaxpr"]) != sorted_sizes(other.params["jaxpr"]):
            self._report(
                eqn, "this permutes the rows of the batch, and a device has its own only; permute them in the data"
            )
        library = eqn.params["name"].startswith("_") and self.line is None
        return replace(self, line=user_line(eqn)) if library else self

    def _from_row_to_row(self, eqn: JaxprEqn, other: JaxprEqn | None, counts: list[bool]) -> list[bool]:
        """Mark what a loop along the rows carries: one with another number of rounds for the whole batch."""
        where = carried(eqn)
        if other is None:
            return counts
        if eqn.primitive.name == "while" and bounds(eqn) != bounds(other):
            counts[where] = [True] * len(counts[where])
        if eqn.primitive.name == "scan" and eqn.params["length"] != other.params["length"]:
            body = eqn.params["jaxpr"].jaxpr
            pairs = zip(counts[where], body.invars[where], body.outvars, strict=False)
            counts[where] = [old or out is not var for old, var, out in pairs]
        return counts

    def _body(
        self, local: ClosedJaxpr, counts: Sequence[bool], other: ClosedJaxpr | None, known: Known
    ) -> tuple[Callable[..., list[Any]], list[bool]]:
        """Return a function that replays a program, and a list: once it ran, which of its results count."""
        marks: list[bool] = []

        def replayed(*arrays: Any) -> list[Any]:
            full = None
            if other is not None and known is not None:
                full = GlobalProgram(other.jaxpr, other.consts, known)
            results = self.run(local.jaxpr, local.consts, list(map(Value, arrays, counts)), full)
            marks[:] = _counts(results)
            return _arrays(results)

        return replayed, marks

    def _closed(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Repeat what cannot be rebuilt (a function with a gradient of its own) with keys that no shard shares."""
        self._report(eqn, f"a draw inside of {eqn.primitive.name}, {_EACH}; draw outside, and pass the noise in")
        arrays = [self.key.apart(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in _arrays(operands)]
        return list(map(Value, bind(eqn, arrays)))


def _others(
    eqn: JaxprEqn, other: JaxprEqn | None, known: Known
) -> Sequence[tuple[ClosedJaxpr, Known] | tuple[None, None]]:
    """Return for each program that an operation runs its counterpart, and what is known of the operands of that."""
    if other is None or known is None:
        return [(None, None)] * len(bodies(eqn, eqn.invars))
    return bodies(other, known)


def _arrays(values: Sequence[Value]) -> list[Any]:
    return list(map(attrgetter("array"), values))


def _counts(values: Sequence[Value]) -> list[bool]:
    return list(map(attrgetter("counts"), values))
