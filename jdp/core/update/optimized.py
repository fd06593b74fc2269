"""An optimizer's update on the leaves of a state as they are stored.

The update is traced for the model's own shapes. It is replayed on leaves that are flat and padded (`padded.py`), and
with each matrix whole on one device where operations mix its elements (`whole_matrices.py`). `flattened` finds out on
shapes alone, when a state is made, which parameters can be flat. After an update the padding is zero again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
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
from jdp.core.state import Static, TrainState, map_flat, own_shaped, trained_part
from jdp.core.tracing.graph import FORWARD, Env, Operation, before, evaluate, known, read
from jdp.core.types import PyTree
from jdp.core.update.optimizer_checks import Update, apply, traced_apply, traced_update
from jdp.core.update.padded import Mixed, Stored, as_stored, replay, replay_operation
from jdp.core.update.whole_matrices import computed, stacks_of

FIELDS = ("params", "opt_state")
"""The fields of a state whose leaves may be flat."""
GIVEN = ("params", "opt_state", "params", "")
"""The fields that gradients, optimizer state, parameters and loss are like."""


def optimized(plan: Plan, state: TrainState, grads: PyTree, loss: jax.Array) -> Any:
    """Return trained parameters and optimizer state after an update, in their shapes at rest, as all arguments are."""
    static, params = state.static, trained_part(state.params, state.static.trained)
    given = (grads, state.opt_state, params, loss)
    if not static.flat and not static.whole and not static.inner_products:
        return apply(static.tx, *given)
    traced, shapes, _ = _traced(static, given)
    named = [(name, path, leaf) for name, tree in zip(GIVEN, given, strict=True) for path, leaf in _paths(tree)]
    leaves = [Stored(leaf, *_how(name, path, static)) for name, path, leaf in named]
    results = replay(traced, leaves) if not static.whole else _with_stacks(plan, state, traced, leaves)
    names = [(name, path) for name, tree in zip(FIELDS, shapes, strict=True) for path, _ in _paths(tree)]
    arrays = [
        as_stored(value, *_how(name, path, static), f"opt_state/{path}")
        for value, (name, path) in zip(results, names, strict=True)
    ]
    new = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    masked: Any = lambda x, flat: flat.masked(x)  # noqa: E731
    return tuple(map_flat(masked, tree, name, static) for name, tree in zip(FIELDS, new, strict=True))


def _traced(static: Static, given: Sequence[PyTree]) -> Update:
    """Return the update's program in the model's own shapes."""
    shapes = [own_shaped(_on_this_mesh(tree), name, static) for name, tree in zip(GIVEN, given, strict=True)]
    return traced_apply(static.tx, shapes)


def _with_stacks(plan: Plan, state: TrainState, traced: ClosedJaxpr, leaves: Sequence[Stored]) -> list[Stored]:
    """Replay a program with each matrix whole on one device where operations mix its elements."""
    graph = read(traced, FORWARD)
    stacks, _ = stacks_of(plan, state, graph)
    env: Env = dict(zip(graph.inputs, leaves, strict=True))

    def evaluated(each: Operation, operands: list[Any]) -> list[Stored]:
        return replay_operation(each.eqn, [x if isinstance(x, Stored) else Stored(x) for x in operands])

    entering = [value for stack in stacks for value in (*chain(*stack.inputs), *stack.taken)]
    evaluate(before(entering, env.__contains__)[0], env, evaluated)
    for stack in stacks:
        arrays = {value: known(value, env) for value in entering}
        made = computed(stack, {value: getattr(x, "array", x) for value, x in arrays.items()}, plan)
        for region in stack.regions:
            for value, rest in zip(region.results, region.wanted, strict=True):
                env[value] = Stored(made[value], rest.flat, frozenset((region.owner,)) if rest.flat else frozenset())
    evaluate(before(graph.outputs, env.__contains__)[0], env, evaluated)
    results = (known(value, env) for value in graph.outputs)
    return [x if isinstance(x, Stored) else Stored(x) for x in results]


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
    found = _candidates(plan, state)
    while found:
        laid = _with_whole_matrices(plan, at_rest(state, _with_opt_state(plan, state, found)))
        params = trained_part(laid.params, laid.static.trained)
        try:
            jax.eval_shape(partial(optimized, plan), laid, params, jax.ShapeDtypeStruct((), jnp.float32))
        except Mixed as mixed:
            notice(
                f"the optimizer's update mixes the elements of {listed(sorted(mixed.leaves))} ({mixed.operation}): no "
                f"dimension divides by {DATA}={plan.mesh.shape[DATA]}, and it cannot be stored flat and padded"
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
    sent = [stack.sent() for stack in stacks_of(plan, state, read(_update(state).program, FORWARD))[0]]
    return {kind: sum(each.get(kind, 0) for each in sent) for kind in sorted({*chain(*sent)})}


def at_rest(state: TrainState, static: Static) -> TrainState:
    """Return a state in its shapes at rest, abstract or traced, of one in its own shapes."""

    def rest(x: Any, flat: Flat) -> Any:
        return jax.eval_shape(flat.to_rest, x) if isinstance(x, jax.ShapeDtypeStruct) else flat.to_rest(x)

    fields = {name: map_flat(rest, getattr(state, name), name, static) for name in FIELDS}
    return replace(state, **fields, static=static)


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
