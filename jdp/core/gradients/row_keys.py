"""Random numbers by global row: a loss on some rows draws for them what it draws for the whole batch.

A loss that draws `jax.random.bernoulli(rng, 0.9, x.shape)` gets the same masks on one device and on a thousand, in one
microbatch and in eight. Under `jit`, on global arrays, JAX's partitionable threefry ensures that. On one device's rows
(`shard_map`) or on a microbatch a plain key would give every part the same mask.

There the loss gets a *row key*: a typed key that knows the global numbers of the local rows, row = offset + stride ×
local row. A draw that counts rows hashes the indices that its elements have in the draw for the whole batch. Any other
draw is the same for every part. A draw counts rows if a dimension of its shape doubles when the rows double. To find
this, the loss is traced at two numbers of rows, and the shapes of its draws are compared (`read_draws`).

Counter layout: jax's `threefry2x32` in its partitionable form hashes the 64-bit linear index of each element
(Salmon et al. 2011, doi:10.1145/2063384.2063405; jax-ml/jax design note 3263).
"""

import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from jdp.base.errors import UserError
from jdp.core.reading import scan_counts, user_line
from jdp.core.types import PartsError

THREEFRY = "threefry2x32"
_PREFIX = "jdp_rows"
_SHAPED = frozenset(("random_bits", "random_split"))
_OTHERS = frozenset(("random_gamma", "random_unwrap", "rng_bit_generator", "rng_uniform", "threefry2x32"))
Shape = tuple[int, ...]
Drawn = tuple[str, Shape]
"""The kind of a random operation and the shape that it draws."""


@dataclass(frozen=True)
class RowDraws:
    """The draws of a loss that count rows, by their shapes, when it is traced for `rows` rows."""

    rows: int
    by_row: tuple[tuple[Drawn, int], ...] = ()  # draws that count rows, and the product of the dimensions before these
    shared: frozenset[Drawn] = frozenset()  # the other draws

    def key(self, key: jax.Array, *, offset: Any, stride: int, total: int) -> jax.Array:
        """Return a part's row key from the step's key; local row i is row `offset + stride * i` of the `total` rows."""
        words = (*jax.random.key_data(key), offset, stride, total)
        words = jnp.stack([jnp.asarray(word, jnp.uint32) for word in words])
        return jax.random.wrap_key_data(words, impl=_impl(self))


def draws_anything(jaxpr: Jaxpr) -> bool:
    return next(_draws(jaxpr), None) is not None


