"""An optimizer's update on leaves that are stored flat and padded (`jdp.core.sharding.padded`).

The update is traced for the model's own shapes, so that masks by rank or shape, and means, are those of the model. Then
it is replayed on the stored leaves:
- an element-wise operation runs on the rows as they are.
- a sum, a largest or a smallest element of all of a leaf leaves out the padding, as an inner product of two does.
- values that depend on no flat leaf are computed as traced, and made flat where they meet one.

Anything else (a matrix product, sums along one dimension) mixes elements: such a leaf stays replicated. `flattened`
finds that out on shapes alone when a state is made. After an update the padding is zero again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.formatting import listed
from jdp.base.notices import notice
from jdp.base.tree_paths import matches, path_of
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import own_axes
from jdp.core.sharding.optimizer_state import mirrored
from jdp.core.sharding.padded import Flat
from jdp.core.state import MOMENTUM, STACKED, Static, TrainState, map_flat, own_shaped, trained_part
from jdp.core.tracing.graph import FORWARD, called, run
from jdp.core.tracing.jaxprs import ELEMENTWISE, bind
from jdp.core.types import PyTree
from jdp.core.update.local_steps import unstack
from jdp.core.update.optimizer_checks import update

FIELDS = ("params", "opt_state")
"""The fields of a state whose leaves may be flat."""
_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"))


class Mixed(Exception):
    """An operation, by name, mixes the elements of flat leaves, which belong to the parameters `leaves`."""

    def __init__(self, operation: str, leaves: frozenset[str]) -> None:
        super().__init__(f"{operation} mixes the elements of {listed(sorted(leaves))}")
        self.operation, self.leaves = operation, leaves


@dataclass(frozen=True)
class _Value:
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
        return flat.to_rest(self.array) if self.number is None else jnp.broadcast_to(self.number, flat.at_rest)


def optimized(static: Static, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> Any:
    """Return trained parameters and optimizer state after an update, in their shapes at rest, as all arguments are."""

    def plain(grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> Any:
        updates, opt_state = update(static.tx, grads, opt_state, params, loss)
        return optax.apply_updates(params, updates), opt_state

    if not static.flat:
        return plain(grads, opt_state, params, loss)
    given = [(grads, "params"), (opt_state, "opt_state"), (params, "params"), (loss, "")]
    abstract = [own_shaped(_on_this_mesh(tree), name, static) for tree, name in given]
    traced, shapes = jax.make_jaxpr(plain, return_shape=True)(*abstract)
    leaves = [_Value(leaf, *_how(name, path, static)) for tree, name in given for path, leaf in _paths(tree)]
    results = _run(traced, leaves)
    names = [(name, path) for name, tree in zip(FIELDS, shapes, strict=True) for path, _ in _paths(tree)]
    arrays = [
        _as(value, *_how(name, path, static), f"opt_state/{path}")
        for value, (name, path) in zip(results, names, strict=True)
    ]
    new = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    masked: Any = lambda x, flat: flat.masked(x)  # noqa: E731
    return tuple(map_flat(masked, tree, name, static) for name, tree in zip(FIELDS, new, strict=True))


def _on_this_mesh(tree: PyTree) -> PyTree:
    """Return what describes a tree's leaves on the context's mesh: of leaves on none jax would move some to it."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x.update(sharding=sharding), jax.eval_shape(lambda x: x, tree))


def flattened(plan: Plan, state: TrainState) -> TrainState:
    """Return the abstract state in the shapes that the plan gives it, without shardings.

    Parameters that stay replicated because the update mixes their elements are reported.
    """
    assert not state.static.flat
    state = jax.eval_shape(lambda state: state, state)
    if STACKED in state.sync:
        one = replace(state, opt_state=jax.eval_shape(unstack, state.opt_state), sync={})
        return at_rest(state, flattened(plan, one).static)
    found = _candidates(plan, state)
    while found:
        static = _with_opt_state(plan, state, found)
        laid = at_rest(state, static)
        params = trained_part(laid.params, static.trained)
        try:
            jax.eval_shape(
                lambda *given, static=static: optimized(static, *given),
                *(params, laid.opt_state, params, jax.ShapeDtypeStruct((), jnp.float32)),
            )
        except Mixed as mixed:
            notice(
                f"the optimizer's update mixes the elements of {listed(sorted(mixed.leaves))} ({mixed.operation}): no "
                f"dimension divides by {plan.data}={plan.mesh.shape[DATA]}, and it cannot be stored flat and padded"
            )
            left = {path: flat for path, flat in found.items() if path not in mixed.leaves}
            found = left if len(left) < len(found) else {}
        else:
            return laid
    return state


def at_rest(state: TrainState, static: Static) -> TrainState:
    """Return a state in its shapes at rest, abstract or traced, of one in its own shapes."""

    def rest(x: Any, flat: Flat) -> Any:
        return jax.eval_shape(flat.to_rest, x) if isinstance(x, jax.ShapeDtypeStruct) else flat.to_rest(x)

    fields = {name: map_flat(rest, getattr(state, name), name, static) for name in FIELDS}
    own = {MOMENTUM: map_flat(rest, state.sync[MOMENTUM], "params", static)} if MOMENTUM in state.sync else {}
    return replace(state, **fields, sync={**state.sync, **own}, static=static)


