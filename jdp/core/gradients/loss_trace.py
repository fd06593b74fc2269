"""What a loss function's trace (a jaxpr) tells before the loss runs.

`trace_loss` traces the loss on shapes alone, with the calls inside it inlined. The trace shows
1. whether the loss returns a `Loss`, and which parameter it uses more than once;
2. operations that only a global view can run: sharding constraints and `shard_map`s over the batch axes;
3. float32 leaves of the batch that are multiplied with weights of lower precision, which makes the product float32;
4. terms of `Loss.total` that no leaf of the batch reaches: a weight penalty, which is no sum over examples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jdp.base.tree_paths import path_of
from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_call import TracedLoss
from jdp.core.gradients.loss_program import LossProgram, Programs
from jdp.core.gradients.row_proof.quotients import flattened
from jdp.core.precision import Precision
from jdp.core.random.match_draws import drawing
from jdp.core.sharding.placement import axes_of
from jdp.core.state import AnyState
from jdp.core.tracing.collectives import gathers_at_use, is_gather
from jdp.core.tracing.graph import Graph, Value, before, read
from jdp.core.tracing.jaxprs import every_eqn, user_line
from jdp.core.types import Batch, LossFn

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_SUMS = {"add", "sub", "add_any"}
_NAMES_AXES = frozenset(
    """
    all_gather all_gather_invariant all_to_all axis_index pbroadcast pmax pmin ppermute psum psum2 psum_invariant
    psum_scatter pvary ragged_all_to_all reduce_scatter shard_map
    """.split()  # noqa: SIM905
)
_PARAMS, _BATCH = "parameters", "batch"
_KEEPS_TERMS = {"neg", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy", "reduce_precision"}


@dataclass(frozen=True)
class Term:
    """A summand of `Loss.total` that does not depend on the batch.

    Attributes:
        line: "file:line (function)" of the operation that made it.
        signature: a digest of its computation, equal in two traces of a loss if it does not depend on the number of
            rows.
    """

    line: str
    signature: str


@dataclass(frozen=True, eq=False)
class LossTrace:
    """The trace of one call of a loss function, for so many `rows`."""

    program: LossProgram
    rows: int

    @property
    def jaxpr(self) -> Any:
        """The program, with all that the call computes."""
        return self.program.closed.jaxpr

    @cached_property
    def closed(self) -> Any:
        """The program of the total, the weight, both of each metric, and the arrays of aux, in this order."""
        (sums, model_state), extras = self.program.shape
        counts = [len(jax.tree.leaves(tree)) for tree in (sums, model_state, *extras)]
        wanted = [is_wanted for is_wanted, n in zip((True, False, False, True), counts, strict=True) for _ in range(n)]
        jaxpr, _ = dce_jaxpr(self.jaxpr, wanted, instantiate=True)
        return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, self.program.closed.consts)

    @cached_property
    def written_out(self) -> Any:
        """`closed` with the functions that it only calls written out; to be taken first where its axes are bound."""
        return flattened(self.closed)

    @property
    def outputs(self) -> int:
        """How many arrays of aux it returns: the last results of `closed`."""
        return len(self.program.shape[1][1])

    @property
    def is_sum(self) -> bool:
        """True if the loss returns a `Loss`, False for a plain scalar."""
        return self.program.shape[1][0] is None

    @property
    def metrics(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its metrics' totals, by name."""
        return {name: total.shape for name, (total, _) in self.program.shape[0][0].metrics.items()}

    @property
    def gathers_rows(self) -> bool:
        """True if it calls `jdp.gather_rows`."""
        return self.program.gathers_rows

    @cached_property
    def inputs(self) -> tuple[range, range]:
        """Which of its inputs are the parameters' leaves, and which the batch's."""
        counts = [len(jax.tree.leaves(tree)) for tree in self.program.arguments]
        return range(counts[0]), range(sum(counts[:2]), sum(counts[:3]))

    @cached_property
    def graph(self) -> Graph:
        """`closed` with its calls inlined."""
        return read(self.closed)

    def _by_path(self, place: int) -> dict[str, Value]:
        """Return the inputs of an argument of the loss, by path: 0 the parameters, 2 the batch."""
        paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(self.program.arguments[place])]
        return dict(zip(paths, (self.graph.inputs[i] for i in self.inputs[place // 2]), strict=True))

    def reused(self, counted: tuple[bool, ...] | None) -> str | None:
        """Return the path of the first parameter marked in `counted` (None: any) that several operations take."""
        paths = [path for path, _ in jax.tree.leaves_with_path(self.program.arguments[0])]
        named = zip(range(len(paths)), self.jaxpr.invars, counted or repeat(True), strict=False)
        uses = count_uses(self.jaxpr, {var: [i] for i, var, counts in named if counts})
        return next((path_of(path) for i, path in enumerate(paths) if uses[i] > 1), None)

    def names_axes(self) -> bool:
        """Return True if the loss may behave otherwise for a device's rows: it runs a collective or a `shard_map`."""
        return not all(is_gather(eqn) for eqn in every_eqn(self.closed.jaxpr) if eqn.primitive.name in _NAMES_AXES)

    def global_only(self, axes: tuple[str, ...]) -> str | None:
        """Return the source line of the first sharding constraint or `shard_map` that names one of `axes`, or None."""
        for eqn in every_eqn(self.jaxpr):
            named = set(eqn.params.get("manual_axes", ())) if eqn.primitive.name == "shard_map" else set()
            if eqn.primitive.name == "sharding_constraint":
                spec = getattr(eqn.params["sharding"], "spec", ())
                named = {axis for entry in spec for axis in axes_of(entry)}
            if named & set(axes):
                return user_line(eqn)
        return None

    def widened(self) -> tuple[str, str] | None:
        """Return (path, source line) of a float32 leaf of the batch that makes a product with bf16 weights float32."""
        wide = {value: path for path, value in self._by_path(2).items() if value.aval.dtype == jnp.float32}
        narrow = {value for value in self._by_path(0).values() if value.aval.dtype == jnp.bfloat16}
        weights = set(narrow)  # and their float32 copies
        for op in self.graph.operations:
            name, leaves = op.name, [wide[value] for value in op.operands if value in wide]
            if name in _PRODUCTS and leaves and not weights.isdisjoint(op.operands):
                return leaves[0], user_line(op.eqn)
            copies = name == "convert_element_type" and op.operands[0] in narrow
            shaped = len(op.operands) == 1 and op.operands[0] in weights
            for result in op.results:
                if getattr(result.aval, "dtype", None) == jnp.float32:
                    wide |= dict.fromkeys([result] if leaves else (), next(iter(leaves), ""))
                    weights |= {result} if copies or shaped else set()
        return None

    def terms_without_batch(self) -> list[Term]:
        """Return the summands of total that depend on parameters and on no leaf of the batch."""
        return list(self._terms(self.graph.outputs[0], ()))

    @property
    def constant_weight(self) -> str | None:
        """The weight's signature if it depends on no leaf of the batch; else None."""
        weight = self.graph.outputs[1]
        return None if self._needs_batch(weight) else self._signature(weight)

    def _terms(self, value: Value, factors: tuple[str, ...]) -> Iterator[Term]:
        """Yield the terms of a value, looking through sums and factors that do not depend on the batch."""
        if _PARAMS not in self._kinds_of.get(value, ()) or self._is_zero(value):
            return
        op = value.maker
        if not self._needs_batch(value):
            yield Term(user_line(op.eqn) if op else "a parameter", _digest(*factors, self._signature(value)))
        elif op is not None and (op.name in _SUMS or op.name in _KEEPS_TERMS):
            for operand in op.operands:
                yield from self._terms(operand, factors)
        elif op is not None and op.name in ("mul", "div"):
            first, second = op.operands
            if not self._needs_batch(second):
                yield from self._terms(first, (*factors, self._signature(second)))
            elif op.name == "mul" and not self._needs_batch(first):
                yield from self._terms(second, (*factors, self._signature(first)))

    def _needs_batch(self, value: Value) -> bool:
        return _BATCH in self._kinds_of.get(value, ())

    def _is_zero(self, value: Value) -> bool:
        """Return True for what is 0 whatever the inputs are: a penalty whose coefficient was set to 0."""
        op = value.maker
        if op is None:
            return _is_number(value.constant) and not np.any(value.constant)
        if op.name in ("mul", "div"):
            return self._is_zero(op.operands[0]) or (op.name == "mul" and self._is_zero(op.operands[1]))
        return (op.name in _SUMS or op.name in _KEEPS_TERMS) and all(map(self._is_zero, op.operands))

    @cached_property
    def _kinds_of(self) -> dict[Value, frozenset[str]]:
        """For each value, whether it depends on parameters, on the batch, or on both."""
        kinds = zip((_PARAMS, _BATCH), self.inputs, strict=True)
        nothing = frozenset[str]()
        known = {self.graph.inputs[i]: frozenset[str]((kind,)) for kind, places in kinds for i in places}
        for op in self.graph.operations:
            needed = nothing.union(*map(known.get, op.operands, repeat(nothing)))
            known |= dict.fromkeys(op.results, needed)
        return known

    @cached_property
    def _signatures(self) -> dict[Value, str]:
        """The signatures that were asked for, and those of the inputs."""
        return {value: f"input {i}" for i, value in enumerate(self.graph.inputs)}

    def _signature(self, value: Value) -> str:
        """Return a digest of a value's computation, equal in two traces where the computation is the same."""
        known = self._signatures
        for op in before([value], stop=known.__contains__)[0]:
            operands = [known[v] if v in known else _constant(v) for v in op.operands]
            settings = sorted((name, str(setting)) for name, setting in op.eqn.params.items())
            signature = _digest(op.name, settings, *operands)
            known |= {result: _digest(signature, i) for i, result in enumerate(op.results)}
        return known.get(value) or _constant(value)


def trace_loss(
    loss_fn: LossFn,
    precision: Precision,
    state: AnyState,
    batch: Batch,
    rows: int,
    train: bool = True,
    training: bool = True,
) -> LossTrace:
    """Trace one call of `loss_fn` on `rows` rows shaped like the batch's; nothing is computed.

    In evaluation (`train=False`) the loss gets `rng=None`; without `training` its modules are in evaluation mode.
    Within `sharing_traces` a trace may be an earlier one's.
    """
    batch_size = batch_rows(batch)
    plain = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731

    def fewer(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # NumPy's int64 becomes int32
        return jax.ShapeDtypeStruct((rows * leaf.shape[0] // batch_size, *leaf.shape[1:]), dtype)

    arguments = (
        precision.working_shapes(state.params),
        jax.tree.map(plain, state.model_state),
        jax.tree.map(fewer, batch),
        plain(state.rng) if train else None,
    )
    loss = TracedLoss(loss_fn, state.static.adapter, None, None, training=training)
    return LossTrace(Programs().of(loss, arguments), rows)


def count_uses(jaxpr: Any, numbers: dict[Any, list[int]]) -> Counter[int]:
    """Count the primitive operations, of called functions too, that take a numbered variable, or its gathered copy."""
    counts, numbers = Counter[int](), dict(numbers)
    for eqn in jaxpr.eqns:
        taken = [i for i, x in enumerate(eqn.invars) if not isinstance(x, Literal) and x in numbers]
        if not taken:
            continue
        called = next((inner for inner in jaxprs_in_params(eqn.params) if len(inner.invars) == len(eqn.invars)), None)
        if gathers_at_use(eqn):
            numbers[eqn.outvars[0]] = [number for x in {eqn.invars[i] for i in taken} for number in numbers[x]]
        elif called is None:
            counts.update(number for i in taken for number in numbers[eqn.invars[i]])
        else:
            counts += count_uses(called, {called.invars[i]: numbers[eqn.invars[i]] for i in taken})
    return counts


def redraws(jaxpr: Any) -> bool:
    """Return True if a loop of `jaxpr` that ends when a condition is met draws random numbers."""
    loops = [eqn for eqn in every_eqn(jaxpr) if eqn.primitive.name == "while"]
    return any(drawing(inner) for loop in loops for inner in jaxprs_in_params(loop.params))


def computes_in_float32(jaxpr: Any) -> bool:
    """Return True if no operation of `jaxpr` makes floating-point numbers of fewer than 32 bits."""
    dtypes = {getattr(var.aval, "dtype", None) for eqn in every_eqn(jaxpr) for var in eqn.outvars}
    return not any(dtype and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


def _constant(value: Value) -> str:
    """Digest a scalar constant by its number, an array by its shape and dtype."""
    return _digest(repr(value.constant) if np.ndim(value.constant) == 0 else str(value.aval))


def _is_number(constant: Any) -> bool:
    known = constant is not None and np.ndim(constant) == 0 and not isinstance(constant, Tracer)
    return known and jnp.issubdtype(getattr(constant, "dtype", type(constant)), np.number)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