def row_key_shape(rows: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a row key with which a loss is traced to read its draws; it cannot draw."""
    make = functools.partial(RowDraws(rows).key, offset=0, stride=1, total=rows)
    return jax.eval_shape(lambda: make(jax.random.key(0, impl=THREEFRY)))


def is_of_row_key(error: Exception) -> bool:
    """Return True for an error of a function of `jax.random` that does not accept row keys."""
    return _PREFIX in str(error)


@dataclass(frozen=True)
class _Draw:
    """A random operation in the user's source."""

    kind: str
    line: str
    shape: Shape
    keys: Shape = ()  # the shape of its keys
    is_own: bool = True  # `rng` made these keys
    carried: bool = False  # a scan draws from a key that is carried or the same in each round
    numbered: bool = False  # the numbers of a `fold_in` are constants of the program, such as `arange(rows)`


def _draws(jaxpr: Jaxpr, called_at: str | None = None) -> Iterator[_Draw]:
    """Yield the random operations of a jaxpr, and the scans around some; `called_at`: the line that calls its `jit`."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        kind: str = eqn.primitive.name
        first: Any = eqn.invars[0].aval if eqn.invars else None
        line = called_at or user_line(eqn)
        if kind in _SHAPED:
            yield _Draw(kind, line, tuple(eqn.params["shape"]), first.shape, _is_row_key(first))
        elif kind == "random_fold_in":
            numbers: Any = eqn.invars[1]
            numbered = _is_constant(numbers, makers)
            yield _Draw(kind, line, numbers.aval.shape, first.shape, _is_row_key(first), numbered=numbered)
        elif kind in _OTHERS:
            result: Any = eqn.outvars[0].aval
            yield _Draw(kind, line, result.shape, is_own=kind != "random_unwrap" or _is_row_key(first))
        callers = line if kind == "jit" else called_at
        inside = [draw for inner in jaxprs_in_params(eqn.params) for draw in _draws(inner, callers)]
        if kind == "scan" and inside:
            carried = any(_is_row_key(x.aval) for x in eqn.invars[: sum(scan_counts(eqn))])
            yield _Draw(kind, line, (eqn.params["length"],), carried=carried)
        yield from inside


def _is_row_key(aval: Any) -> bool:
    return _PREFIX in str(aval.dtype)


def _is_constant(value: Any, makers: dict[Var, JaxprEqn]) -> bool:
    """Return True for a value that does not depend on an input of its jaxpr."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Literal):
            continue
        if value not in makers:
            return False
        waiting += makers[value].invars
    return True


def read_draws(few: Jaxpr, many: Jaxpr, rows: int, key: Any) -> RowDraws:
    """Return the draws of a loss that count rows, or raise PartsError if the rows of a draw cannot be identified.

    `few` is the loss, traced on `rows` rows with a row key, and `many` the same on twice as many.
    """
    if "fry" not in str(key.dtype):  # threefry's; no key is made here, because devices may be described
        raise PartsError(f"it draws from a {key.dtype}, whose numbers have no index; use jax.random.key(seed)")
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise PartsError("it draws while jax_threefry_partitionable is off, so numbers have no index; turn it on")
    lead = "draw with the rows leading, normal(rng, (rows, …)), or from split(rng, rows)"
    draws, draws_of_twice = [*_draws(few)], [*_draws(many)]
    if [draw.kind for draw in draws] != [draw.kind for draw in draws_of_twice]:
        raise PartsError(f"the loss draws more often for more rows, {draws_of_twice[0].line}; {lead}")
    pairs = list(zip(draws, draws_of_twice, strict=True))
    by_row, shared, per_row_keys = dict[Drawn, int](), set[Drawn](), set[Drawn]()
    for draw, twice in pairs:
        line, counts = draw.line, draw.shape != twice.shape
        if draw.kind in _OTHERS and draw.is_own:
            raise PartsError(f"{draw.kind} cannot be drawn by row, {line}; draw otherwise from rng")
        if draw.kind == "scan":
            if counts and draw.carried:
                raise PartsError(f"a key is carried from row to row, {line}; {lead}")
        elif draw.kind == "random_fold_in":
            if counts and draw.numbered:
                raise PartsError(f"the rows of a call are numbered, {line}; use split(rng, rows)")
        elif counts and not draw.is_own:
            raise PartsError(f"rows are drawn from another key than the loss gets, {line}; draw from its rng")
        elif counts:
            before = _before_rows(draw.shape, twice.shape, rows, line)
            if by_row.setdefault((draw.kind, draw.shape), before) != before:
                raise PartsError(_two_meanings(draw.shape, rows))
        elif draw.is_own:
            (shared if draw.keys == twice.keys else per_row_keys).add((draw.kind, draw.shape))
    folds_rows = any(draw.kind == "random_fold_in" and draw.shape != twice.shape for draw, twice in pairs)
    shared |= per_row_keys if folds_rows else per_row_keys - by_row.keys()  # keys that are split by row belong to rows
    if both := shared & by_row.keys():
        raise PartsError(_two_meanings(min(both)[1], rows))
    return RowDraws(rows, tuple(sorted(by_row.items())), frozenset(shared))


def _two_meanings(shape: Shape, rows: int) -> str:
    return (
        f"two draws have the shape {list(shape)} for {rows} rows, and count rows differently; change the shape of one, "
        "or the rows per device and microbatch"
    )


def _before_rows(shape: Shape, twice: Shape, rows: int, line: str) -> int:
    """Return the product of the dimensions before the dimension that counts rows."""
    dims = [dim for dim, pair in enumerate(zip(shape, twice, strict=False)) if pair[0] != pair[1]]
    if len(shape) != len(twice) or len(dims) != 1 or shape[dims[0]] % rows or twice[dims[0]] != 2 * shape[dims[0]]:
        shapes = f"the shape {list(shape)} for {rows} rows and {list(twice)} for {2 * rows}"
        raise PartsError(f"a draw has {shapes}, {line}; draw with the rows leading")
    return math.prod(shape[: dims[0]])


@functools.cache
def _impl(draws: RowDraws) -> Any:
    """Return the PRNG of row keys for these draws. Key words: [threefry × 2, offset, stride, total]."""
    rows, before = draws.rows, dict(draws.by_row)

    def counts(words: jax.Array, kind: str, shape: Shape) -> tuple[jax.Array, jax.Array]:
        if (kind, shape) in before:
            return _row_counts(words, shape, rows, before[kind, shape])
        if (kind, shape) not in draws.shared:
            raise UserError(
                "A loss draws the same shapes whenever it is traced; given a new draw of shape "
                f"{list(shape)}. Draw the same in the rules of a custom derivative as in the function."
            )
        linear = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
        return jnp.asarray((linear >> 32).astype(np.uint32)), jnp.asarray(linear.astype(np.uint32))

    def split(words: jax.Array, shape: Shape) -> jax.Array:
        keys = jnp.stack(_hash(words, *counts(words, "random_split", shape)), axis=-1)
        # A key of each row: offset 0, stride 1, all rows.
        row_map = jnp.array([0, 1, rows], jnp.uint32) if ("random_split", shape) in before else words[2:]
        return jnp.concatenate([keys, jnp.broadcast_to(row_map, (*shape, 3))], axis=-1)

    def random_bits(words: jax.Array, bit_width: int, shape: Shape) -> jax.Array:
        dtype = jnp.dtype(f"uint{bit_width}")
        high, low = _hash(words, *counts(words, "random_bits", shape))
        if bit_width == 64:
            return (high.astype(dtype) << 32) | low.astype(dtype)
        return (high ^ low).astype(dtype)

    name = f"{_PREFIX}_{rows}_{zlib.crc32(repr((draws.by_row, sorted(draws.shared))).encode()):08x}"
    return jexr.define_prng_impl(
        key_shape=(5,), seed=_seed, split=split, random_bits=random_bits, fold_in=_fold_in, name=name, tag=name
    )


def _seed(seed: Any) -> jax.Array:
    raise UserError(f"A row key is made from the step's key; given the seed {seed}. Use jax.random.key(seed).")


def _fold_in(words: jax.Array, data: Any) -> jax.Array:
    folded = jax.random.fold_in(jax.random.wrap_key_data(words[:2], impl=THREEFRY), data)
    return jnp.concatenate([jax.random.key_data(folded), words[2:]])


def _row_counts(words: jax.Array, shape: Shape, rows: int, before: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and low words of the index, in the global draw, of every element of [before, rows × n, ...]."""
    size = math.prod(shape) // (rows * before)
    if not size or not before:
        return jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)
    assert size < 2**32, f"a draw of {size} elements a row cannot be indexed"
    row = words[2] + words[3] * jnp.arange(rows, dtype=jnp.uint32)
    if before > 1:
        row = (words[4] * jnp.arange(before, dtype=jnp.uint32)[:, None] + row[None]).reshape(-1)
    high, low = (word[:, None] for word in _multiply(row, size))
    index = low + jnp.arange(size, dtype=jnp.uint32)[None]
    return (high + (index < low).astype(jnp.uint32)).reshape(shape), index.reshape(shape)  # the sum may carry


def _multiply(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and low 32 bits of uint32 `a` times `b` < 2**32, by 16-bit halves."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    low, cross = a_low * b_low, a_high * b_low
    middle = (low >> 16) + (cross & 0xFFFF) + a_low * b_high  # < 2**16 + 2**16 + (2**16 - 1)**2 < 2**32
    return a_high * b_high + (cross >> 16) + (middle >> 16), (middle << 16) | (low & 0xFFFF)


def _hash(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return threefry of 64-bit counts: both result words, shaped like the counts."""
    counts = jnp.concatenate([high.ravel(), low.ravel()])
    first, second = jnp.split(jexr.threefry_2x32(words[:2], counts), 2)
    return first.reshape(high.shape), second.reshape(low.shape)