def _candidates(plan: Plan, state: TrainState) -> dict[str, Flat]:
    """Return path -> `Flat` of parameters that would be replicated, and could be flat and padded."""
    count, model_axes = plan.mesh.shape[DATA], [axis for axis in own_axes(plan.mesh) if plan.mesh.shape[axis] > 1]
    if not plan.pad or not plan.row.shard_state or count == 1 or model_axes or plan.offload is not None:
        return {}
    placements = jax.tree.leaves(plan.param_placements(state.params, state.static))
    replicated = (p for p in placements if not any(p.rest) and math.prod(p.shape) >= plan.min_shard_size)
    free = (p for p in replicated if not any(matches(p.path, [pattern]) for pattern, _ in plan.rules))
    numbers = (p for p in free if not p.dtype.startswith("key"))
    return {p.path: flat for p in numbers if (flat := Flat.of(p.shape, count)) is not None}


def _with_opt_state(plan: Plan, state: TrainState, found: dict[str, Flat]) -> Static:
    """Return the static part with these parameters flat, and the optimizer's leaves of their shapes."""
    placements = {p.path: p for p in jax.tree.leaves(plan.param_placements(state.params, state.static))}
    flat = [(f"params/{path}".rstrip("/"), flat) for path, flat in found.items()]
    for path, leaf in _paths(state.opt_state):
        owner = mirrored(path, leaf.shape, placements)
        if owner is not None and owner.path in found:
            flat.append((f"opt_state/{path}", found[owner.path]))
    return replace(state.static, flat=tuple(flat))


def _paths(tree: PyTree) -> list[tuple[str, Any]]:
    return [(path_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _how(name: str, path: str, static: Static) -> tuple[Flat | None, frozenset[str]]:
    """Return a leaf's layout, and the parameters that it belongs to if it is flat."""
    flat = dict(static.flat).get(f"{name}/{path}".rstrip("/"))
    if flat is None:
        return None, frozenset()
    if name == "params":
        return flat, frozenset((path,))
    params = (other.partition("/")[2] for other, _ in static.flat if other.startswith("params"))
    return flat, frozenset(other for other in params if f"/{other}/" in f"/{path}/")


def _run(program: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
    """Replay a program on values of which some are flat."""
    return run(program, arguments, _operation, lambda _, value: _Value(value))


def _operation(eqn: Any, operands: list[_Value]) -> list[_Value]:
    name = eqn.primitive.name
    of = frozenset[str]().union(*(operand.of for operand in operands))
    flats = {operand.flat for operand in operands if operand.flat is not None}
    if not flats and name == "broadcast_in_dim" and not jnp.ndim(operands[0].array):
        return [_Value(array, number=operands[0].array) for array in bind(eqn, [operands[0].array])]
    if not flats:
        return [_Value(array) for array in bind(eqn, [operand.array for operand in operands])]
    if (inner := called(eqn, FORWARD)) is not None:
        return _run(inner, operands)
    if name == "cond":
        return _branches(eqn, operands)
    if len(flats) > 1:
        raise Mixed(name, of)
    (flat,) = flats
    if name in ELEMENTWISE:
        return [_Value(array, flat, of) for array in bind(eqn, [operand.at_rest(flat) for operand in operands])]
    if name == "reshape" and eqn.params["dimensions"] is None:  # the elements keep their order
        return [replace(operands[0], flat=replace(flat, shape=eqn.outvars[0].aval.shape))]
    if name == "broadcast_in_dim" and eqn.outvars[0].aval.shape == flat.shape:
        return operands[:1]
    if name == "dot_general" and _is_inner_product(eqn):
        one, other = (flat.masked(x.at_rest(flat)).astype(eqn.outvars[0].aval.dtype) for x in operands)
        return [_Value((one * other).sum())]
    if name in _REDUCTIONS and len(eqn.params["axes"]) == len(flat.shape):
        masked = flat.masked(operands[0].array, _nothing(name, eqn.invars[0].aval.dtype))
        axes = tuple(range(len(flat.at_rest)))
        return [_Value(x) for x in bind(eqn.replace(params={**eqn.params, "axes": axes}), [masked])]
    raise Mixed(name, of)


def _is_inner_product(eqn: Any) -> bool:
    """Return True for the sum of the products of all elements, in order (`jnp.vdot`)."""
    (left, right), batch = eqn.params["dimension_numbers"]
    return batch == ((), ()) and left == right == tuple(range(len(eqn.invars[0].aval.shape)))


def _nothing(reduction: str, dtype: Any) -> Any:
    """Return the number that changes nothing in a reduction."""
    if reduction in ("reduce_sum", "reduce_or"):
        return 0
    if reduction == "reduce_and":
        return True if dtype == jnp.bool_ else -1
    if dtype == jnp.bool_:
        return reduction == "reduce_min"
    limits: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    least, most = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else (limits.min, limits.max)
    return least if reduction == "reduce_max" else most


def _branches(eqn: Any, operands: list[_Value]) -> list[_Value]:
    """Replay a choice between programs: a result that is flat in one of them is so in all."""
    index, given = operands[0], operands[1:]
    if index.flat is not None:
        raise Mixed("cond", index.of)
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    hows: list[list[tuple[Flat | None, frozenset[str]]]] = []

    def replayed(branch: ClosedJaxpr, arrays: Sequence[Any]) -> list[_Value]:
        return _run(branch, [replace(value, array=array) for value, array in zip(given, arrays, strict=True)])

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
        return [_as(value, *how, "cond") for value, how in zip(replayed(branch, arrays), together, strict=True)]

    results = jax.lax.switch(index.array, [partial(chosen, branch) for branch in branches], *arrays)
    return [_Value(array, *how) for array, how in zip(results, together, strict=True)]


def _as(value: _Value, flat: Flat | None, of: frozenset[str], name: str) -> Any:
    """Return a value's array in the form that is wanted."""
    if value.flat == flat:
        return value.array
    if flat is None or value.flat is not None:
        raise Mixed(name, value.of | of)
    return value.at_rest(flat)
