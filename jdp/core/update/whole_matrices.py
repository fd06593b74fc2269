"""An update that mixes the elements of matrices, such as Muon's, with each matrix whole on one device.

The regions of the update (`mixing.py`) that are the same program for matrices of the same shape are one stack, over the
layers of a leaf and over leaves. The stack is padded to a multiple of the devices along `data`, and each of them
computes its part:

    stored shards --all-to-all--> whole matrices --the region--> whole matrices --all-to-all--> stored shards

A leaf that is sharded over the stacked matrices themselves (a rule that names `data` there) needs neither. Where leaves
are replicated (ddp), each device takes its part of the stack, and an all-gather returns the results. Replicas
(`replica`) each compute all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import batch_axes
from jdp.core.sharding.optimizer_state import owner_of
from jdp.core.sharding.padded import Flat
from jdp.core.sharding.placement import Placement, axes_of
from jdp.core.state import TrainState, trained_part
from jdp.core.tracing.graph import Env, Graph, Operation, Value, described, evaluate, known
from jdp.core.tracing.per_index import Along, one_index
from jdp.core.update.mixing import Refusal, Region, Rest, Track, Tracks, mixes, regions, track

TOGETHER = 2**28
"""Bytes of matrices that a device computes together; it takes larger stacks part by part."""


@dataclass(frozen=True)
class Travel:
    """How a value comes from its stored form to whole matrices, and back.

    Attributes:
        kind: "dim": it is sharded on `dim` of a matrix; "flat": flat and padded; "matrix": sharded over the matrices;
            "copy": replicated; "same": one array for all matrices.
        dim: a dimension of one matrix' array.
        flat: its form at rest.
    """

    kind: Literal["dim", "flat", "matrix", "copy", "same"]
    dim: int = 0
    flat: Flat | None = None


@dataclass(frozen=True, eq=False)
class Stack:
    """Regions that are the same program, whose matrices are stacked.

    Attributes:
        regions: they differ in their inputs alone.
        inputs: for each region the values that enter, in the order of the program.
        taken: what all of them take besides.
        arrive, leave: how an input comes, and a result goes.
        tracks: of the update's values.
        count: devices along `data`.
    """

    regions: tuple[Region, ...]
    inputs: tuple[tuple[Value, ...], ...]
    taken: tuple[Value, ...]
    arrive: tuple[Travel, ...]
    leave: tuple[Travel, ...]
    tracks: Tracks
    count: int

    @property
    def each(self) -> int:
        """Matrices of a region."""
        return self.regions[0].matrices or 1

    @property
    def matrices(self) -> int:
        """Matrices of all regions."""
        return self.each * len(self.regions)

    @property
    def is_aligned(self) -> bool:
        """Whether each region's matrices are divided among the devices by themselves."""
        return "matrix" in [travel.kind for travel in (*self.arrive, *self.leave)]

    @property
    def owners(self) -> int:
        """Devices that divide the stack: all, or as many of replicated arrays' as leave little padding to gather.

        Then groups of that many devices compute the same.
        """
        if {travel.kind for travel in (*self.arrive, *self.leave)} - {"copy", "same"}:
            return self.count
        divisors = (n for n in range(self.count, 0, -1) if self.count % n == 0)
        return next(n for n in divisors if -(-self.matrices // n) * n * 3 <= self.matrices * 4)

    @property
    def padded(self) -> int:
        """Matrices with those that pad the stack to a multiple of its owners."""
        return -(-self.matrices // self.owners) * self.owners

    def sent(self) -> dict[tuple[str, int], int]:
        """Return (kind of collective, devices of one) -> bytes that a device gives to all-to-alls, or gathers."""
        sent, owners = dict[tuple[str, int], int](), self.owners
        values = [*zip(self.arrive, self.inputs[0], strict=True)]
        results = [*zip(self.leave, self.regions[0].results, strict=True)]
        for (travel, value), is_result in [*((x, False) for x in values), *((x, True) for x in results)]:
            kind = {"dim": "all-to-all", "flat": "all-to-all", "copy": "all-gather" if is_result else ""}
            if name := kind.get(travel.kind):
                elements = math.prod(travel.flat.at_rest) if travel.flat else value.aval.size
                size = self.padded * (elements // self.each) * value.aval.dtype.itemsize
                own = size if name == "all-gather" else size // owners
                sent[name, owners] = sent.get((name, owners), 0) + own
        return sent


def stacks_of(plan: Plan, state: TrainState, graph: Graph) -> tuple[list[Stack], list[Refusal]]:
    """Return the stacks of an update, and why parameters whose elements it mixes are in none.

    Args:
        plan: the mesh and the strategy.
        state: as stored, real or abstract.
        graph: of the update (gradients, optimizer state, parameters, loss) -> (parameters, optimizer state), in the
            model's own shapes.
    """
    if not state.static.flat and not any(map(mixes, graph.operations)):
        return [], []
    count, placed = plan.mesh.shape[DATA], plan.state_placements(state)
    params = {each.path.partition("/")[2]: each for each in jax.tree.leaves(placed.params)}
    trained = jax.tree.leaves(trained_part(placed.params, state.static.trained))
    inputs = [_input_track(each, params, plan) for each in (*trained, *jax.tree.leaves(placed.opt_state), *trained)]
    tracks = track(graph, [*inputs, Track()], count)
    found, refused = regions(graph, tracks, [each.rest for each in inputs[: len(graph.outputs)]], count)
    shared = {each.owner for each in inputs if each.rest is None}
    words = f"an axis of the model's shards the dimension that {DATA} shards"
    refused = [replace(each, reason=words) if shared.intersection(each.paths) else each for each in refused]
    wanted = [region for region in found if _is_worth(region, tracks, plan)]
    return [stack for stack in _stacks(wanted, tracks, count) if stack.owners > 1], refused


def _input_track(placed: Placement, params: Mapping[str, Placement], plan: Plan) -> Track:
    """Return what is known of a leaf of the state, or of a gradient, before an update."""
    name, _, path = placed.path.partition("/")
    owner, shape = params[path] if name == "params" else owner_of(path, placed.shape, params), placed.own_shape
    if owner is None or not shape:
        return Track()
    parameter = owner.path.partition("/")[2]
    if parameter.isdigit() and not {*shape} & {*owner.own_shape}:  # of a list's part, or of a chain's: coefficients
        return Track()
    leading = owner.own_shape[0] if len(owner.own_shape) > 2 else None
    dim = None if placed.flat else placed.dim
    shared = dim is not None and any(plan.mesh.shape[axis] > 1 for axis in axes_of(placed.rest[dim]) if axis != DATA)
    rest = None if shared else Rest(dim, placed.flat)
    return Track(parameter, Along(0) if shape[0] == leading else None, rest=rest)


def _is_worth(region: Region, tracks: Tracks, plan: Plan) -> bool:
    """Return False for matrices that a strategy that shards keeps replicated: too small, or by a rule."""
    stored = [tracks[value].rest for value in region.inputs]
    return not plan.row.shard_state or any(rest not in (None, Rest()) for rest in (*stored, *region.wanted))


def _stacks(regions: Sequence[Region], tracks: Tracks, count: int) -> list[Stack]:
    found = dict[Any, list[tuple[Region, tuple[Value, ...], tuple[Value, ...]]]]()
    for region in regions:
        order, program = described(region.operations, region.results)
        owned = tuple(value for value in order if value in region.inputs)
        taken = tuple(value for value in order if value not in region.inputs)
        travels = _travels(region, owned, tracks)
        same = (value for value, travel in zip(owned, travels[0], strict=True) if travel.kind == "same")
        key = (program, taken, region.matrices, tuple(value in owned for value in order), *travels, *same)
        found.setdefault(key, []).append((region, owned, taken))
    made = list[Stack]()
    for alike in found.values():
        members, inputs, taken = zip(*alike, strict=True)
        arrive, leave = _travels(members[0], inputs[0], tracks)
        made.append(Stack(members, inputs, taken[0], arrive, leave, tracks, count))
    return made


def _travels(region: Region, owned: Sequence[Value], tracks: Tracks) -> tuple[tuple[Travel, ...], tuple[Travel, ...]]:
    results = zip(region.results, region.wanted, strict=True)
    return (
        tuple(_travel(tracks[value], tracks[value].rest or Rest(), region.matrices) for value in owned),
        tuple(_travel(tracks[value], rest, region.matrices) for value, rest in results),
    )


def _travel(track: Track, rest: Rest, matrices: int | None) -> Travel:
    if rest.flat is not None:
        return Travel("flat", flat=rest.flat)
    if matrices is not None and track.place is None:
        return Travel("same")
    if rest.dim is None:
        return Travel("copy")
    if matrices is not None and track.place is not None and track.place.dim == rest.dim:
        return Travel("matrix")
    return Travel("dim", rest.dim)


def computed(stack: Stack, env: Env, plan: Plan) -> dict[Value, jax.Array]:
    """Return the results of a stack's regions, stored as they have to be, given what enters."""
    arrays = tuple(tuple(known(value, env) for value in values) for values in stack.inputs)
    arrive = tuple(_spec(stack, *each) for each in zip(stack.arrive, stack.inputs[0], strict=True))
    leave = tuple(_spec(stack, *each) for each in zip(stack.leave, stack.regions[0].results, strict=True))
    local = jax.shard_map(
        lambda arrays, taken: _on_a_device(stack, arrays, taken),
        mesh=plan.mesh,
        in_specs=((arrive,) * len(arrays), PartitionSpec()),
        out_specs=(leave,) * len(arrays),
        axis_names=set(batch_axes(plan.mesh)),
        check_vma=False,
    )
    results = local(arrays, tuple(known(value, env) for value in stack.taken))
    return {
        value: x
        for region, own in zip(stack.regions, results, strict=True)
        for value, x in zip(region.results, own, strict=True)
    }


def _spec(stack: Stack, travel: Travel, value: Value) -> PartitionSpec:
    if travel.kind == "flat" and travel.flat is not None:
        return PartitionSpec(*(None,) * (len(travel.flat.at_rest) - 1), DATA)
    if travel.kind == "matrix":
        place = stack.tracks[value].place
        return PartitionSpec(*(None,) * (place.dim if place else 0), DATA)
    return PartitionSpec(*(None,) * travel.dim, DATA) if travel.kind == "dim" else PartitionSpec()


def _on_a_device(stack: Stack, arrays: Sequence[Sequence[Any]], taken: Sequence[Any]) -> Any:
    """Return one device's shards of the results of all regions."""
    splits = range(len(stack.regions))
    groups = [[i] for i in splits] if stack.is_aligned else [list(splits)]
    inputs = list[Any]()
    for number, travel in enumerate(stack.arrive):
        own = [x[number] for x in arrays]
        if travel.kind == "same":
            inputs.append(own[0])
            continue
        parts = [_stacked(stack, travel, stack.inputs[0][number], x) for x in own]
        together = [_concatenated([parts[i] for i in group]) for group in groups]
        inputs.append(_concatenated([_arriving(stack, travel, x) for x in together]))
    made = _by_matrix(stack, inputs, taken)
    results = [list[Any]() for _ in splits]
    for travel, value, x in zip(stack.leave, stack.regions[0].results, made, strict=True):
        together = jnp.split(x, len(groups)) if len(groups) > 1 else [x]
        for group, part in zip(groups, together, strict=True):
            left = _leaving(stack, travel, part, len(group) * stack.each)
            for i, each in zip(group, jnp.split(left, len(group)), strict=True):
                results[i].append(_unstacked(stack, travel, value, each))
    return tuple(map(tuple, results))


def _concatenated(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _stacked(stack: Stack, travel: Travel, value: Value, x: jax.Array) -> jax.Array:
    """Return an array with its matrices along a leading dimension."""
    place = stack.tracks[value].place
    if stack.regions[0].matrices is None or place is None:
        return x[None]
    if travel.kind == "flat":
        return x
    outer = x.shape[place.dim] // place.inner
    split = x.reshape(*x.shape[: place.dim], outer, place.inner, *x.shape[place.dim + 1 :])
    return jnp.moveaxis(split, place.dim, 0)


def _unstacked(stack: Stack, travel: Travel, value: Value, x: jax.Array) -> jax.Array:
    """Return the reverse of `_stacked`."""
    place = stack.tracks[value].place
    if stack.regions[0].matrices is None or place is None:
        return x[0]
    if travel.kind == "flat":
        return x
    apart = jnp.moveaxis(x, 0, place.dim)
    return apart.reshape(*apart.shape[: place.dim], -1, *apart.shape[place.dim + 2 :])


def _arriving(stack: Stack, travel: Travel, x: jax.Array) -> jax.Array:
    """Return the whole matrices of one device, of a stack of all matrices' shards."""
    if travel.kind == "matrix":
        return x
    n = stack.owners
    if missing := -len(x) % n:  # the last is computed again: zeros might not be numbers afterwards
        padded = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
        x = jax.lax.optimization_barrier(padded)  # XLA:CPU may give the parts of one all-to-all different layouts
    if travel.kind == "copy":
        own = len(x) // n
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(DATA) % n * own, own)
    dim = x.ndim - 1 if travel.flat else travel.dim + 1
    whole = jax.lax.all_to_all(x, DATA, 0, dim, tiled=True)
    if travel.flat is None:
        return whole
    rows = jax.lax.slice_in_dim(whole, 0, travel.flat.row, axis=whole.ndim - 1)
    shape = travel.flat.shape if stack.regions[0].matrices is None else (1, *travel.flat.shape[1:])
    return rows.reshape(len(whole), *shape)


def _leaving(stack: Stack, travel: Travel, x: jax.Array, matrices: int) -> jax.Array:
    """Return the reverse of `_arriving`."""
    if travel.kind == "matrix":
        return x
    if travel.kind == "copy":
        if stack.owners == 1:
            return x
        groups = [[*range(first, first + stack.owners)] for first in range(0, stack.count, stack.owners)]
        return jax.lax.all_gather(x, DATA, axis_index_groups=groups, tiled=True)[:matrices]
    if travel.flat is not None:
        head = travel.flat.at_rest[:-1] if stack.regions[0].matrices is None else ()
        rows = x.reshape(len(x), *head, travel.flat.row)
        behind = (0, travel.flat.at_rest[-1] - travel.flat.row, 0)
        x = jax.lax.pad(rows, jnp.zeros((), x.dtype), [(0, 0, 0)] * (rows.ndim - 1) + [behind])
    dim = x.ndim - 1 if travel.flat else travel.dim + 1
    return jax.lax.all_to_all(x, DATA, dim, 0, tiled=True)[:matrices]


def _by_matrix(stack: Stack, inputs: Sequence[Any], taken: Sequence[Any]) -> Sequence[Any]:
    """Run the program of a stack for each matrix of a device."""
    region, is_by_matrix = stack.regions[0], stack.regions[0].matrices is not None

    def operation(each: Operation, operands: list[Any]) -> Any:
        places = [stack.tracks.get(value, Track()).place for value in each.operands]
        return one_index(each.eqn, operands, places if is_by_matrix else [None] * len(places))

    def program(*own: Any) -> list[Any]:
        env = dict(zip((*stack.inputs[0], *stack.taken), (*own, *taken), strict=True))
        evaluate(region.operations, env, operation)
        return [known(value, env) for value in region.results]

    mapped = [x for x, travel in zip(inputs, stack.arrive, strict=True) if travel.kind != "same"]
    axes = [None if travel.kind == "same" else 0 for travel in stack.arrive]
    size = sum(x.nbytes for x in mapped) // len(mapped[0])
    together = max(TOGETHER // max(size, 1), 1)
    if len(mapped[0]) <= together or None in axes:
        return jax.vmap(program, in_axes=axes)(*inputs)
    return jax.lax.map(lambda own: program(*own), tuple(inputs), batch_size=together)
