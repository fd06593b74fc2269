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
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
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
from jdp.core.tracing.graph import FORWARD, Env, Operation, before, called, evaluate, known, read, run
from jdp.core.tracing.jaxprs import ELEMENTWISE, bind
from jdp.core.types import PyTree
from jdp.core.update.local_steps import unstack
from jdp.core.update.mixing import Refusal
from jdp.core.update.optimizer_checks import Update, apply, traced_apply, traced_update
from jdp.core.update.whole_matrices import computed, stacks_of

FIELDS = ("params", "opt_state")
"""The fields of a state whose leaves may be flat."""
GIVEN = ("params", "opt_state", "params", "")
"""The fields that gradients, optimizer state, parameters and loss are like."""
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
        if self.number is not None:
            return jnp.broadcast_to(self.number, flat.at_rest)
        return flat.to_rest(jnp.broadcast_to(self.array, flat.shape))  # an operation may spread dimensions of one


def optimized(plan: Plan, state: TrainState, grads: PyTree, loss: jax.Array) -> Any:
    """Return trained parameters and optimizer state after an update, in their shapes at rest, as all arguments are."""
    static, params = state.static, trained_part(state.params, state.static.trained)
    given = (grads, state.opt_state, params, loss)
    if not static.flat and not static.whole and not static.inner_products:
        return apply(static.tx, *given)
    traced, shapes, _ = _traced(static, given)
    named = [(name, path, leaf) for name, tree in zip(GIVEN, given, strict=True) for path, leaf in _paths(tree)]
    leaves = [_Value(leaf, *_how(name, path, static)) for name, path, leaf in named]
    results = _run(traced, leaves) if not static.whole else _with_stacks(plan, state, traced, leaves)
    names = [(name, path) for name, tree in zip(FIELDS, shapes, strict=True) for path, _ in _paths(tree)]
    arrays = [
        _as(value, *_how(name, path, static), f"opt_state/{path}")
        for value, (name, path) in zip(results, names, strict=True)
    ]
    new = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    masked: Any = lambda x, flat: flat.masked(x)  # noqa: E731
    return tuple(map_flat(masked, tree, name, static) for name, tree in zip(FIELDS, new, strict=True))


def _traced(static: Static, given: Sequence[PyTree]) -> Update:
    """Return the update's program in the model's own shapes."""
    shapes = [own_shaped(_on_this_mesh(tree), name, static) for name, tree in zip(GIVEN, given, strict=True)]
    return traced_apply(static.tx, shapes)


def _with_stacks(plan: Plan, state: TrainState, traced: ClosedJaxpr, leaves: Sequence[_Value]) -> list[_Value]:
    """Replay a program with each matrix whole on one device where operations mix its elements."""
    graph = read(traced, FORWARD)
    stacks, _ = stacks_of(plan, state, graph)
    env: Env = dict(zip(graph.inputs, leaves, strict=True))

    def operation(each: Operation, operands: list[Any]) -> list[_Value]:
        return _operation(each.eqn, [x if isinstance(x, _Value) else _Value(x) for x in operands])

    entering = [value for stack in stacks for value in (*chain(*stack.inputs), *stack.taken)]
    evaluate(before(entering, env.__contains__)[0], env, operation)
    for stack in stacks:
        arrays = {value: known(value, env) for value in entering}
        made = computed(stack, {value: getattr(x, "array", x) for value, x in arrays.items()}, plan)
        for region in stack.regions:
            for value, rest in zip(region.results, region.wanted, strict=True):
                env[value] = _Value(made[value], rest.flat, frozenset((region.owner,)) if rest.flat else frozenset())
    evaluate(before(graph.outputs, env.__contains__)[0], env, operation)
    results = (known(value, env) for value in graph.outputs)
    return [x if isinstance(x, _Value) else _Value(x) for x in results]


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
        laid = _with_whole_matrices(plan, at_rest(state, _with_opt_state(plan, state, found)))
        params = trained_part(laid.params, laid.static.trained)
        try:
            jax.eval_shape(partial(optimized, plan), laid, params, jax.ShapeDtypeStruct((), jnp.float32))
        except Mixed as mixed:
            notice(
                f"the optimizer's update mixes the elements of {listed(sorted(mixed.leaves))} ({mixed.operation}): no "
                f"dimension divides by {plan.data}={plan.mesh.shape[DATA]}, and it cannot be stored flat and padded"
            )
            left = {path: flat for path, flat in found.items() if path not in mixed.leaves}
            found = left if len(left) < len(found) else {}
        else:
            return laid
    return _with_whole_matrices(plan, state)


def _with_whole_matrices(plan: Plan, state: TrainState) -> TrainState:
    """Return a state with the paths of parameters whose matrices an update takes whole; report what cannot be."""
    if plan.mesh.shape[DATA] == 1:
        return state
    update = _update(state)
    state = replace(state, static=replace(state.static, inner_products=update.inner_products and plan.row.shard_state))
    if not plan.whole_matrices:
        return state
    stacks, refused = stacks_of(plan, state, read(update.program, FORWARD))
    if plan.offload is not None and stacks:
        paths = tuple(sorted(region.owner for stack in stacks for region in stack.regions))
        stacks, refused = [], [*refused, Refusal(paths, "the update", "its optimizer state is in host memory")]
    for each in refused:
        notice(
            f"the optimizer's update mixes the elements of {listed(each.paths)} ({each.operation}), and every device "
            f"computes it, of gathered matrices: {each.reason}"
        )
    whole = tuple(sorted(region.owner for stack in stacks for region in stack.regions))
    return replace(state, static=replace(state.static, whole=whole))


def _update(state: TrainState) -> Update:
    params = trained_part(state.params, state.static.trained)
    given = (params, state.opt_state, params, jax.ShapeDtypeStruct((), jnp.float32))
    plain = [own_shaped(_described(tree), name, state.static) for name, tree in zip(GIVEN, given, strict=True)]
    return traced_update(state.static.tx, *plain)


def _described(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def exchanged(plan: Plan, state: TrainState) -> dict[tuple[str, int], int]:
    """Return (kind of collective, devices of one) -> payload bytes of an update that takes matrices whole."""
    if not state.static.whole:
        return {}
    if STACKED in state.sync:
        state = replace(state, opt_state=jax.eval_shape(unstack, state.opt_state), sync={})
    sent = [stack.sent() for stack in stacks_of(plan, state, read(_update(state).program, FORWARD))[0]]
    return {kind: sum(each.get(kind, 0) for each in sent) for kind in sorted({*chain(*sent)})}


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
    if name in _REDUCTIONS and len(eqn.params["axes"]) == len(flat.shape):
        masked = flat.masked(operands[0].array, _nothing(name, eqn.invars[0].aval.dtype))
        axes = tuple(range(len(flat.at_rest)))
        return [_Value(x) for x in bind(eqn.replace(params={**eqn.params, "axes": axes}), [masked])]
    raise Mixed(name, of)


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
