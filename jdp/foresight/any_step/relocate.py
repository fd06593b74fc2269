"""Move a jitted function's program to other devices: its mesh keeps its axes, but may change their sizes.

The function closes over its mesh, in `NamedSharding`s of constraints and of the jit, and in `shard_map`s. `Exchange`
puts the target's mesh in their place in the jaxpr and in the types of its variables. The body of a `shard_map` has one
device's shapes, so its sizes must stay, unless it takes the context's mesh or belongs to `jdp.value_and_grad`. If the
new mesh cannot split a batch's rows, they are rounded up and the function is traced again.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.core.sharding.axes import DATA, BatchUnit, factors
from jdp.core.sharding.mesh import following, without_mesh
from jdp.core.sharding.placement import axes_of, spec_entry
from jdp.foresight.any_step.traced import Argument, Arguments, Traced, mesh_in, trace
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.targets.relocate import MISMATCHES, answered_for, lowering_for
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.traffic.origin import users_line


@dataclass(frozen=True)
class Relocated:
    """A program on the mesh that it is compiled for."""

    traced: Traced  # the program; its arguments are placed on `mesh`
    mesh: Mesh  # of the target's devices
    batch_axes: tuple[str, ...]  # the axes that shard a batch's rows
    batch: frozenset[int]  # numbers of the positional arguments that are a batch
    notes: tuple[str, ...] = ()  # changes to the arguments, a sentence each
    in_context: bool = False  # trace and lower with `mesh` as the context's mesh

    def compile(self, target: Target, cache: Cache | None) -> Compiled:
        """Compile the program for `target`, whose devices its mesh is made of, or find the result in `cache`."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        context = jax.set_mesh(self.mesh) if explicit or self.in_context else without_mesh()
        with lowering_for(target.devices[0]), context:
            lowered = self.traced.lower()
        return compile_step(lowered, target=target, options=self.traced.options, cache=cache)


def move(
    function: Callable[..., Any], inputs: tuple[Any, ...], target: Target | None, sizes: Mapping[str, int] | None
) -> Relocated:
    """Trace a jitted function, and put its program on a target's devices."""
    arguments = Arguments.of(function, inputs)
    devices = target_of(target, [each.abstract() for each in arguments.arrays])
    with answered_for(devices.devices[0]):
        traced = trace(function, arguments)
        old = mesh_in(traced.arguments, traced.out_shardings)
        batch, batch_axes = _batch(traced)
        if target is None:
            if isinstance(old, AbstractMesh):
                raise UserError(
                    "Without a target a step is compiled for its arguments' devices; given an abstract mesh, which has "
                    "no devices. Name a target, such as h100:1x8."
                )
            return Relocated(traced, old, batch_axes or old.axis_names[:1], batch)
        new_sizes = _moved_sizes(dict(old.shape), batch_axes, target, sizes)
        placed = np.array(target.devices).reshape([*new_sizes.values()])
        mesh = Mesh(placed, old.axis_names, axis_types=old.axis_types)
        rows, notes = _rows(traced, batch, old, mesh)
        if new_sizes != dict(old.shape):
            became = f"{factors(old.shape)} became {factors(new_sizes)}"
            notes = (f"the arguments' mesh {became}; mesh={{axis: size}} changes the sizes", *notes)
        resized = [
            replace(each, shape=(rows[i], *each.shape[1:])) if i in rows else each
            for i, each in enumerate(arguments.arrays)
        ]
        arguments = replace(arguments, arrays=tuple(resized))
        on_target, in_context = _trace_for(function, arguments, traced if not rows else None, old, mesh)
        for each in on_target.arguments:
            _check_divides(each, mesh)
        return Relocated(on_target, mesh, batch_axes or (_moving(dict(old.shape), ()),), batch, notes, in_context)


def _moving(sizes: Mapping[str, int], batch_axes: Sequence[str]) -> str:
    if sizes.get(DATA, 1) > 1:
        return DATA
    return max(batch_axes or sizes, key=lambda axis: sizes[axis])


def _moved_sizes(
    sizes: Mapping[str, int], batch_axes: Sequence[str], target: Target, wanted: Mapping[str, int] | None
) -> dict[str, int]:
    chosen = {**sizes, **(wanted or {_moving(sizes, batch_axes): -1})}
    given, free = factors(chosen), [axis for axis, size in chosen.items() if size == -1]
    count, taken = len(target.devices), math.prod(size for size in chosen.values() if size != -1)
    if len(free) == 1 and taken > 0 and count % taken == 0:
        chosen[free[0]] = count // taken
    if chosen.keys() != sizes.keys() or min(chosen.values()) < 1 or math.prod(chosen.values()) != count:
        raise UserError(
            f"mesh sets the sizes of the arguments' mesh axes, {', '.join(sizes)}, which multiply to the devices; "
            f"given {given} for the {count} devices of {target}. Change them; one size may be -1, for the rest."
        )
    return chosen


