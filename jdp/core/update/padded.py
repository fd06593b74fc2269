"""Replay of an update's program on leaves that are stored flat and padded (`jdp.core.sharding.padded`).

The program is in the model's own shapes, so that masks by rank or shape, and means, are those of the model.

- An element-wise operation runs on the rows as they are.
- A reduction of all of a leaf leaves out the padding.
- Values that depend on no flat leaf are computed as traced, and made flat where they meet one.

Anything else (a matrix product, sums along one dimension) mixes elements, and is refused (`Mixed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jdp.base.formatting import listed
from jdp.core.sharding.padded import Flat
from jdp.core.tracing.graph import FORWARD, called, run
from jdp.core.tracing.jaxprs import ELEMENTWISE, REDUCTIONS, bind


class Mixed(Exception):
    """An operation, by name, mixes the elements of flat leaves, which belong to the parameters `leaves`."""

    def __init__(self, operation: str, leaves: frozenset[str]) -> None:
        super().__init__(f"{operation} mixes the elements of {listed(sorted(leaves))}")
        self.operation, self.leaves = operation, leaves


@dataclass(frozen=True)
class Stored:
    """A value of the update.

    Attributes:
        array: in its stored shape if it is flat, else as it was traced.
        flat: its layout; None if it is not flat.
        of: the parameters of whose leaves it is made, if it is flat.
        number: of all its elements, if it is not flat; None if that is not known.
    """

    array: Any
    flat: Flat | None = None
    of: frozenset[str] = frozenset()
    number: Any = None

    def at_rest(self, flat: Flat) -> Any:
        """Return its array in the stored shape of such a leaf; a scalar as it is."""
        if self.flat is not None or not jnp.ndim(self.array):
            return self.array
        if self.number is not None:
            return jnp.broadcast_to(self.number, flat.at_rest)
        return flat.to_rest(jnp.broadcast_to(self.array, flat.shape))  # an operation may spread dimensions of one


def replay(program: ClosedJaxpr, arguments: Sequence[Stored]) -> list[Stored]:
    """Replay a program on values of which some are flat."""
    return run(program, arguments, replay_operation, lambda _, value: Stored(value))


def replay_operation(eqn: Any, operands: list[Stored]) -> list[Stored]:
    name = eqn.primitive.name
    of = frozenset[str]().union(*(operand.of for operand in operands))
    flats = {operand.flat for operand in operands if operand.flat is not None}
    if not flats and name == "broadcast_in_dim" and not jnp.ndim(operands[0].array):
        return [Stored(array, number=operands[0].array) for array in bind(eqn, [operands[0].array])]
    if not flats:
        return [Stored(array) for array in bind(eqn, [operand.array for operand in operands])]
    if (inner := called(eqn, FORWARD)) is not None:
        return replay(inner, operands)
    if name == "cond":
        return _branches(eqn, operands)
    if len(flats) > 1:
        raise Mixed(name, of)
    (flat,) = flats
    if name in ELEMENTWISE:
        return [Stored(array, flat, of) for array in bind(eqn, [operand.at_rest(flat) for operand in operands])]
    if name == "reshape" and eqn.params["dimensions"] is None:  # the elements keep their order
        return [replace(operands[0], flat=replace(flat, shape=eqn.outvars[0].aval.shape))]
    if name == "broadcast_in_dim" and eqn.outvars[0].aval.shape == flat.shape:
        return operands[:1]
    if name in REDUCTIONS and len(eqn.params["axes"]) == len(flat.shape):
        masked = flat.masked(operands[0].array, _nothing(name, eqn.invars[0].aval.dtype))
        axes = tuple(range(len(flat.at_rest)))
        return [Stored(x) for x in bind(eqn.replace(params={**eqn.params, "axes": axes}), [masked])]
    raise Mixed(name, of)


def _nothing(reduction: str, dtype: Any) -> Any:
    """Return the number that changes nothing in a reduction."""
    if reduction in ("reduce_sum", "reduce_or", "reduce_xor"):
        return 0
    if reduction == "reduce_prod":
        return 1
    if reduction == "reduce_and":
        return True if dtype == jnp.bool_ else -1
    if dtype == jnp.bool_:
        return reduction == "reduce_min"
    limits: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    least, most = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else (limits.min, limits.max)
    return least if reduction == "reduce_max" else most


def _branches(eqn: Any, operands: list[Stored]) -> list[Stored]:
    """Replay a choice between programs: a result that is flat in one of them is so in all."""
    index, given = operands[0], operands[1:]
    if index.flat is not None:
        raise Mixed("cond", index.of)
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    hows: list[list[tuple[Flat | None, frozenset[str]]]] = []

    def replayed(branch: ClosedJaxpr, arrays: Sequence[Any]) -> list[Stored]:
        return replay(branch, [replace(value, array=array) for value, array in zip(given, arrays, strict=True)])

    def probe(branch: ClosedJaxpr, *arrays: Any) -> list[Any]:
        results = replayed(branch, arrays)
        hows.append([(value.flat, value.of) for value in results])
        return [value.array for value in results]

    arrays = [value.array for value in given]
    for branch in branches:
        jax.eval_shape(partial(probe, branch), *arrays)
    together = [
        (next((flat for flat, _ in each if flat is not None), None), frozenset[str]().union(*(of for _, of in each)))
        for each in zip(*hows, strict=True)
    ]

    def chosen(branch: ClosedJaxpr, *arrays: Any) -> list[Any]:
        return [as_stored(value, *how, "cond") for value, how in zip(replayed(branch, arrays), together, strict=True)]

    results = jax.lax.switch(index.array, [partial(chosen, branch) for branch in branches], *arrays)
    return [Stored(array, *how) for array, how in zip(results, together, strict=True)]


def as_stored(value: Stored, flat: Flat | None, of: frozenset[str], name: str) -> Any:
    """Return a value's array in the form that is wanted."""
    if value.flat == flat:
        return value.array
    if flat is None or value.flat is not None:
        raise Mixed(name, value.of | of)
    return value.at_rest(flat)
