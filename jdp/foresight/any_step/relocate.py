"""A jitted function's program on other devices: the same axes with other sizes, and every mesh in it exchanged.

1. The target's mesh has the axes of the arguments' mesh. One axis takes the remaining devices: `data`, else the largest
   axis of the batch (`moved_sizes`).
2. If the new mesh cannot split a batch's rows, they are rounded up and the function is traced again (`_rows`).
3. The function still closes over the old mesh: in `NamedSharding`s of constraints and of the jit, and in `shard_map`s.
   The jaxpr gets the new mesh in their place (`replace_mesh.py`). A `shard_map`'s body has one device's shapes, so its
   sizes must stay, unless it takes the context's mesh or belongs to `jdp.value_and_grad`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.core.sharding.axes import DATA, factors
from jdp.core.sharding.mesh import following, without_mesh
from jdp.core.sharding.placement import axes_of, spec_entry
from jdp.foresight.any_step.replace_mesh import Exchange, OtherSize
from jdp.foresight.any_step.traced import Argument, Arguments, Traced, mesh_in, trace
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.relocate import MISMATCHES, answered_for, compile_for, cudnn_of, lowering_for
from jdp.foresight.targets.resolve import Target, target_of


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
        with lowering_for(target.devices[0], cudnn_of(target)), context:
            lowered = self.traced.lower()
        return compile_for(target, lowered, self.traced.options, cache)


def move(
    function: Callable[..., Any], inputs: tuple[Any, ...], target: Target | None, sizes: Mapping[str, int] | None = None
) -> Relocated:
    """Trace a jitted function, and put its program on a target's devices."""
    arguments = Arguments.of(function, inputs)
    devices = target_of(target, [each.abstract() for each in arguments.arrays])
    with answered_for(devices.devices[0], cudnn_of(devices)):
        return _move(function, arguments, target, sizes)


def _move(
    function: Callable[..., Any], arguments: Arguments, target: Target | None, sizes: Mapping[str, int] | None
) -> Relocated:
    traced = trace(function, arguments)
    old = mesh_in(traced.arguments, traced.out_shardings)
    batch, batch_axes = _batch(traced)
    if target is None:
        if isinstance(old, AbstractMesh):
            raise UserError(
                "Without a target a step is compiled for its arguments' devices; given an abstract mesh, which has no "
                "devices. Name a target, such as h100:1x8."
            )
        return Relocated(traced, old, batch_axes or old.axis_names[:1], batch)
    new_sizes = moved_sizes(dict(old.shape), batch_axes, target, sizes)
    mesh = Mesh(np.array(target.devices).reshape(tuple(new_sizes.values())), old.axis_names, axis_types=old.axis_types)
    rows, notes = _rows(traced, batch, old, mesh)
    if new_sizes != dict(old.shape):
        became = f"{factors(old.shape)} became {factors(new_sizes)}"
        notes = (f"the arguments' mesh {became}; mesh={{axis: size}} changes the sizes", *notes)
    on_target, in_context = _trace_for(function, arguments.resized(rows), traced if not rows else None, old, mesh)
    for each in on_target.arguments:
        _check_divides(each, mesh)
    return Relocated(on_target, mesh, batch_axes or (_moving(dict(old.shape), ()),), batch, notes, in_context)


# Sizes.


def _moving(sizes: Mapping[str, int], batch_axes: Sequence[str]) -> str:
    """Return the axis that takes the remaining devices: `data`, else the largest axis of the batch."""
    if sizes.get(DATA, 1) > 1:
        return DATA
    return max(batch_axes or sizes, key=lambda axis: sizes[axis])


