"""Two programs of one loss, for the local rows and for the whole batch: which draws correspond, and how they differ."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jdp.core.tracing.jaxprs import bind, user_line

DRAWS = frozenset(("random_bits", "random_split", "random_gamma"))
NUMBERED = frozenset(("random_fold_in", "random_seed"))
OTHERS = frozenset(("threefry2x32", "rng_bit_generator", "rng_uniform"))
RANDOM = DRAWS | NUMBERED | OTHERS

Thunk = Callable[[], Any]


class NoRows(Exception):
    """A shape that differs from the global one, but not in one dimension that counts the rows."""


def row_dim(local: Sequence[int], full: Sequence[int], rows: int, total: int) -> int | None:
    """Return the dimension of `rows` × n in `local` and `total` × n in `full`; None for equal shapes."""
    if tuple(local) == tuple(full):
        return None
    if len(local) == len(full):
        dims = [dim for dim, (a, b) in enumerate(zip(local, full, strict=True)) if a != b]
        if len(dims) == 1 and local[dims[0]] % rows == 0 and local[dims[0]] // rows * total == full[dims[0]]:
            return dims[0]
    raise NoRows


_DRAWING = weakref.WeakKeyDictionary[Jaxpr, list[JaxprEqn]]()


def drawing(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the operations of a jaxpr that draw, or run one that does; each jaxpr is read once."""
    if (found := _DRAWING.get(jaxpr)) is None:
        found = list[JaxprEqn]()
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in RANDOM or any(map(drawing, jaxprs_in_params(eqn.params))):
                found.append(eqn)
        _DRAWING[jaxpr] = found
    return found


def paired(local: Jaxpr, full: Jaxpr) -> tuple[list[JaxprEqn | None], list[JaxprEqn]]:
    """Return for each random operation of `local` its counterpart in `full`, or None; and one unmatched of each sort.

    They correspond in order. If the programs differ in their random operations, then those of one sort (source line and
    kind) correspond in order where both programs have equally many.
    """
    mine, others = map(drawing, (local, full))
    if list(map(_kind, mine)) == list(map(_kind, others)):
        return [*others], []
    mine_by_sort, others_by_sort = _by_sort(mine), _by_sort(others)
    odd: list[JaxprEqn] = []
    matched: dict[int, JaxprEqn] = {}
    for sort in {**mine_by_sort, **others_by_sort}:
        ours, theirs = mine_by_sort.get(sort, []), others_by_sort.get(sort, [])
        if len(ours) == len(theirs):
            matched |= {id(eqn): other for eqn, other in zip(ours, theirs, strict=True)}
        else:
            odd.append((ours or theirs)[0])
    return [matched.get(id(eqn)) for eqn in mine], odd


def _by_sort(eqns: Sequence[JaxprEqn]) -> dict[Any, list[JaxprEqn]]:
    groups: dict[Any, list[JaxprEqn]] = {}
    for eqn in eqns:
        groups.setdefault((user_line(eqn), str(_kind(eqn))), []).append(eqn)
    return groups


def _kind(eqn: JaxprEqn) -> tuple[Any, ...]:
    inner = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in jaxprs_in_params(eqn.params)]
    return eqn.primitive.name, eqn.params.get("name"), len(eqn.invars), len(eqn.outvars), inner


def differs(local: Jaxpr, full: Jaxpr) -> bool:
    """Return True if a random operation of `local` has no counterpart in `full`, or one that differs."""
    others, odd = paired(local, full)
    return bool(odd) or any(map(pair_differs, drawing(local), others))


def pair_differs(eqn: JaxprEqn, other: JaxprEqn | None) -> bool:
    """Return True if a random operation and its counterpart differ in shapes, literals, lengths or what they run."""
    if other is None:
        return True
    if eqn.primitive.name in RANDOM:
        return _operands(eqn) != _operands(other)
    if eqn.params.get("length") != other.params.get("length"):
        return True  # a scan along the rows
    inner = list(zip(jaxprs_in_params(eqn.params), jaxprs_in_params(other.params), strict=True))
    return any(differs(*pair) for pair in inner) or bounds(eqn) != bounds(other)


def _operands(eqn: JaxprEqn) -> list[Any]:
    values = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
    return [*map(shape_of, (*eqn.invars, *eqn.outvars)), *values]


def shape_of(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def sorted_sizes(jaxpr: Any) -> list[int]:
    """Return the sizes of the dimensions along which a jaxpr sorts."""
    sorts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sort"]
    return [eqn.invars[0].aval.shape[eqn.params["dimension"]] for eqn in sorts]


def bounds(eqn: JaxprEqn) -> list[Any]:
    """Return the numbers that a while loop's condition compares with; none for other operations."""
    if eqn.primitive.name != "while":
        return []
    atoms = [atom for inner in eqn.params["cond_jaxpr"].jaxpr.eqns for atom in inner.invars]
    return [atom.val for atom in atoms if isinstance(atom, Literal)]


class GlobalProgram:
    """The program for the whole batch, and those of its values that can be computed without any argument."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Thunk | None]) -> None:
        self.jaxpr = jaxpr
        self.iotas = {_iota(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "iota"}
        of_consts = (None if isinstance(const, Tracer) else functools.partial(_itself, const) for const in consts)
        given = zip([*jaxpr.constvars, *jaxpr.invars], [*of_consts, *args], strict=True)
        self._known: dict[Any, Thunk] = {var: thunk for var, thunk in given if thunk is not None}
        for eqn in jaxpr.eqns:
            inputs: Any = self.known(eqn.invars) if eqn.primitive.name in _PURE else [None]
            if None not in inputs and _is_pure(eqn):
                values = functools.cache(functools.partial(_evaluate, eqn, inputs))
                self._known |= {var: functools.partial(_pick, values, n) for n, var in enumerate(eqn.outvars)}

    def known(self, atoms: Sequence[Any]) -> list[Thunk | None]:
        """Return for each atom a function that computes it; None where that takes an argument of the program."""
        thunks = list[Thunk | None]()
        for atom in atoms:
            thunks.append(functools.partial(_itself, atom.val) if isinstance(atom, Literal) else self._known.get(atom))
        return thunks

    def counts(self, eqn: JaxprEqn) -> bool:
        """Return True if an iota of the local program numbers local rows: this program has no such one."""
        return _iota(eqn) not in self.iotas


_ARITHMETIC = ("add", "sub", "mul", "div", "rem", "neg", "max", "min", "clamp", "sign", "integer_pow", "select_n")
_LOGIC = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not")
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "concatenate", "slice", "rev", "tile")
_PURE = frozenset((*_ARITHMETIC, *_LOGIC, *_SHAPES, "iota", "convert_element_type", "copy", "jit", "pjit"))


def _is_pure(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _PURE and all(all(map(_is_pure, inner.eqns)) for inner in jaxprs_in_params(eqn.params))


def _itself(value: Any) -> Any:
    return value


def _pick(values: Callable[[], Sequence[Any]], position: int) -> Any:
    return values()[position]


def _iota(eqn: JaxprEqn) -> tuple[Any, ...]:
    return eqn.params["shape"], eqn.params["dimension"]


def _evaluate(eqn: JaxprEqn, inputs: Sequence[Thunk]) -> list[Any]:
    with jax.ensure_compile_time_eval():
        return bind(eqn, [value() for value in inputs])
