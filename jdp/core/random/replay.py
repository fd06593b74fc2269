"""A traced loss run again, its draws by global row: operation by operation, next to the program for the whole batch.

Operations without a draw of the rows are repeated unchanged. Loops, branches and rematerialised functions with one are
built anew around their replayed bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jdp.base.notices import notice
from jdp.core.random.match_draws import (
    DRAWS,
    NUMBERED,
    RANDOM,
    GlobalProgram,
    NoRows,
    Thunk,
    bounds,
    is_random,
    pair_differs,
    paired,
    row_dim,
    shape_of,
    sorted_sizes,
)
from jdp.core.random.row_keys import BatchKey, plain
from jdp.core.tracing.jaxprs import bind, scan_counts, traced_at, user_line

Known = Sequence[Thunk | None] | None
"""For each operand of the counterpart how to compute it, or None; None where there is no counterpart."""

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
        values: dict[Any, Value] = {
            **dict(zip(local.constvars, map(Value, consts), strict=True)),
            **dict(zip(local.invars, args, strict=True)),
        }

        def read(atom: Any) -> Value:
            return Value(atom.val) if isinstance(atom, Literal) else values[atom]

        others = iter(self._counterparts(local, full))
        for eqn in local.eqns:
            operands = list(map(read, eqn.invars))
            if is_random(eqn):
                results = self._random(eqn, next(others), operands, full)
            else:
                counts = any(_counts(operands)) or (full is not None and full.counts(eqn))
                results = [Value(x, counts) for x in bind(eqn, _arrays(operands))]
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, local.outvars))

    def _counterparts(self, local: Jaxpr, full: GlobalProgram | None) -> list[JaxprEqn | None]:
        if full is None:
            return [None for eqn in local.eqns if is_random(eqn)]
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
        """Rebuild an operation that runs others, by the function of JAX that made it."""
        rebuild = {
            "jit": self._jit,
            "pjit": self._jit,
            "remat2": self._remat,
            "checkpoint": self._remat,
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }.get(eqn.primitive.name)
        if rebuild is None:
            return self._closed(eqn, operands)
        return rebuild(eqn, other, operands, None if other is None or full is None else full.known(other.invars))

    def _body(
        self, jaxpr: Any, other: Any, counts: Sequence[bool], known: Known
    ) -> tuple[Callable[..., list[Any]], list[bool]]:
        """Return a function that replays `jaxpr`, and a list: once the function ran, which of its results count."""
        local, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        marks: list[bool] = []

        def run(*arrays: Any) -> list[Any]:
            full = None
            if other is not None and known is not None:
                full = GlobalProgram(getattr(other, "jaxpr", other), getattr(other, "consts", ()), known)
            results = self.run(local, consts, list(map(Value, arrays, counts)), full)
            marks[:] = _counts(results)
            return _arrays(results)

        return run, marks

    def _jit(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], known: Known) -> list[Value]:
        inner = None if other is None else other.params["jaxpr"]
        library = eqn.params["name"].startswith("_") and self.line is None
        replay = replace(self, line=user_line(eqn)) if library else self
        run, marks = replay._body(eqn.params["jaxpr"], inner, _counts(operands), known)
        if inner is not None and sorted_sizes(eqn.params["jaxpr"]) != sorted_sizes(inner):
            self._report(
                eqn, "this permutes the rows of the batch, and a device has its own only; permute them in the data"
            )
        run.__name__ = eqn.params["name"]
        return list(map(Value, jax.jit(run)(*_arrays(operands)), marks))

    def _remat(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], known: Known) -> list[Value]:
        inner = None if other is None else other.params["jaxpr"]
        run, marks = self._body(eqn.params["jaxpr"], inner, _counts(operands), known)
        again = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return list(map(Value, again(*_arrays(operands)), marks))

    def _scan(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], known: Known) -> list[Value]:
        params, inner = eqn.params, None if other is None else other.params["jaxpr"]
        first, carried = scan_counts(eqn)
        last = first + carried
        arrays, counts = _arrays(operands), _counts(operands)
        if other is not None and params["length"] != other.params["length"]:  # from row to row
            body = params["jaxpr"].jaxpr
            counts[first:last] = [
                old or out is not var
                for old, var, out in zip(counts[first:last], body.invars[first:last], body.outvars, strict=False)
            ]
        if known is not None:
            known = [*known[:first], *(None for _ in known[first:])]
        while True:
            run, marks = self._body(params["jaxpr"], inner, counts, known)

            def step(carry: list[Any], xs: list[Any], run: Any = run) -> tuple[list[Any], list[Any]]:
                out = run(*arrays[:first], *carry, *xs)
                return out[: last - first], out[last - first :]

            carry, ys = jax.lax.scan(
                step,
                arrays[first:last],
                arrays[last:],
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            joined = [a or b for a, b in zip(counts[first:last], marks, strict=False)]
            if joined == counts[first:last]:
                return list(map(Value, [*carry, *ys], marks))
            counts[first:last] = joined

    def _while(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], known: Known) -> list[Value]:
        params = eqn.params
        tests, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        arrays, counts = _arrays(operands), _counts(operands)
        if other is not None and bounds(eqn) != bounds(other):  # from row to row
            counts[first:] = [True] * len(counts[first:])
        known = None if known is None else [*known[:first], *(None for _ in known[first:])]

        def traced(name: str, start: int, stop: int) -> tuple[Callable[..., list[Any]], list[bool]]:
            inner = None if other is None else other.params[name]
            seen = None if known is None else [*known[start:stop], *known[first:]]
            return self._body(params[name], inner, [*counts[start:stop], *counts[first:]], seen)

        while True:
            test, _ = traced("cond_jaxpr", 0, tests)
            body, marks = traced("body_jaxpr", tests, first)

            def goes_on(carry: list[Any], test: Any = test) -> jax.Array:
                return test(*arrays[:tests], *carry)[0]

            def once(carry: list[Any], body: Any = body, goes_on: Any = goes_on) -> list[Any]:
                """Under vmap each row stops by itself."""
                new, test = body(*arrays[tests:first], *carry), goes_on(carry)
                spread = lambda x: test.reshape(test.shape + (1,) * (x.ndim - test.ndim))  # noqa: E731
                return [jnp.where(spread(a), a, b) for a, b in zip(new, carry, strict=True)] if test.ndim else new

            out = jax.lax.while_loop(lambda carry, goes_on=goes_on: goes_on(carry).any(), once, arrays[first:])
            joined = [a or b for a, b in zip(counts[first:], marks, strict=True)]
            if joined == counts[first:]:
                return list(map(Value, out, joined))
            counts[first:] = joined

    def _cond(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], known: Known) -> list[Value]:
        branches, counts = eqn.params["branches"], _counts(operands)
        inner = [None] * len(branches) if other is None else other.params["branches"]
        known = None if known is None else known[1:]
        bodies = [self._body(a, b, counts[1:], known) for a, b in zip(branches, inner, strict=True)]
        index, *arrays = _arrays(operands)
        out = jax.lax.switch(index, [run for run, _ in bodies], *arrays)
        return [Value(x, any(each) or counts[0]) for x, *each in zip(out, *(marks for _, marks in bodies), strict=True)]

    def _closed(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Repeat what cannot be rebuilt (a function with a gradient of its own) with keys that no shard shares."""
        self._report(eqn, f"a draw inside of {eqn.primitive.name}, {_EACH}; draw outside, and pass the noise in")
        arrays = [self.key.apart(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in _arrays(operands)]
        return list(map(Value, bind(eqn, arrays)))


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _counts(values: Sequence[Value]) -> list[bool]:
    return [value.counts for value in values]
