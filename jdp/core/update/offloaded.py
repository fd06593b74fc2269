"""An update whose large operands rest in host memory: they come to the device piece by piece, and go back.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.core.plan import Plan
from jdp.core.sharding.host_memory import to_device, to_host
from jdp.core.sharding.placement import Placement, shards, spec_entry
from jdp.core.state import TrainState
from jdp.core.tracing.jaxprs import ELEMENTWISE, bind, inlined

SLICE_BYTES = 128 * 2**20
"""Of a leaf on one device that a loop moves at a time, unless a layer has more: enough to use a PCIe link fully."""

_AHEAD = 2
"""A group that is copied whole waits until the group so many places before it is computed."""

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")
"""Operations that only call a function."""


@dataclass(eq=False)
class _Value:
    """A value of the trace.

    Attributes:
        aval: its shape and dtype.
        operation: what computes it; None for an operand or a constant.
        known: of a constant.
        leaf: of an operand that rests in host memory, its number; None for any other value.
        moved: it depends on an operand that rests in host memory.
    """

    aval: Any
    operation: _Operation | None = None
    known: Any = None
    leaf: int | None = None
    moved: bool = False


@dataclass(eq=False)
class _Operation:
    """An operation of the trace: its place in it, what it takes and what it returns."""

    place: int
    equation: Any
    inputs: list[_Value]
    outputs: list[_Value] = field(default_factory=list[_Value])

    @property
    def is_elementwise(self) -> bool:
        """Whether element i of the results takes element i of the operands, or scalars."""
        if self.equation.primitive.name == "broadcast_in_dim":
            return self.inputs[0].aval.shape == ()
        return self.equation.primitive.name in ELEMENTWISE

    def run(self, inputs: Sequence[Any], shape: tuple[int, ...] | None) -> list[Any]:
        """Compute the results: of slices of `shape`, where the trace has whole leaves."""
        equation = self.equation
        if shape is not None and equation.primitive.name == "broadcast_in_dim":
            equation = equation.replace(params={**equation.params, "shape": shape})
        return bind(equation, inputs)


@dataclass
class _Group:
    """New leaves that are computed together.

    Attributes:
        results: number of a leaf -> its new value.
        operations: those that need a leaf in host memory, and element-wise ones on large values that lead to them.
        taken: what they take: operands, constants, and what is computed before.
    """

    results: dict[int, _Value]
    operations: set[_Operation]
    taken: dict[_Value, None]

    @property
    def own(self) -> set[Any]:
        """What no other group may have: leaves in host memory, and operations that depend on them."""
        moved = {operation for operation in self.operations if operation.outputs[0].moved}
        return moved | {value for value in self.taken if value.leaf is not None}


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

    arguments = [_Value(x, leaf=i, moved=True) if i in on_host else _Value(x) for i, x in enumerate(shapes)]
    outputs = _read_trace(program, arguments)
    kept = {i for i in on_host if outputs[i] is arguments[i]}
    moved = [i for i, value in enumerate(outputs) if (value.moved or i in on_host) and i not in kept]
    groups = _groups({i: outputs[i] for i in moved})
    _report_mixed(groups, placements)

    env: dict[_Value, Any] = dict(zip(arguments, operands, strict=True))
    _compute([value for group in groups for value in group.taken], env)
    _compute([value for i, value in enumerate(outputs) if i not in moved], env)
    results: dict[int, Any] = {i: _read(value, env) for i, value in enumerate(outputs) if i not in moved}
    made: list[list[Any]] = []
    for group in groups:
        before = made[-_AHEAD] if len(made) >= _AHEAD else []
        new = _run(group, env, operands, placements, plan, before)
        made.append(list(new.values()))
        results |= {i: to_host(x) if i in on_host else x for i, x in new.items()}
    return jax.tree.unflatten(jax.tree.structure(structure), [results[i] for i in range(len(outputs))])


# The trace.


def _read_trace(program: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
    """Return the results of a trace, from which its operations can be followed back."""
    operations: list[_Operation] = []

    def add(equation: Any, inputs: list[_Value]) -> list[_Value]:
        operation, moved = _Operation(len(operations), equation, inputs), any(value.moved for value in inputs)
        operation.outputs = [_Value(var.aval, operation, moved=moved) for var in equation.outvars]
        operations.append(operation)
        return operation.outputs

    def constant(aval: Any, value: Any, _: bool) -> _Value:
        return _Value(aval, known=value)

    constants = [_Value(jax.typeof(x), known=x) for x in program.consts]
    return inlined(program.jaxpr, [*constants, *arguments], _CALLS, constant, add)


def _groups(results: dict[int, _Value]) -> list[_Group]:
    """Divide new leaves into groups that share no leaf in host memory and no operation on one, in order."""
    groups: list[_Group] = []
    for number, value in results.items():
        new = _Group({number: value}, *_behind(value))
        own = new.own
        for group in [group for group in groups if group.own & own]:
            groups.remove(group)
            new = _Group(group.results | new.results, group.operations | new.operations, group.taken | new.taken)
        groups.append(new)
    return sorted(groups, key=lambda group: min(group.results))


def _behind(value: _Value) -> tuple[set[_Operation], dict[_Value, None]]:
    """Return the operations that a group makes a value by, and what they take.

    What needs no leaf in host memory is taken, unless it is an element-wise result of a large operand: then a slice of
    it can be made of a slice of the operand, and the whole need not be in memory.
    """
    operations, taken, waiting = set[_Operation](), dict[_Value, None](), [value]
    while waiting:
        value = waiting.pop()
        operation = value.operation
        if operation is None or not (value.moved or (value.aval.shape and operation.is_elementwise)):
            taken[value] = None
        elif operation not in operations:
            operations.add(operation)
            waiting += operation.inputs
    return operations, taken


def _compute(values: Iterable[_Value], env: dict[_Value, Any]) -> None:
    """Add to `env` the values, which need no leaf in host memory, and all that they are made of."""
    needed, waiting = set[_Operation](), list(values)
    while waiting:
        operation = waiting.pop().operation
        if operation is not None and operation not in needed and operation.outputs[0] not in env:
            needed.add(operation)
            waiting += operation.inputs
    _evaluate(needed, env)


def _evaluate(operations: Iterable[_Operation], env: dict[_Value, Any], shape: tuple[int, ...] | None = None) -> None:
    for operation in sorted(operations, key=lambda operation: operation.place):
        made = operation.run([_read(value, env) for value in operation.inputs], shape)
        env.update(zip(operation.outputs, made, strict=True))


def _read(value: _Value, env: dict[_Value, Any]) -> Any:
    return value.known if value.operation is None and value not in env else env[value]


# A group.


def _run(
    group: _Group,
    env: dict[_Value, Any],
    operands: list[Any],
    placements: list[Placement],
    plan: Plan,
    before: list[Any],
) -> dict[int, Any]:
    """Return a group's new leaves, by number, in host memory where it looped over them.

    The barrier has the group begin after `before`, and after all that it takes is there: XLA would copy every group to
    the device at once.
    """
    numbers = list(dict.fromkeys([*group.results, *(v.leaf for v in group.taken if v.leaf is not None)]))
    numbers = [number for number in numbers if number < len(placements) and placements[number].on_host]
    taken = [value for value in group.taken if value.leaf is None and value in env]
    values, scalars = [v for v in taken if v.aval.shape], {v: env[v] for v in taken if not v.aval.shape}
    given: Any = ([operands[number] for number in numbers], [env[value] for value in values], before)
    buffers, known, _ = jax.lax.optimization_barrier(given)
    hosts, others = dict(zip(numbers, buffers, strict=True)), dict(zip(values, known, strict=True)) | scalars
    rows = _rows(group, placements, plan)
    if rows is not None:
        return _loop(group, hosts, others, rows, placements, plan)
    leaves = {value: to_device(hosts[value.leaf]) for value in group.taken if value.leaf is not None}
    env = {**others, **leaves}
    _evaluate(group.operations, env)
    return {i: _constrained(_read(value, env), i, placements, plan) for i, value in group.results.items()}


def _loop(
    group: _Group,
    hosts: dict[int, jax.Array],
    others: dict[_Value, jax.Array],
    rows: int,
    placements: list[Placement],
    plan: Plan,
) -> dict[int, jax.Array]:
    """Return a group's new leaves, written into the buffers of the old ones, `rows` rows of them at a time."""
    numbers = list(group.results)
    length, *rest = placements[numbers[0]].shape
    leaves = [value for value in group.taken if value.leaf is not None]

    def one_slice(i: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
        now = {**hosts, **dict(zip(numbers, buffers, strict=True))}

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * rows, rows) if x.shape else x

        env = {value: cut(x) for value, x in others.items()}
        env |= {value: to_device(cut(now[value.leaf])) for value in leaves if value.leaf is not None}
        _evaluate(group.operations, env, (rows, *rest))
        new = [to_host(_constrained(_read(value, env), i, placements, plan)) for i, value in group.results.items()]
        return [
            jax.lax.dynamic_update_slice_in_dim(buffer, x, i * rows, 0) for buffer, x in zip(buffers, new, strict=True)
        ]

    new = jax.lax.fori_loop(0, length // rows, one_slice, [hosts[number] for number in numbers])
    return dict(zip(numbers, new, strict=True))


def _rows(group: _Group, placements: list[Placement], plan: Plan) -> int | None:
    """Return how many rows of a group's leaves a loop moves at a time; None where it has to be moved whole.

    A loop needs leaves of one shape, not sharded over the leading dimension, element-wise operations, and results that
    rest on the host.
    """
    numbers = [*group.results, *(value.leaf for value in group.taken if value.leaf is not None)]
    if not all(number < len(placements) and placements[number].on_host for number in numbers):
        return None
    shape, mesh = placements[numbers[0]].shape, dict(plan.mesh.shape)
    values = [*group.taken, *(value for operation in group.operations for value in operation.outputs)]
    alike = all(value.aval.shape in ((), shape if value.known is None else ()) for value in values)
    split = any(shards(PartitionSpec(spec_entry(placements[n].rest, 0)), mesh) > 1 for n in numbers)
    if not alike or split or not all(operation.is_elementwise for operation in group.operations):
        return None
    row = max(placements[number].bytes_per_device for number in numbers) // shape[0]
    fitting = [n for n in range(1, shape[0]) if shape[0] % n == 0 and n * row <= SLICE_BYTES]
    return max(fitting, default=1) if shape[0] * row > SLICE_BYTES else None


def _constrained(x: jax.Array, number: int, placements: list[Placement], plan: Plan) -> jax.Array:
    """Return a new leaf, or a slice of one, sharded as the leaf rests."""
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
