"""One mesh for another in a jaxpr: in constraints, nested jits and shard_maps, and in the types of its variables."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jdp.base.errors import UserError
from jdp.core.sharding.axes import factors
from jdp.foresight.any_step.traced import Argument, Traced
from jdp.foresight.traffic.origin import users_line


class OtherSize(UserError):
    """A part of the program has the old mesh's sizes in its shapes."""


class Exchange:
    """Replaces one mesh by another in the parameters of a jaxpr's equations."""

    def __init__(self, old: Mesh | AbstractMesh, new: Mesh) -> None:
        self.old, self.new = old, new
        self._jaxprs: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}
        self._variables: dict[int, tuple[Any, Any]] = {}
        self._contexts: dict[int, tuple[Any, Any]] = {}

    def program(self, traced: Traced) -> Traced:
        """Return a program with its arguments, results and equations on the new mesh. Raises ValueError."""
        return replace(
            traced,
            closed=self(traced.closed),
            arguments=tuple(self.argument(each) for each in traced.arguments),
            out_shardings=tuple(map(self._concrete, traced.out_shardings)),
        )

    def argument(self, argument: Argument) -> Argument:
        """Return an argument on the new mesh, also from an abstract mesh."""
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
            return core.ClosedJaxpr(self._jaxpr(value.jaxpr), value.consts)
        if isinstance(value, core.Jaxpr):
            return self._jaxpr(value)
        if type(value) in (tuple, list):
            return type(value)(map(self, value))
        return value

    def _jaxpr(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """Replace the mesh in each equation; a shared jaxpr stays shared, so jax lowers it once."""
        if id(jaxpr) not in self._jaxprs:
            exchanged = jaxpr.replace(
                constvars=[*map(self._variable, jaxpr.constvars)],
                invars=[*map(self._variable, jaxpr.invars)],
                outvars=[*map(self._variable, jaxpr.outvars)],
                eqns=[self._equation(equation) for equation in jaxpr.eqns],
                debug_info=jaxpr.debug_info,
            )
            self._jaxprs[id(jaxpr)] = (jaxpr, exchanged)
        return self._jaxprs[id(jaxpr)][1]

    def _variable(self, variable: Any) -> Any:
        """Return the variable or literal whose type names the new mesh in place of the old; always the same object."""
        sharding = getattr(variable.aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return variable
        if id(variable) not in self._variables:
            new = copy(variable)
            new.aval = variable.aval.update(sharding=self(sharding))
            if isinstance(variable, core.Literal) and isinstance(variable.val, np.ndarray):
                new.val = copy(variable.val)  # without the type that jax has kept in it
            self._variables[id(variable)] = (variable, new)
        return self._variables[id(variable)][1]

    def _equation(self, equation: Any) -> Any:
        if equation.primitive.name == "shard_map" and (given := equation.params["mesh"]).shape != self.new.shape:
            raise OtherSize(
                f"A shard_map over its own mesh has that mesh's sizes in its shapes, so they cannot change; "
                f"given {factors(given.shape)}{_line(equation)}, and {factors(self.new.shape)} on the target. "
                "Leave out mesh= and call under jax.set_mesh(mesh); or make the mesh from as many virtual "
                f"devices: JAX_NUM_CPU_DEVICES={self.new.size}."
            )
        parameters = {name: self(value) for name, value in equation.params.items()}
        return equation.replace(
            invars=[*map(self._variable, equation.invars)],
            outvars=[*map(self._variable, equation.outvars)],
            params=parameters,
            ctx=self._context(equation.ctx),
        )

    def _context(self, context: Any) -> Any:
        """Return the context in which jax lowers an equation, with the new mesh in place of the old."""
        if context.cur_abstract_mesh.empty:
            return context
        if id(context) not in self._contexts:
            new = object.__new__(type(context))  # immutable, and jax's own constructor takes what is set right now
            for name in (name for name in type(context).__slots__ if hasattr(context, name)):
                if not name.startswith("__"):
                    object.__setattr__(new, name, getattr(context, name))
            object.__setattr__(new, "cur_abstract_mesh", self._mesh(context.cur_abstract_mesh))
            self._contexts[id(context)] = (context, new)
        return self._contexts[id(context)][1]

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


def _line(equation: Any) -> str:
    """Return " at file:line" in the user's code; empty if jax has not recorded it."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else [f"{each.file_name}:{each.line_num}" for each in traceback.frames]
    line = users_line(frames)
    return f" at {line}" if line else ""