def _batch(traced: Traced) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the numbers of the arguments that are a batch (not all of it comes back), and the axes of its rows."""
    results = {(variable.aval.shape, variable.aval.dtype) for variable in traced.closed.jaxpr.outvars}
    groups: defaultdict[int, list[Argument]] = defaultdict(list)
    for each in traced.arguments:
        if each.sharding is not None and any(map(axes_of, each.sharding.spec)):
            groups[each.number].append(each)
    batch, axes = set[int](), dict[str, None]()
    for number, arrays in groups.items():
        entries = {(each.shape[0], axes_of(spec_entry(each.spec, 0))) for each in arrays}
        come_back = all((each.shape, each.dtype) in results for each in arrays)
        (_, along), *others = entries
        if number >= 0 and along and not others and not come_back:
            batch.add(number)
            axes |= dict.fromkeys(along)
    return frozenset(batch), tuple(axes)


def _rows(
    traced: Traced, batch: frozenset[int], old: Mesh | AbstractMesh, mesh: Mesh
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return (slot -> new number of rows, notes) for the batch's arrays that `mesh` cannot split."""
    rows, notes = dict[int, int](), list[str]()
    for each in traced.arguments:
        along = axes_of(spec_entry(each.spec, 0))
        if each.number not in batch or not along:
            continue
        count = math.prod(mesh.shape[axis] for axis in along)
        if each.shape[0] % count:
            unit = math.lcm(count, math.prod(old.shape[axis] for axis in along))
            rows[each.slot] = -(-each.shape[0] // unit) * unit
            rule = BatchUnit({axis: mesh.shape[axis] for axis in along}).rule(each.shape[0])
            notes.append(f"{rule}: rounded up to {rows[each.slot]}")
    return rows, tuple(dict.fromkeys(notes))


def _check_divides(argument: Argument, mesh: Mesh) -> None:
    for dim, entry in enumerate(argument.spec):
        count = math.prod(mesh.shape[axis] for axis in axes_of(entry))
        if argument.shape[dim] % count:
            raise UserError(
                f"An argument's dimensions must divide by the axes that shard them; given {argument.path} "
                f"{list(argument.shape)}, whose dimension {dim} is sharded over {', '.join(axes_of(entry))}, "
                f"{count} on the target. Change the sizes (mesh={{axis: size}}), the sharding or the shape."
            )


def _trace_for(
    function: Callable[..., Any], arguments: Arguments, traced: Traced | None, old: Mesh | AbstractMesh, mesh: Mesh
) -> tuple[Traced, bool]:
    """Return (the program on `mesh`, whether it was traced with `mesh` as the context's).

    It is traced under the caller's mesh and then moved, or traced under `mesh` itself. If the caller has set a mesh
    (`jax.set_mesh`), `mesh` takes its place first: code that reads the context's mesh then sees the target's sizes.
    Else the context is set only if nothing else works, because libraries read it and would make another program.
    """
    in_context = not jax.sharding.get_abstract_mesh().empty
    exchange = Exchange(old, mesh)
    located = replace(arguments, arrays=tuple(exchange.argument(each) for each in arguments.arrays))
    reasons = list[ValueError]()
    for in_target in (in_context, not in_context):
        try:
            if not in_target:
                return exchange.program(traced or trace(function, arguments)), False
            with following(mesh):
                return exchange.program(trace(function, located)), True
        except ValueError as error:
            if not isinstance(error, OtherSize) and not any(sign in str(error) for sign in MISMATCHES):
                raise
            reasons.append(error)
    raise next((error for error in reasons if isinstance(error, OtherSize)), reasons[0]) from None


class OtherSize(UserError):
    """A part of the program has the old mesh's sizes in its shapes."""


class Exchange:
    """Replaces one mesh by another in the parameters of a jaxpr's equations."""

    def __init__(self, old: Mesh | AbstractMesh, new: Mesh) -> None:
        self.old, self.new = old, new
        self._exchanged: dict[int, tuple[Any, Any]] = {}  # id of an object -> it, and its counterpart on `new`

    def program(self, traced: Traced) -> Traced:
        """Return a program with its arguments, results and equations on the new mesh. Raises ValueError."""
        return replace(
            traced,
            closed=self(traced.closed),
            arguments=tuple(self.argument(each) for each in traced.arguments),
            out_shardings=tuple(map(self._concrete, traced.out_shardings)),
        )

    def argument(self, argument: Argument) -> Argument:
        return replace(argument, sharding=self._concrete(argument.sharding))

    def _concrete(self, sharding: NamedSharding | None) -> NamedSharding | None:
        if sharding is None:
            return None
        mesh = Mesh(self.new.devices, sharding.mesh.axis_names, axis_types=sharding.mesh.axis_types)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

    def __call__(self, value: Any) -> Any:
        """Return a value with the new mesh in place of the old, at any depth. Raises ValueError for a third mesh."""
        if isinstance(value, NamedSharding):
            return NamedSharding(self._mesh(value.mesh), value.spec, memory_kind=value.memory_kind)
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh(value)
        if isinstance(value, core.ClosedJaxpr):
            return core.ClosedJaxpr(self._once(value.jaxpr, self._jaxpr), value.consts)  # a Jaxpr in jax 0.12
        if isinstance(value, core.Jaxpr):
            return self._once(value, self._jaxpr)
        if type(value) in (tuple, list):
            return type(value)(map(self, value))
        return value

    def _once(self, old: Any, exchange: Callable[[Any], Any]) -> Any:
        """Return the same object for the same `old`: jax compares variables by identity, and lowers a jaxpr once."""
        if id(old) not in self._exchanged:
            self._exchanged[id(old)] = (old, exchange(old))
        return self._exchanged[id(old)][1]

    def _jaxpr(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        return jaxpr.replace(
            constvars=self._variables(jaxpr.constvars),
            invars=self._variables(jaxpr.invars),
            outvars=self._variables(jaxpr.outvars),
            eqns=[self._equation(equation) for equation in jaxpr.eqns],
            debug_info=jaxpr.debug_info,
        )

    def _variables(self, variables: Sequence[Any]) -> list[Any]:
        return [self._once(variable, self._variable) for variable in variables]

    def _variable(self, variable: Any) -> Any:
        sharding = getattr(variable.aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return variable
        new = copy(variable)
        new.aval = variable.aval.update(sharding=self(sharding))
        if isinstance(variable, core.Literal) and isinstance(variable.val, np.ndarray):
            new.val = copy(variable.val)  # without the type that jax caches in it
        return new

    def _equation(self, equation: Any) -> Any:
        if equation.primitive.name == "shard_map" and (given := equation.params["mesh"]).shape != self.new.shape:
            traceback = equation.source_info.traceback
            frames = [] if traceback is None else traceback.frames
            line = users_line(f"{each.file_name}:{each.line_num}" for each in frames)
            raise OtherSize(
                f"A shard_map over its own mesh has that mesh's sizes in its shapes, so they cannot change; given "
                f"{factors(given.shape)} at {line or 'an unknown line'}, and {factors(self.new.shape)} on the target. "
                "Leave out mesh= and call under jax.set_mesh(mesh); or make the mesh from as many virtual "
                f"devices: JAX_NUM_CPU_DEVICES={self.new.size}."
            )
        return equation.replace(
            invars=self._variables(equation.invars),
            outvars=self._variables(equation.outvars),
            params={name: self(value) for name, value in equation.params.items()},
            ctx=self._once(equation.ctx, self._context),
        )

    def _context(self, context: Any) -> Any:
        if context.cur_abstract_mesh.empty:
            return context
        new = object.__new__(type(context))  # immutable, and jax's constructor takes the current settings
        for name in type(context).__slots__:
            if hasattr(context, name) and not name.startswith("__"):
                object.__setattr__(new, name, getattr(context, name))
        object.__setattr__(new, "cur_abstract_mesh", self._mesh(context.cur_abstract_mesh))
        return new

    def _mesh(self, mesh: Any) -> Any:
        if mesh.empty or (isinstance(mesh, Mesh) and tuple(mesh.devices.flat) == tuple(self.new.devices.flat)):
            return mesh
        if mesh.axis_names != self.old.axis_names:
            raise UserError(
                f"A step uses only the mesh of its arguments, with axes {', '.join(self.old.axis_names)}; given "
                f"a second mesh with {', '.join(mesh.axis_names)} inside it. Leave out the target to compile for the "
                "arguments' devices."
            )
        if isinstance(mesh, Mesh):
            return Mesh(self.new.devices, mesh.axis_names, axis_types=mesh.axis_types)
        device = self.new.abstract_mesh.abstract_device
        return mesh.update(axis_sizes=tuple(self.new.shape.values()), abstract_device=device)
