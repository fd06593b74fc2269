"""A traced loss run again, its draws by global row: operation by operation, next to the program for the whole batch.

What holds no draw of the rows is done as it stands. Loops, branches and rematerialised parts that hold one are built
anew around their replayed bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jdp.core.batch_keys import BatchKey, plain
from jdp.core.gradients.jaxprs import line_of, scan_counts
from jdp.core.gradients.pairs import (
    DRAWS,
    NUMBERED,
    RANDOM,
    NoRows,
    Thunk,
    Whole,
    at,
    bind,
    bounds,
    is_random,
    pair_differs,
    paired,
    row_dim,
    shape_of,
    sorted_sizes,
)
from jdp.core.notices import notice

_EACH = "so each device draws for itself"
BY_ROW = "draw with the rows leading, e.g. normal(rng, (rows, length)).swapaxes(0, 1), or from split(rng, rows)"


@dataclass(frozen=True)
class Value:
    """An array of the local program.

    Attributes:
        array: the array.
        counts: it numbers local rows, or was carried from row to row: the whole batch has another value at this row.
    """

    array: Any
    counts: bool = False


@dataclass(frozen=True)
class Replay:
    """Runs jaxprs of the local rows that `key` stands for.

    Attributes:
        key: the step's key and the rows.
        line: the user's line, inside a function of `jax.random` (which are traced once, whoever calls them).
    """

    key: BatchKey
    line: str | None = None

    def run(self, local: Jaxpr, consts: Sequence[Any], args: Sequence[Value], whole: Whole | None) -> list[Value]:
        """The values of `local`'s outputs; without `whole` its draws are read by their shapes."""
        values: dict[Any, Value] = {
            **dict(zip(local.constvars, map(Value, consts), strict=True)),
            **dict(zip(local.invars, args, strict=True)),
        }

        def read(atom: Any) -> Value:
            return Value(atom.val) if isinstance(atom, Literal) else values[atom]

        others = iter(self._counterparts(local, whole))
        for eqn in local.eqns:
            operands = list(map(read, eqn.invars))
            if is_random(eqn):
                results = self._random(eqn, next(others), operands, whole)
            else:
                counts = any(v.counts for v in operands) or (whole is not None and whole.counts(eqn))
                results = [Value(x, counts) for x in bind(eqn, [v.array for v in operands])]
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, local.outvars))

    def _counterparts(self, local: Jaxpr, whole: Whole | None) -> list[JaxprEqn | None]:
        if whole is None:
            return [None for eqn in local.eqns if is_random(eqn)]
        others, odd = paired(local, whole.jaxpr)
        for eqn in odd:
            self._say(
                eqn,
                "the loss draws another number of times here for the whole batch than for a device's rows, so what it "
                f"draws is read by its shape: without leading rows it is the same on every device; {BY_ROW}",
            )
        return others

    def _say(self, eqn: JaxprEqn, what: str) -> None:
        notice(f"noise depends on the mesh, {self.line or line_of(eqn)}: {what}")

    def _random(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        if eqn.primitive.name in DRAWS:
            return [self._draw(eqn, other, operands)]
        if eqn.primitive.name in NUMBERED:
            return [self._numbered(eqn, other, operands, whole)]
        same = not any(v.counts for v in operands) and not pair_differs(eqn, other)
        if eqn.primitive.name in RANDOM or same:
            if not same:
                self._say(eqn, f"{eqn.primitive.name} cannot be drawn by row; draw with jax.random from a typed key")
            return [Value(x, any(v.counts for v in operands)) for x in bind(eqn, [v.array for v in operands])]
        with at(eqn):
            return self._inner(eqn, other, operands, whole)

    def _draw(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value]) -> Value:
        """Bits, keys or gamma samples of shape [*keys, *shape]."""
        key, *rest = operands
        shape, leading, splits = shape_of(eqn.outvars[0]), key.array.ndim, eqn.primitive.name == "random_split"
        drawn = key.array
        try:
            dim = self._dim(shape, other, leading, splits)
        except NoRows:
            self._say(eqn, f"{list(shape)} has no one dimension of the {self.key.rows} rows, {_EACH}; {BY_ROW}")
            drawn, dim, key = self.key.apart(drawn), None, Value(drawn)
        if key.counts and not splits:
            self._say(
                eqn,
                f"the key is carried from row to row or made of a row's number, {_EACH}; loop over split(rng, rows)",
            )
            drawn = self.key.apart(drawn)
        elif dim is not None and dim >= leading:
            drawn = self.key.row_key(drawn, math.prod(shape[leading:dim]))
        [out] = bind(eqn, [drawn, *(v.array for v in rest)])
        return Value(plain(out), key.counts) if splits else Value(out)

    def _dim(self, shape: tuple[int, ...], other: JaxprEqn | None, leading: int, splits: bool) -> int | None:
        rows = self.key.rows
        if other is not None:
            return row_dim(shape, shape_of(other.outvars[0]), rows, self.key.total)
        own = shape[leading:]
        if not math.prod(own) or not own or own[0] % rows or (splits and (len(own) > 1 or rows <= 2)):
            return None
        return leading

    def _numbered(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> Value:
        """Keys from numbers: those that are known, as `arange(rows)` is, are taken from the whole batch's."""
        number, arrays, counts = operands[-1], [v.array for v in operands], any(v.counts for v in operands)
        thunk = None if other is None or whole is None else whole.known(other.invars[-1:])[0]
        if other is not None and thunk is not None:
            mine, theirs = shape_of(eqn.invars[-1]), shape_of(other.invars[-1])
            try:
                dim = row_dim(mine, theirs, self.key.rows, self.key.total)
            except NoRows:
                self._say(
                    eqn, f"numbers {list(mine)} have no one dimension of the {self.key.rows} rows, {_EACH}; {BY_ROW}"
                )
                arrays[:-1], counts = map(self.key.apart, arrays[:-1]), False
            else:
                if dim is not None:
                    arrays[-1] = jnp.asarray(thunk()).take(self.key.places(mine[dim]), axis=dim)
                elif isinstance(other.invars[-1], Literal):
                    arrays[-1] = jnp.asarray(thunk(), number.array.dtype)
                counts = any(v.counts for v in operands[:-1])
        return Value(bind(eqn, arrays)[0], counts)

    def _inner(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        """An operation that holds others, rebuilt by the function that made it."""
        match eqn.primitive.name:
            case "jit" | "pjit":
                return self._jit(eqn, other, operands, whole)
            case "remat2" | "checkpoint":
                return self._remat(eqn, other, operands, whole)
            case "scan":
                return self._scan(eqn, other, operands, whole)
            case "while":
                return self._while(eqn, other, operands, whole)
            case "cond":
                return self._cond(eqn, other, operands, whole)
            case _:
                return self._closed(eqn, operands)

    def _body(
        self, jaxpr: Any, other: Any, counts: Sequence[bool], known: Sequence[Thunk | None] | None
    ) -> tuple[Callable[..., list[Any]], list[bool]]:
        """A function of `jaxpr`'s arrays that replays it, and a list that then says which results count."""
        local, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        found: list[bool] = []

        def run(*arrays: Any) -> list[Any]:
            whole = None
            if other is not None and known is not None:
                whole = Whole(getattr(other, "jaxpr", other), getattr(other, "consts", ()), known)
            results = self.run(local, consts, list(map(Value, arrays, counts)), whole)
            found[:] = [v.counts for v in results]
            return [v.array for v in results]

        return run, found

    def _jit(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        inner = None if other is None else other.params["jaxpr"]
        known = _known(other, whole)
        library = eqn.params["name"].startswith("_") and self.line is None
        replay = replace(self, line=line_of(eqn)) if library else self
        run, found = replay._body(eqn.params["jaxpr"], inner, _counts(operands), known)
        if inner is not None and sorted_sizes(eqn.params["jaxpr"]) != sorted_sizes(inner):
            self._say(
                eqn, "this permutes the rows of the batch, and a device has its own only; permute them in the data"
            )
        run.__name__ = eqn.params["name"]
        return list(map(Value, jax.jit(run)(*_arrays(operands)), found))

    def _remat(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        inner = None if other is None else other.params["jaxpr"]
        run, found = self._body(eqn.params["jaxpr"], inner, _counts(operands), _known(other, whole))
        again = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return list(map(Value, again(*_arrays(operands)), found))

    def _scan(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        params, inner = eqn.params, None if other is None else other.params["jaxpr"]
        first, carried = scan_counts(eqn)
        last = first + carried
        arrays, counts, known = _arrays(operands), _counts(operands), _known(other, whole)
        if other is not None and params["length"] != other.params["length"]:  # from row to row
            body = params["jaxpr"].jaxpr
            counts[first:last] = [
                old or out is not var
                for old, var, out in zip(counts[first:last], body.invars[first:last], body.outvars, strict=False)
            ]
        if known is not None:
            known = [*known[:first], *(None for _ in known[first:])]
        while True:
            run, found = self._body(params["jaxpr"], inner, counts, known)

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
            settled = [a or b for a, b in zip(counts[first:last], found, strict=False)]
            if settled == counts[first:last]:
                return list(map(Value, [*carry, *ys], found))
            counts[first:last] = settled

    def _while(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        params = eqn.params
        tests, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        arrays, counts, known = _arrays(operands), _counts(operands), _known(other, whole)
        if other is not None and bounds(eqn) != bounds(other):  # from row to row
            counts[first:] = [True] * len(counts[first:])
        known = None if known is None else [*known[:first], *(None for _ in known[first:])]

        def part(name: str, start: int, stop: int) -> tuple[Callable[..., list[Any]], list[bool]]:
            inner = None if other is None else other.params[name]
            seen = None if known is None else [*known[start:stop], *known[first:]]
            return self._body(params[name], inner, [*counts[start:stop], *counts[first:]], seen)

        while True:
            test, _ = part("cond_jaxpr", 0, tests)
            body, found = part("body_jaxpr", tests, first)
            out = jax.lax.while_loop(
                lambda carry, test=test: test(*arrays[:tests], *carry)[0],
                lambda carry, body=body: body(*arrays[tests:first], *carry),
                arrays[first:],
            )
            settled = [a or b for a, b in zip(counts[first:], found, strict=True)]
            if settled == counts[first:]:
                return list(map(Value, out, settled))
            counts[first:] = settled

    def _cond(self, eqn: JaxprEqn, other: JaxprEqn | None, operands: list[Value], whole: Whole | None) -> list[Value]:
        branches, counts = eqn.params["branches"], _counts(operands)
        inner = [None] * len(branches) if other is None else other.params["branches"]
        known = _known(other, whole)
        known = None if known is None else known[1:]
        bodies = [self._body(a, b, counts[1:], known) for a, b in zip(branches, inner, strict=True)]
        index, *arrays = _arrays(operands)
        out = jax.lax.switch(index, [run for run, _ in bodies], *arrays)
        return [
            Value(x, any(marks) or counts[0]) for x, *marks in zip(out, *(found for _, found in bodies), strict=True)
        ]

    def _closed(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """What cannot be rebuilt, such as a function with a gradient of its own: it gets keys that no shard shares."""
        self._say(eqn, f"a draw inside of {eqn.primitive.name}, {_EACH}; draw outside, and pass the noise in")
        arrays = [self.key.apart(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in _arrays(operands)]
        return list(map(Value, bind(eqn, arrays)))


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _counts(values: Sequence[Value]) -> list[bool]:
    return [value.counts for value in values]


def _known(other: JaxprEqn | None, whole: Whole | None) -> list[Thunk | None] | None:
    return None if other is None or whole is None else whole.known(other.invars)
