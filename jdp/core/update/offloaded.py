"""An update whose large operands are in host memory: they come to the device piece by piece, and go back.

`streamed(update, state, given, plan)` computes `update(state, *given)` without having all of the state on the device.
It reads the update's trace (a jaxpr, calls inlined) backwards from each new leaf:
1. leaves whose computations have nothing in common that needs the host's leaves are independent, and make groups: a
   parameter and its moments, under Adam;
2. what groups share and needs no host leaf (the gradient's norm, bias corrections) is computed first, once;
3. a group of equal shapes that is element-wise throughout runs in a loop over the leading dimension, a layer or
   `SLICE_BYTES` at a time, in the leaves' own buffers;
4. any other group (one with a norm of the leaf, or factors of it) is copied whole, at most three groups at a time.

An optimizer that mixes parameters (a global norm of its own updates) makes one group of them: that is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.core.plan import Plan
from jdp.core.sharding.host_memory import is_described, on_device, rest_sharding, to_device, to_host
from jdp.core.sharding.placement import Placement, shards, spec_entry
from jdp.core.state import TrainState
from jdp.core.tracing.graph import FORWARD, Env, Operation, Value, after, before, evaluate, known, read
from jdp.core.tracing.jaxprs import ELEMENTWISE, bind
from jdp.core.types import PyTree

SLICE_BYTES = 128 * 2**20
"""Of a leaf on one device that a loop moves at a time, unless a layer has more: enough to use a PCIe link fully."""

_AHEAD = 2
"""A group that is copied whole waits until the group so many places before it is computed."""


@dataclass
class _Group:
    """New leaves that are computed together.

    Attributes:
        results: number of a leaf -> its new value.
        operations: those that need a leaf in host memory, and element-wise ones on large values that lead to them.
        leaves: the leaves in host memory that they take -> their numbers.
        taken: what else they take: operands, constants, and what is computed before.
        own: what no other group may have: leaves in host memory, and operations that depend on them.
    """

    results: dict[int, Value]
    operations: set[Operation]
    leaves: dict[Value, int]
    taken: dict[Value, None]
    own: set[Value | Operation]

    @staticmethod
    def of(number: int, value: Value, on_host: dict[Value, int], moved: set[Operation]) -> _Group:
        """Return the group of one new leaf.

        It takes values that need no leaf in host memory. Element-wise results of a large operand it makes itself: their
        slices are made of slices of the operand, and all of them is never in memory.
        """

        def is_taken(value: Value) -> bool:
            sliced = value.maker is not None and value.aval.shape and _is_elementwise(value.maker)
            return value.maker not in moved and not sliced

        operations, taken = before([value], is_taken)
        leaves = {value: on_host[value] for value in taken if value in on_host}
        others = dict.fromkeys(value for value in taken if value not in on_host)
        return _Group({number: value}, set(operations), leaves, others, {*leaves, *moved.intersection(operations)})

    def joined(self, other: _Group) -> _Group:
        """Return one group of two."""
        return _Group(*(getattr(self, name) | getattr(other, name) for name in vars(self)))

    def evaluate(self, env: Env, shape: tuple[int, ...] | None = None) -> None:
        """Add what the operations make to `env`: of slices of `shape`, where the trace has whole leaves."""
        ordered = sorted(self.operations, key=lambda operation: operation.place)
        evaluate(ordered, env, None if shape is None else partial(_on_slices, shape=shape))


def _is_elementwise(operation: Operation) -> bool:
    """Return True if element i of the results takes element i of the operands, or scalars."""
    if operation.name == "broadcast_in_dim":
        return operation.operands[0].aval.shape == ()
    return operation.name in ELEMENTWISE


def _on_slices(operation: Operation, operands: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    eqn = operation.eqn
    if operation.name == "broadcast_in_dim":
        eqn = eqn.replace(params={**eqn.params, "shape": shape})
    return bind(eqn, operands)


def streamed(
    update: Callable[..., tuple[TrainState, Any]], state: TrainState, given: tuple[Any, ...], plan: Plan
) -> tuple[TrainState, Any]:
    """Return `update(state, *given)`, with the leaves that the plan keeps in host memory moved piece by piece."""
    placements: list[Placement] = jax.tree.leaves(plan.state_placements(state))
    on_host = {number for number, placement in enumerate(placements) if placement.on_host}
    leaves, tree = jax.tree.flatten((state, *given))
    place = {id(x): i for i, x in reversed(list(enumerate(leaves)))}  # of each array the first: an update compares them
    same = [place[id(x)] for x in leaves]
    operands = [to_host(x) if i in on_host else x for i, x in enumerate(leaves)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in leaves]
    traced = jax.make_jaxpr(lambda *x: update(*tree.unflatten([x[i] for i in same])), return_shape=True)
    program, structure = traced(*shapes)

    graph = read(program, FORWARD)
    numbers = {graph.inputs[i]: i for i in on_host}
    groups = _groups(graph.outputs, numbers, after(graph.operations, numbers))
    _report_mixed(groups, placements)

    env: Env = dict(zip(graph.inputs, operands, strict=True))
    kept = {i: value for i, value in enumerate(graph.outputs) if not any(i in group.results for group in groups)}
    for values in ([value for group in groups for value in group.taken], kept.values()):
        evaluate(before(values, env.__contains__)[0], env)
    results: dict[int, Any] = {i: known(value, env) for i, value in kept.items()}
    made: list[list[Any]] = []
    for group in groups:
        new = _run(group, env, operands, placements, plan, made[-_AHEAD] if len(made) >= _AHEAD else [])
        made.append(list(new.values()))
        results |= {i: to_host(x) if i in on_host else x for i, x in new.items()}
    return jax.tree.unflatten(jax.tree.structure(structure), [results[i] for i in range(len(graph.outputs))])


def params_on_device(plan: Plan, state: TrainState) -> PyTree:
    """Return the parameters in device memory, copied there where the plan keeps them on the host."""
    if plan.offload is None or not is_described(plan.mesh):
        return on_device(state.params)
    placements = plan.param_placements(state.params, state.static)
    return jax.tree.map(lambda x, p: to_device(to_host(x)) if p.on_host else x, state.params, placements)


def constrained(plan: Plan, state: TrainState) -> TrainState:
    """Return a new state sharded as it rests. What rests on the host is already: `streamed` put it there."""
    return jax.tree.map(
        lambda x, p: x if p.on_host else jax.lax.with_sharding_constraint(x, rest_sharding(plan.mesh, p)),
        state,
        plan.state_placements(state),
    )


def _groups(outputs: Sequence[Value], on_host: dict[Value, int], moved: set[Operation]) -> list[_Group]:
    """Divide new leaves into groups that share no leaf in host memory and no operation on one, in order.

    `moved` has the operations that depend on a leaf in host memory. A leaf there that is returned as it was is in no
    group.
    """
    groups: list[_Group] = []
    for number, value in enumerate(outputs):
        is_of_host = value in on_host or value.maker in moved or number in on_host.values()
        if not is_of_host or on_host.get(value) == number:
            continue
        new = _Group.of(number, value, on_host, moved)
        for group in [group for group in groups if group.own & new.own]:
            groups.remove(group)
            new = group.joined(new)
        groups.append(new)
    return sorted(groups, key=lambda group: min(group.results))


def _run(
    group: _Group, env: Env, operands: list[Any], placements: list[Placement], plan: Plan, earlier: list[Any]
) -> dict[int, Any]:
    """Return a group's new leaves, by number, in host memory where it looped over them.

    The barrier has the group begin after `earlier`, and after all that it takes is there: XLA would copy every group
    to the device at once.
    """
    numbers = list(dict.fromkeys([*group.results, *group.leaves.values()]))
    numbers = [number for number in numbers if number < len(placements) and placements[number].on_host]
    taken = [value for value in group.taken if value in env]
    values, scalars = [v for v in taken if v.aval.shape], {v: env[v] for v in taken if not v.aval.shape}
    given: Any = ([operands[number] for number in numbers], [env[value] for value in values], earlier)
    buffers, arrays, _ = jax.lax.optimization_barrier(given)
    hosts, others = dict(zip(numbers, buffers, strict=True)), dict(zip(values, arrays, strict=True)) | scalars
    rows = _rows(group, placements, plan)
    if rows is not None:
        return _loop(group, hosts, others, rows, placements, plan)
    env = {**others, **{value: to_device(hosts[number]) for value, number in group.leaves.items()}}
    group.evaluate(env)
    return {i: _constrained(known(value, env), i, placements, plan) for i, value in group.results.items()}


def _loop(
    group: _Group,
    hosts: dict[int, jax.Array],
    others: dict[Value, jax.Array],
    rows: int,
    placements: list[Placement],
    plan: Plan,
) -> dict[int, jax.Array]:
    """Return a group's new leaves, written into the buffers of the old ones, `rows` rows of them at a time."""
    numbers = list(group.results)
    length, *rest = placements[numbers[0]].shape

    def one_slice(i: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
        now = {**hosts, **dict(zip(numbers, buffers, strict=True))}

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * rows, rows) if x.shape else x

        env = {value: cut(x) for value, x in others.items()}
        env |= {value: to_device(cut(now[number])) for value, number in group.leaves.items()}
        group.evaluate(env, (rows, *rest))
        new = [to_host(_constrained(known(value, env), i, placements, plan)) for i, value in group.results.items()]
        return [
            jax.lax.dynamic_update_slice_in_dim(buffer, x, i * rows, 0) for buffer, x in zip(buffers, new, strict=True)
        ]

    new = jax.lax.fori_loop(0, length // rows, one_slice, [hosts[number] for number in numbers])
    return dict(zip(numbers, new, strict=True))


def _rows(group: _Group, placements: list[Placement], plan: Plan) -> int | None:
    """Return how many rows of a group's leaves a loop moves at a time; None where it has to be moved whole.

    A loop needs leaves of one shape, not sharded over the leading dimension, element-wise operations, and results in
    host memory.
    """
    numbers = [*group.results, *group.leaves.values()]
    if not all(number < len(placements) and placements[number].on_host for number in numbers):
        return None
    shape, mesh = placements[numbers[0]].shape, dict(plan.mesh.shape)
    made = (value for operation in group.operations for value in operation.results)
    values = (*group.leaves, *group.taken, *made)
    alike = all(value.aval.shape in ((), shape if value.constant is None else ()) for value in values)
    split = any(shards(PartitionSpec(spec_entry(placements[n].rest, 0)), mesh) > 1 for n in numbers)
    if not alike or split or not all(map(_is_elementwise, group.operations)):
        return None
    row = max(placements[number].bytes_per_device for number in numbers) // shape[0]
    fitting = [n for n in range(1, shape[0]) if shape[0] % n == 0 and n * row <= SLICE_BYTES]
    return max(fitting, default=1) if shape[0] * row > SLICE_BYTES else None


def _constrained(x: jax.Array, number: int, placements: list[Placement], plan: Plan) -> jax.Array:
    """Return a new leaf, or a slice of one, sharded as the stored leaf."""
    if number >= len(placements):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, placements[number].rest))


def _report_mixed(groups: list[_Group], placements: list[Placement]) -> None:
    """Report once what cannot be divided: parameters that an optimizer's update mixes."""
    for group in groups:
        numbers = [number for number in group.results if number < len(placements)]
        params = [number for number in numbers if placements[number].path.startswith("params/")]
        if len(params) > 1:
            held = format_bytes(sum(placements[number].bytes_per_device for number in numbers))
            notice(
                f"the optimizer's update mixes {len(params)} parameters (a norm over them, for example): their "
                f"{held} a device come from host memory together"
            )
