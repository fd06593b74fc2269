"""A traced program for one index of a dimension along which it computes each index by itself: `jax.vmap` reversed.

An array that has the dimension keeps it, with one index in place of all (`Along`). `places_after` follows the dimension
through a program and raises `Mixes` where an index is computed from others; `one_index` runs the program for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jdp.core.tracing.graph import FORWARD, bodies, called, carried, run, run_bodies
from jdp.core.tracing.jaxprs import DECOMPOSITIONS, ELEMENTWISE, REDUCTIONS, bind_here, scan_counts


@dataclass(frozen=True)
class Along:
    """Where an array has the dimension: `dim` has, for each index in order, `inner` elements."""

    dim: int
    inner: int = 1


UNIFORM = Along(-1)
"""Of an array that has one number everywhere."""
Place = Along | None
"""None: the array does not depend on the dimension."""


class Mixes(Exception):
    """An operation, by name, computes an index from others, or nothing is known of it."""


_ALONG_ONE = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "sort": "dimension"}


def places_of(program: ClosedJaxpr, places: Sequence[Place]) -> list[Place]:
    """Return where a program's results have the dimension, given where its arguments have it."""
    return run(program, places, places_after, lambda atom, value: None)


def places_after(eqn: JaxprEqn, places: Sequence[Place]) -> list[Place]:
    """Return where an operation's results have the dimension."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if (inner := called(eqn, FORWARD)) is not None:
        return places_of(inner, places)
    if name in ("scan", "while", "cond"):
        return _of_loop(eqn, places)[1]
    own = [place for place in places if place is not None and place != UNIFORM]
    given = [(number, place) for number, place in enumerate(places) if _shape(eqn, number)]
    if not own:
        spread = name in ELEMENTWISE or name in ("broadcast_in_dim", "transpose", "reshape", "tile")
        is_uniform = spread and all(place for _, place in given) and _result_shape(eqn) != ()
        return [UNIFORM if is_uniform else None] * count
    if name in ELEMENTWISE:
        spread = (place is not None or _shape(eqn, number)[own[0].dim :][:1] in ((), (1,)) for number, place in given)
        if len(set(own)) > 1 or not all(spread):
            raise Mixes(name)
        return [own[0]] * count
    rule = _RULES.get(name)
    if name in DECOMPOSITIONS:
        rule = _matrices
    elif name in REDUCTIONS or name in ("argmax", "argmin"):
        rule = _reduction
    elif name in _ALONG_ONE:
        rule = _along_one
    found = None if rule is None else rule(eqn, places)
    if found is None:
        raise Mixes(name)
    return [found] * count


def _shape(eqn: Any, number: int = 0) -> tuple[int, ...]:
    return tuple(eqn.invars[number].aval.shape)


def _result_shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _transpose(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    [place] = places
    return Along(eqn.params["permutation"].index(place.dim), place.inner)


def _reshape(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    old, new, place = _shape(eqn), _result_shape(eqn), places[0]
    dim = same_start(old, new, place.dim, old[place.dim] // place.inner)
    return None if dim is None else Along(dim, new[dim] * place.inner // old[place.dim])


def same_start(old: Sequence[int], new: Sequence[int], dim: int, parts: int) -> int | None:
    """Return the dimension of a reshaped array that begins where `dim` did, and has a multiple of `parts` elements."""
    before = prod(old[:dim])
    starts = (i for i, size in enumerate(new) if prod(new[:i]) == before and size % parts == 0 and size >= parts)
    return next(starts, None)


def _broadcast(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    place = places[0]
    dim = eqn.params["broadcast_dimensions"][place.dim]
    return Along(dim, place.inner) if eqn.params["shape"][dim] == _shape(eqn)[place.dim] else None


def _squeeze(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    return _without(places[0], eqn.params["dimensions"])


def _reduction(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    return _without(places[0], eqn.params["axes"])


def _without(place: Along, gone: Sequence[int]) -> Place:
    return None if place.dim in gone else Along(place.dim - sum(dim < place.dim for dim in gone), place.inner)


def _along_one(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    same = all(place == places[0] for place in places)
    return places[0] if same and eqn.params[_ALONG_ONE[eqn.primitive.name]] != places[0].dim else None


def _matrices(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    same = all(place == places[0] for place in places)
    return places[0] if same and places[0].dim < len(_shape(eqn)) - 2 else None


def _dot_general(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    (contracted, batch), found = eqn.params["dimension_numbers"], set[Place]()
    own = [place if place != UNIFORM else None for place in places]
    for number, place in enumerate(own):
        if place is None:
            continue
        if place.dim in contracted[number]:
            return None
        other = own[1 - number]
        if place.dim in batch[number]:
            index = list(batch[number]).index(place.dim)
            if other is None or batch[1 - number][index] != other.dim or other.inner != place.inner:
                return None
            found.add(Along(index, place.inner))
        elif other is not None:
            return None
        else:
            free = [d for d in range(len(_shape(eqn, number))) if d not in (*contracted[number], *batch[number])]
            before = len(batch[0]) + (len(_result_shape(eqn)) - len(batch[0]) - len(free)) * number
            found.add(Along(before + free.index(place.dim), place.inner))
    return found.pop() if len(found) == 1 else None


def _slice(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    dim = places[0].dim
    return places[0] if _result_shape(eqn)[dim] == _shape(eqn)[dim] else None


def _pad(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    unpadded = places[0] is not None and tuple(eqn.params["padding_config"][places[0].dim]) == (0, 0, 0)
    return places[0] if unpadded and places[1] in (None, UNIFORM) else None


def _concatenate(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    own = {place for place in places if place != UNIFORM}
    place = own.pop()
    return place if not own and place is not None and eqn.params["dimension"] != place.dim else None


def _rev(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    return None if places[0].dim in eqn.params["dimensions"] else places[0]


def _tile(eqn: JaxprEqn, places: Sequence[Any]) -> Place:
    return places[0] if eqn.params["reps"][places[0].dim] == 1 else None


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Any]], Place]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "slice": _slice,
    "dynamic_slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "rev": _rev,
    "tile": _tile,
}


def _of_loop(eqn: JaxprEqn, places: Sequence[Place]) -> tuple[list[Place], list[Place]]:
    """Return where a loop or a condition has the dimension in its operands, as they go round, and in its results."""
    name, given = eqn.primitive.name, list(places)
    if name == "cond":
        if given[0] is not None:
            raise Mixes(name)
        results = [places_of(branch, inner) for branch, inner in bodies(eqn, given)]
        return given, [_joined(name, each) for each in zip(*results, strict=True)]
    where = carried(eqn)
    sliced = slice(scan_counts(eqn)[0] + scan_counts(eqn)[1], None) if name == "scan" else slice(len(given), None)
    entering = [*given[: sliced.start], *(_taken_apart(name, place) for place in given[sliced])]
    while True:
        *tests, (body, operands) = bodies(eqn, entering)
        if any(places_of(test, of_test) != [None] for test, of_test in tests):
            raise Mixes(name)
        results = places_of(body, operands)
        count = len(entering[where])
        carry = [_joined(name, pair) for pair in zip(entering[where], results[:count], strict=True)]
        if carry == entering[where]:
            break
        entering[where] = carry
    stacks = [_stacked(place) for place in results[count:]]
    return [*entering[: sliced.start], *given[sliced]], [*carry, *stacks]


def _taken_apart(name: str, place: Place) -> Place:
    """Return the place in a slice along the leading dimension."""
    if place is None or place == UNIFORM:
        return place
    if place.dim == 0:
        raise Mixes(name)
    return Along(place.dim - 1, place.inner)


def _stacked(place: Place) -> Place:
    return place if place is None or place == UNIFORM else Along(place.dim + 1, place.inner)


def _joined(name: str, places: Sequence[Place]) -> Place:
    """Return the place of a value that is one of several: uniform ones may be cut to the others' shape."""
    own = set(places) - {UNIFORM}
    if len(own) > 1:
        raise Mixes(name)
    return own.pop() if own else UNIFORM