def moved_sizes(
    sizes: Mapping[str, int], batch_axes: Sequence[str], target: Target, wanted: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the sizes of the same axes on a target."""
    if unknown := [axis for axis in wanted or {} if axis not in sizes]:
        raise UserError(
            f"mesh sets the sizes of the arguments' mesh axes, {', '.join(sizes)}; given {unknown[0]!r}. "
            "Name one of these axes."
        )
    free = [axis for axis, size in (wanted or {}).items() if size == -1]
    chosen = {**sizes, **(wanted or {})}
    if not wanted:
        free = [_moving(sizes, batch_axes)]
    count, taken = len(target.devices), math.prod(size for axis, size in chosen.items() if axis not in free)
    if len(free) == 1 and taken > 0 and count % taken == 0:
        chosen[free[0]] = count // taken
    if len(free) > 1 or min(chosen.values()) < 1 or math.prod(chosen.values()) != count:
        words = " × ".join(f"{axis}={'the rest' if axis in free else size}" for axis, size in chosen.items())
        raise UserError(
            f"The sizes of a mesh multiply to its devices; given {words} for the {count} devices of {target}. Change "
            "them; one size may be -1, such as mesh={'" + next(iter(sizes)) + "': -1}."
        )
    return chosen


def _batch(traced: Traced) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return (the numbers of the arguments that are a batch, the axes that shard its rows).

    All sharded arrays of a batch are sharded by rows and have the same number of rows. Unlike weights, not all of them
    come back as a result of the same shape.
    """
    avals: list[Any] = [variable.aval for variable in traced.closed.jaxpr.outvars]
    results = {(aval.shape, aval.dtype) for aval in avals}
    groups: defaultdict[int, list[Argument]] = defaultdict(list)
    for each in traced.arguments:
        if each.sharding is not None and any(map(axes_of, each.sharding.spec)):
            groups[each.number].append(each)
    batch, axes = set[int](), dict[str, None]()
    for number, arrays in groups.items():
        entries = {(each.shape[0], axes_of(spec_entry(_spec(each), 0))) for each in arrays}
        kept = all((each.shape, each.dtype) in results for each in arrays)
        if number >= 0 and len(entries) == 1 and not kept:
            (_, along), *_ = entries
            if along:
                batch.add(number)
                axes |= dict.fromkeys(along)
    return frozenset(batch), tuple(axes)


def _spec(argument: Argument) -> PartitionSpec:
    return PartitionSpec() if argument.sharding is None else argument.sharding.spec


def _rows(
    traced: Traced, batch: frozenset[int], old: Mesh | AbstractMesh, mesh: Mesh
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return (slot -> new number of rows, notes) for the batch's arrays that `mesh` cannot split."""
    rows, notes = dict[int, int](), list[str]()
    for each in traced.arguments:
        along = axes_of(spec_entry(_spec(each), 0))
        if each.number not in batch or not along:
            continue
        count = math.prod(mesh.shape[axis] for axis in along)
        if each.shape[0] % count:
            unit = math.lcm(count, math.prod(old.shape[axis] for axis in along))
            rows[each.slot] = -(-each.shape[0] // unit) * unit
            axes = factors({axis: mesh.shape[axis] for axis in along})
            notes.append(
                f"a batch's rows must divide by {axes}; given {each.shape[0]}: rounded up to {rows[each.slot]}"
            )
    return rows, tuple(dict.fromkeys(notes))


def _check_divides(argument: Argument, mesh: Mesh) -> None:
    """Raise ValueError if a sharding does not divide its array."""
    for dim, entry in enumerate(_spec(argument)):
        count = math.prod(mesh.shape[axis] for axis in axes_of(entry))
        if argument.shape[dim] % count:
            raise UserError(
                f"An argument's dimensions must divide by the axes that shard them; given {argument.path} "
                f"{list(argument.shape)}, whose dimension {dim} is sharded over {', '.join(axes_of(entry))}, "
                f"{count} on the target. Change the sizes (mesh={{axis: size}}), the sharding or the shape."
            )


# Meshes in the program.


def _trace_for(
    function: Callable[..., Any], arguments: Arguments, traced: Traced | None, old: Mesh | AbstractMesh, mesh: Mesh
) -> tuple[Traced, bool]:
    """Return (the program on `mesh`, whether it was traced with `mesh` as the context's).

    It is traced under the caller's mesh and then moved, or traced under `mesh` itself.

    If the caller has set a mesh (`jax.set_mesh`), `mesh` takes its place first: code that reads the context's mesh then
    sees the target's sizes. Else the context is set only if nothing else works, because libraries read it and would
    make another program.
    """
    in_context = not jax.sharding.get_abstract_mesh().empty
    exchange = Exchange(old, mesh)
    located = replace(arguments, arrays=tuple(exchange.argument(each) for each in arguments.arrays))

    def as_called() -> tuple[Traced, bool]:
        return exchange.program(traced or trace(function, arguments)), False

    def in_target() -> tuple[Traced, bool]:
        with following(mesh):
            return exchange.program(trace(function, located)), True

    reasons = list[ValueError]()
    for attempt in (in_target, as_called) if in_context else (as_called, in_target):
        try:
            return attempt()
        except ValueError as error:
            if not isinstance(error, OtherSize) and not any(sign in str(error) for sign in MISMATCHES):
                raise
            reasons.append(error)
    raise next((error for error in reasons if isinstance(error, OtherSize)), reasons[0]) from None
