"""Two programs of one loss, for the rows at hand and for the whole batch: which draws correspond, how they differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jdp.core.gradients.jaxprs import inner_jaxprs, line_of

DRAWS = frozenset(("random_bits", "random_split", "random_gamma"))
NUMBERED = frozenset(("random_fold_in", "random_seed"))
OTHERS = frozenset(("threefry2x32", "rng_bit_generator", "rng_uniform"))
RANDOM = DRAWS | NUMBERED | OTHERS

Thunk = Callable[[], Any]


class NoRows(Exception):
    """A shape that differs from the global one, but not in one dimension that counts the rows."""


def row_dim(local: Sequence[int], whole: Sequence[int], rows: int, total: int) -> int | None:
    """The dimension that counts `rows` × n in `local` and `total` × n in `whole`; None where the shapes are equal.

    Raises:
        NoRows: they differ in another way.
    """
    if tuple(local) == tuple(whole):
        return None
    if len(local) == len(whole):
        dims = [dim for dim, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
        if len(dims) == 1 and local[dims[0]] % rows == 0 and local[dims[0]] // rows * total == whole[dims[0]]:
            return dims[0]
    raise NoRows


def is_random(eqn: JaxprEqn) -> bool:
    """Whether an operation draws, or holds one that does."""
    return eqn.primitive.name in RANDOM or any(any(map(is_random, inner.eqns)) for inner in inner_jaxprs(eqn))


def paired(local: Jaxpr, whole: Jaxpr) -> tuple[list[JaxprEqn | None], list[JaxprEqn]]:
    """For each random operation of `local` its counterpart in `whole`, if any; and one of each sort that has none.

    They correspond in order; if there are not as many, then those of each of the user's lines.
    """
    mine, theirs = (list(filter(is_random, jaxpr.eqns)) for jaxpr in (local, whole))
    if list(map(_kind, mine)) == list(map(_kind, theirs)):
        return [*theirs], []
    groups = [_by_line(mine), _by_line(theirs)]
    odd = [
        next(iter(groups[0].get(sort) or groups[1][sort]))
        for sort in {**groups[0], **groups[1]}
        if len(groups[0].get(sort, ())) != len(groups[1].get(sort, ()))
    ]
    matched: dict[int, JaxprEqn] = {}
    for sort, eqns in groups[0].items():
        others = groups[1].get(sort, [])
        if len(eqns) == len(others):
            matched |= {id(eqn): other for eqn, other in zip(eqns, others, strict=True)}
    return [matched.get(id(eqn)) for eqn in mine], odd


def _by_line(eqns: Sequence[JaxprEqn]) -> dict[Any, list[JaxprEqn]]:
    found: dict[Any, list[JaxprEqn]] = {}
    for eqn in eqns:
        found.setdefault((line_of(eqn), str(_kind(eqn))), []).append(eqn)
    return found


def _kind(eqn: JaxprEqn) -> tuple[Any, ...]:
    inner = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in inner_jaxprs(eqn)]
    return eqn.primitive.name, eqn.params.get("name"), len(eqn.invars), len(eqn.outvars), inner


def differs(local: Jaxpr, whole: Jaxpr) -> bool:
    """Whether anything random in `local` is not what it is in `whole`."""
    others, odd = paired(local, whole)
    return bool(odd) or any(map(pair_differs, filter(is_random, local.eqns), others))


def pair_differs(eqn: JaxprEqn, other: JaxprEqn | None) -> bool:
    """The same of two corresponding operations."""
    if other is None:
        return True
    if eqn.primitive.name in RANDOM:
        return _operands(eqn) != _operands(other)
    if eqn.params.get("length") != other.params.get("length"):
        return True  # a scan along the rows
    inner = list(zip(inner_jaxprs(eqn), inner_jaxprs(other), strict=True))
    return any(differs(*pair) for pair in inner) or bounds(eqn) != bounds(other)


def _operands(eqn: JaxprEqn) -> list[Any]:
    values = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
    return [*map(shape_of, (*eqn.invars, *eqn.outvars)), *values]


def shape_of(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def sorted_sizes(jaxpr: Any) -> list[int]:
    """The sizes that a jaxpr sorts along."""
    sorts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sort"]
    return [eqn.invars[0].aval.shape[eqn.params["dimension"]] for eqn in sorts]


def bounds(eqn: JaxprEqn) -> list[Any]:
    """The numbers that a while loop's condition compares with."""
    if eqn.primitive.name != "while":
        return []
    atoms = [atom for inner in eqn.params["cond_jaxpr"].jaxpr.eqns for atom in inner.invars]
    return [atom.val for atom in atoms if isinstance(atom, Literal)]


class Whole:
    """The program for the whole batch, and those of its values that are known before it runs: those of no argument."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Thunk | None]) -> None:
        self.jaxpr = jaxpr
        self.iotas = {_iota(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "iota"}
        self._known: dict[Any, Thunk] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            if not isinstance(const, Tracer):
                self._known[var] = functools.partial(_itself, const)
        self._known |= {var: arg for var, arg in zip(jaxpr.invars, args, strict=True) if arg is not None}
        for eqn in jaxpr.eqns:
            inputs = self.known(eqn.invars)
            known = [thunk for thunk in inputs if thunk is not None]
            if len(known) == len(inputs) and _is_pure(eqn):
                values = functools.cache(functools.partial(_evaluate, eqn, known))
                self._known |= {var: functools.partial(_pick, values, n) for n, var in enumerate(eqn.outvars)}

    def known(self, atoms: Sequence[Any]) -> list[Thunk | None]:
        """For each atom how to compute it, if that can be known."""
        return [
            functools.partial(_itself, atom.val) if isinstance(atom, Literal) else self._known.get(atom)
            for atom in atoms
        ]

    def counts(self, eqn: JaxprEqn) -> bool:
        """Whether `eqn` of the local program numbers local rows: the whole program has no such iota."""
        return eqn.primitive.name == "iota" and _iota(eqn) not in self.iotas


_ARITHMETIC = ("add", "sub", "mul", "div", "rem", "neg", "max", "min", "clamp", "sign", "integer_pow", "select_n")
_LOGIC = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not")
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "concatenate", "slice", "rev")
_PURE = frozenset((*_ARITHMETIC, *_LOGIC, *_SHAPES, "iota", "convert_element_type", "copy", "jit", "pjit"))


def _is_pure(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _PURE and all(all(map(_is_pure, inner.eqns)) for inner in inner_jaxprs(eqn))


def _itself(value: Any) -> Any:
    return value


def _pick(values: Callable[[], Sequence[Any]], position: int) -> Any:
    return values()[position]


def _iota(eqn: JaxprEqn) -> tuple[Any, ...]:
    return eqn.params["shape"], eqn.params["dimension"]


def _evaluate(eqn: JaxprEqn, inputs: Sequence[Thunk]) -> list[Any]:
    with jax.ensure_compile_time_eval():
        return bind(eqn, [value() for value in inputs])


def bind(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """Do what `eqn` does with other operands."""
    with at(eqn):
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


@contextmanager
def at(eqn: JaxprEqn) -> Generator[None]:
    """What is traced inside bears the source line and the name scope of `eqn`, and its settings."""
    scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scope), eqn.ctx.manager:
        yield