# Run.


@dataclass(frozen=True)
class _One:
    """An array for one index, and where it has the dimension."""

    array: Any
    place: Place

    def at(self, place: Place) -> Any:
        """Return the array with the dimension at `place`: of a uniform one as much as one index has."""
        if self.place == UNIFORM and place is not None and place != UNIFORM and self.array.shape[place.dim] > 1:
            return jax.lax.slice_in_dim(self.array, 0, place.inner, axis=place.dim)
        return self.array


def one_index(eqn: JaxprEqn, arrays: Sequence[Any], places: Sequence[Place]) -> list[Any]:
    """Run an operation for one index; uniform results have all of them."""
    name, values = eqn.primitive.name, [_One(x, place) for x, place in zip(arrays, places, strict=True)]
    if (inner := called(eqn, FORWARD)) is not None:
        return [value.array for value in _run(inner, values)]
    if name in ("scan", "while", "cond"):
        return _run_loop(eqn, values)
    own = next((place for place in places if place is not None and place != UNIFORM), None)
    if own is None:
        return bind_here(eqn, arrays)
    if name in ELEMENTWISE or name == "concatenate":
        return bind_here(eqn, [value.at(own) if jnp.ndim(value.array) else value.array for value in values])
    [after, *_] = places_after(eqn, places)
    length = _shape(eqn, list(places).index(own))[own.dim] // own.inner
    return bind_here(_shortened(eqn, after, length), arrays)


_SIZES = {
    "reshape": "new_sizes",
    "broadcast_in_dim": "shape",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def _shortened(eqn: JaxprEqn, place: Place, length: int) -> JaxprEqn:
    """Return the operation with the results' size for one index of `length`."""
    name = _SIZES.get(eqn.primitive.name)
    if name is None or place is None:
        return eqn
    sizes = list(eqn.params[name])
    sizes[place.dim] //= length
    return eqn.replace(params={**eqn.params, name: tuple(sizes)})


def _run(program: ClosedJaxpr, values: Sequence[_One]) -> list[_One]:
    def operation(eqn: JaxprEqn, operands: list[_One]) -> list[_One]:
        places = [operand.place for operand in operands]
        results = one_index(eqn, [operand.array for operand in operands], places)
        return [_One(x, place) for x, place in zip(results, places_after(eqn, places), strict=True)]

    return run(program, values, operation, lambda atom, value: _One(value, None))


def _run_loop(eqn: JaxprEqn, values: Sequence[_One]) -> list[Any]:
    entering, results = _of_loop(eqn, [value.place for value in values])
    arrays = [value.at(place) for value, place in zip(values, entering, strict=True)]
    name, where = eqn.primitive.name, carried(eqn)
    if name == "scan":
        slices = scan_counts(eqn)[0] + scan_counts(eqn)[1]
        entering = [*entering[:slices], *(_taken_apart(name, place) for place in entering[slices:])]
        carry = len(entering[where])
        results = [*results[:carry], *(_taken_apart(name, place) for place in results[carry:])]

    def function(program: ClosedJaxpr, places: Sequence[Place], wanted: Sequence[Place] | None) -> Callable[..., Any]:
        def of_one(*arrays: Any) -> list[Any]:
            made = _run(program, [_One(x, place) for x, place in zip(arrays, places, strict=True)])
            return [value.at(place) for value, place in zip(made, wanted or [None] * len(made), strict=True)]

        return of_one

    programs = bodies(eqn, entering)
    tests = len(programs) - 1 if name == "while" else 0
    functions = [function(*each, None if i < tests else results) for i, each in enumerate(programs)]
    return run_bodies(eqn, arrays, functions)
