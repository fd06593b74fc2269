"""Which operations of an optimizer's update mix the elements of one parameter's matrices: regions of its trace.

A region has the operations of one parameter from the first that mixes to the last, such as Muon's Newton-Schulz steps.
What leads to it is cut where the fewest bytes enter (a minimum cut: the momentum, say, and not the gradient, the old
momentum and a norm). What follows is computed as stored. `whole_matrices.py` runs regions on whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import jaxprs_in_params

from jdp.core.sharding.padded import Flat
from jdp.core.tracing.graph import Graph, Operation, Value, before
from jdp.core.tracing.jaxprs import DECOMPOSITIONS, ELEMENTWISE, REDUCTIONS, every_eqn
from jdp.core.tracing.minimum_cut import minimum_cut
from jdp.core.tracing.per_index import UNIFORM, Mixes, Place, places_after, same_start

MANY = "*"
"""The owner of what is computed from several parameters."""
_HEAVY = DECOMPOSITIONS | frozenset(
    """
    approx_top_k conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum custom_linear_solve dot_general fft sort
    top_k
    """.split()  # noqa: SIM905
)
"""Operations that mix elements, and for which XLA gathers a sharded array, or cannot be run on a part of it."""
_PLACES = frozenset("device_put shard_map sharding_constraint".split())  # noqa: SIM905


@dataclass(frozen=True)
class Rest:
    """How an array of the update is stored: sharded over `data` on `dim`, flat and padded, or replicated."""

    dim: int | None = None
    flat: Flat | None = None


@dataclass(frozen=True)
class Track:
    """What is known of a value of the update.

    Attributes:
        owner: path of the parameter that it is computed for; None: none, `MANY`: several.
        place: where it has the parameter's leading dimension, if that has stacked matrices.
        apart: the operation that makes it computes each index of that dimension by itself.
        rest: how it is stored; None if that is not known.
        reduced: a sum leads to it.
    """

    owner: str | None = None
    place: Place = None
    apart: bool = True
    rest: Rest | None = Rest()
    reduced: bool = False


Tracks = dict[Value, Track]


@dataclass(frozen=True, eq=False)
class Region:
    """Operations that mix the elements of one parameter, in order, and what enters and leaves them.

    Attributes:
        owner: path of the parameter.
        operations: in order.
        inputs: the parameter's values that enter.
        results: the values that leave.
        wanted: how each of them is stored.
        matrices: number of stacked matrices that are computed one by one; None: all of a leaf is one.
    """

    owner: str
    operations: tuple[Operation, ...]
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    wanted: tuple[Rest, ...]
    matrices: int | None


@dataclass(frozen=True)
class Refusal:
    """Why parameters whose elements are mixed get no region: the operation, and the reason in words."""

    paths: tuple[str, ...]
    operation: str
    reason: str


def track(graph: Graph, inputs: Sequence[Track], count: int) -> Tracks:
    """Return what is known of every value of an update's graph, given its inputs', on `count` devices."""
    tracks: Tracks = dict(zip(graph.inputs, inputs, strict=True))
    for operation in graph.operations:
        given = [tracks.get(value, Track()) for value in operation.operands]
        arrays = {
            each.owner for value, each in zip(operation.operands, given, strict=True) if not _is_number(value, each)
        }
        owners = (arrays - {None} or {each.owner for each in given}) - {None}
        owner = next(iter(owners), None) if len(owners) < 2 else MANY
        places, apart = list[Place]([None] * len(operation.results)), True
        try:
            places = places_after(operation.eqn, [each.place for each in given])
        except Mixes:
            apart = False
        reduced = operation.name in REDUCTIONS or any(each.reduced for each in given)
        for value, place in zip(operation.results, places, strict=True):
            rest = _rest_after(operation, value, given, count)
            tracks[value] = Track(owner, place, apart, rest, reduced)
    return tracks


def _is_number(value: Value, track: Track) -> bool:
    """Return True for a scalar, or an array of one: a norm over all parameters does not make an array of them."""
    return not value.aval.shape or track.place == UNIFORM


def _rest_after(operation: Operation, result: Value, given: Sequence[Track], count: int) -> Rest | None:
    """Return how XLA stores a result without sending anything but sums."""
    eqn, name = operation.eqn, operation.name
    pairs = zip(operation.operands, given, strict=True)
    arrays = [
        each.rest for value, each in pairs if value.aval.shape and (each.owner is not None or each.rest != Rest())
    ]
    if not result.aval.shape or not arrays:
        return Rest()
    if name in ELEMENTWISE:
        stored = set(arrays) - {Rest()}
        return Rest() if not stored else stored.pop() if len(stored) == 1 else None
    [rest, *others], old = arrays, tuple(operation.operands[0].aval.shape)
    if rest is None or others or (rest.flat is not None and tuple(result.aval.shape) != old):
        return None
    if rest.dim is None:
        return rest if name in ("reshape", "transpose", "broadcast_in_dim", "squeeze", *REDUCTIONS) else None
    if name == "transpose":
        return Rest(eqn.params["permutation"].index(rest.dim))
    if name == "reshape":
        dim = same_start(old, result.aval.shape, rest.dim, count)
        return None if dim is None else Rest(dim)
    if name == "broadcast_in_dim":
        dim = eqn.params["broadcast_dimensions"][rest.dim]
        return Rest(dim) if result.aval.shape[dim] == old[rest.dim] else None
    gone = eqn.params.get("axes", eqn.params.get("dimensions")) if name in ("squeeze", *REDUCTIONS) else None
    if gone is None:
        return None
    return Rest() if rest.dim in gone else Rest(rest.dim - sum(dim < rest.dim for dim in gone))


def mixes(operation: Operation) -> bool:
    """Return True if an operation mixes elements of a matrix in a way that needs all of it."""
    return any(eqn.primitive.name in _HEAVY and not _is_sum(eqn) for eqn in _inside(operation))


def _inside(operation: Operation) -> list[Any]:
    """Return an operation and all that it runs."""
    inner = jaxprs_in_params(operation.eqn.params)
    return [operation.eqn, *(eqn for program in inner for eqn in every_eqn(program))]


def _is_sum(eqn: Any) -> bool:
    """Return True for a product that is a sum over all elements, of which XLA sends one number."""
    return eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == ()


def regions(
    graph: Graph, tracks: Tracks, outputs: Sequence[Rest | None], count: int
) -> tuple[list[Region], list[Refusal]]:
    """Return the regions of an update, one a parameter, and why other parameters whose elements mix have none.

    Args:
        graph: of the update, with calls inlined.
        tracks: what is known of its values.
        outputs: how each of its results is stored; None where that is not known.
        count: number of devices.
    """
    heavy, refused, found = dict[str, list[Operation]](), list[Refusal](), list[Region]()
    for operation in graph.operations:
        owner = tracks[operation.results[0]].owner
        if owner is None or not _is_heavy(operation, tracks):
            continue
        if owner == MANY and not mixes(operation):
            continue  # a condition over flat leaves is replayed on them
        if owner == MANY:
            paths = {track.owner for value in before(operation.operands)[1] if (track := tracks.get(value))}
            names = tuple(sorted(path for path in paths if path not in (None, MANY)))
            refused.append(Refusal(names, operation.name, "it computes several parameters at once"))
        else:
            heavy.setdefault(owner, []).append(operation)
    flow = _Flow.of(graph, tracks, _wanted(graph, outputs, count)) if heavy else None
    for owner, operations in heavy.items():
        region = _region(flow, owner, operations) if flow else ""
        if isinstance(region, Region):
            found.append(region)
        else:
            refused.append(Refusal((owner,), operations[0].name, region))
    inside = {value for region in found for value in region.results}
    leading = {region: before(_entering({*region.operations}))[0] for region in found}
    apart = [region for region in found if inside.isdisjoint(value for op in leading[region] for value in op.results)]
    late = tuple(region.owner for region in found if region not in apart)
    refused += [Refusal(late, "the update", "it needs another parameter's result")] if late else []
    return apart, refused


def _is_heavy(operation: Operation, tracks: Tracks) -> bool:
    """Return True for an operation that mixes elements, or that rows of flat leaves cannot be given to."""
    if operation.name in ELEMENTWISE:
        return False
    if mixes(operation):
        return True
    rests = [[tracks.get(value, Track()).rest for value in each] for each in (operation.operands, operation.results)]
    takes, makes = ([rest is not None and rest.flat is not None for rest in each] for each in rests)
    is_sum = operation.name in REDUCTIONS and operation.results[0].aval.shape == ()
    return any(takes) and not is_sum and not all(makes)


def _wanted(graph: Graph, outputs: Sequence[Rest | None], count: int) -> dict[Value, Rest]:
    """Return how a value has to be stored for the results to be so without sending anything."""
    known = zip(graph.outputs, outputs, strict=True)
    wanted = {value: rest for value, rest in known if rest is not None}
    for operation in reversed(graph.operations):
        rest = next((wanted[value] for value in operation.results if value in wanted), None)
        if rest is None or len(operation.results) > 1:
            continue
        shape = tuple(operation.results[0].aval.shape)
        for value in operation.operands:
            if (own := _rest_before(operation, rest, tuple(value.aval.shape), shape, count)) is not None:
                wanted.setdefault(value, own)
    return wanted


def _rest_before(
    operation: Operation, rest: Rest, old: tuple[int, ...], new: tuple[int, ...], count: int
) -> Rest | None:
    name = operation.name
    if name in ELEMENTWISE:
        return rest if old == new else None
    if rest.flat is not None:
        return rest if name == "reshape" and old == new else None
    if name not in ("transpose", "reshape"):
        return None
    if rest.dim is None:
        return rest
    if name == "transpose":
        return Rest(operation.eqn.params["permutation"][rest.dim])
    dim = same_start(new, old, rest.dim, count)
    return None if dim is None else Rest(dim)


@dataclass(frozen=True, eq=False)
class _Flow:
    """An update's graph: what is known of its values, how they are wanted, and the operations that take each."""

    graph: Graph
    tracks: Tracks
    wanted: dict[Value, Rest]
    users: dict[Value, list[Operation]]
    outputs: set[Value]

    @staticmethod
    def of(graph: Graph, tracks: Tracks, wanted: dict[Value, Rest]) -> _Flow:
        users = dict[Value, list[Operation]]()
        for operation in graph.operations:
            for value in set(operation.operands):
                users.setdefault(value, []).append(operation)
        return _Flow(graph, tracks, wanted, users, set(graph.outputs))

    def following(self, operations: Iterable[Operation]) -> set[Operation]:
        """Return the operations that depend on others."""
        found, waiting = set[Operation](), list(operations)
        while waiting:
            users = {user for value in waiting.pop().results for user in self.users.get(value, ())} - found
            found |= users
            waiting += users
        return found

    def leaving(self, core: Collection[Operation]) -> list[Value]:
        """Return the results that operations outside of `core` take, or that are results of the graph."""

        def leaves(value: Value) -> bool:
            return value in self.outputs or any(user not in core for user in self.users.get(value, ()))

        ordered = sorted(core, key=lambda operation: operation.place)
        return [value for operation in ordered for value in operation.results if leaves(value)]


def _region(flow: _Flow, owner: str, heavy: Sequence[Operation]) -> Region | str:
    """Return the region of a parameter around its heavy operations, or why there is none."""
    tracks = flow.tracks
    leading, _ = before([value for operation in heavy for value in operation.operands])
    between = flow.following(heavy)
    core = {*heavy, *(operation for operation in leading if operation in between)}
    if any(tracks[value].owner != owner for operation in core for value in operation.results):
        return "it computes several parameters at once"
    core |= _until_stored(flow, owner, core)
    entering = _entering(core)
    several = [value for value in entering if value in tracks and tracks[value].owner == MANY]
    if not all(_is_number(value, tracks[value]) for value in several):
        return "an array of several parameters enters it"
    results = flow.leaving(core)
    stored = [flow.wanted.get(value, Rest() if not value.aval.shape else None) for value in results]
    if None in stored:
        return "how its result is stored is not known"
    for by_matrix in (True, False):
        cut = _cut([value for value in entering if _is_of(tracks, value, owner)], tracks, owner, by_matrix)
        if cut is None:
            continue
        inputs = sorted(cut, key=_place_in(flow.graph))
        operations = {*core, *_leading(entering, cut, tracks, owner)}
        operations.update(_of_none(operations, tracks))
        if any(eqn.primitive.name in _PLACES for operation in operations for eqn in _inside(operation)):
            return "it places arrays by itself"
        count = _matrices(tracks, operations, inputs, results) if by_matrix else None
        if not by_matrix or count is not None:
            ordered = tuple(sorted(operations, key=lambda operation: operation.place))
            return Region(owner, ordered, tuple(inputs), tuple(results), tuple(filter(None, stored)), count)
    return "how its operands are stored is not known"


def _entering(operations: Collection[Operation]) -> dict[Value, None]:
    """Return the values that operations take and none of them makes."""
    return dict.fromkeys(value for op in operations for value in op.operands if value.maker not in operations)


def _is_of(tracks: Tracks, value: Value, owner: str) -> bool:
    return value in tracks and tracks[value].owner == owner


def _matrices(
    tracks: Tracks, operations: Iterable[Operation], inputs: Iterable[Value], results: Iterable[Value]
) -> int | None:
    """Return the number of stacked matrices of a region that computes each by itself; None of another."""
    if not all(tracks[value].apart for operation in operations for value in operation.results):
        return None
    if {tracks[value].place for value in results} & {None, UNIFORM}:
        return None
    found = ((value, tracks[value].place) for value in inputs)
    counts = {value.aval.shape[place.dim] // place.inner for value, place in found if place not in (None, UNIFORM)}
    return counts.pop() if len(counts) == 1 else None


def _leading(entering: Iterable[Value], cut: Collection[Value], tracks: Tracks, owner: str) -> list[Operation]:
    """Return the parameter's operations between the cut and what enters the core."""
    own = [value for value in entering if _is_of(tracks, value, owner) and value not in cut]
    return before(own, lambda value: value in cut or not _is_of(tracks, value, owner))[0]


def _of_none(operations: Collection[Operation], tracks: Tracks) -> list[Operation]:
    """Return what leads to operations and is of no parameter: each may have its own, such as a bias correction."""
    entering = [value for value in _entering(operations) if value in tracks]
    given: Any = lambda value: tracks[value].owner is not None or (value.maker and mixes(value.maker))  # noqa: E731
    return before(entering, given)[0]


def _until_stored(flow: _Flow, owner: str, core: Collection[Operation]) -> set[Operation]:
    """Return the operations that follow the core up to where it is known how their results are stored."""
    inside, more = set(core), set[Operation]()
    while True:
        unknown = [value for value in flow.leaving(inside) if value not in flow.wanted and value.aval.shape]
        users = {user for value in unknown for user in flow.users.get(value, ())} - inside
        users = {user for user in users if all(flow.tracks[value].owner == owner for value in user.results)}
        if not users:
            return more
        inside |= users
        more |= users


def _place_in(graph: Graph) -> Any:
    order = {value: i for i, value in enumerate(graph.inputs)}
    return lambda value: order.get(value, -1) if value.maker is None else len(order) + value.maker.place


def _cut(targets: Sequence[Value], tracks: Tracks, owner: str, by_matrix: bool) -> set[Value] | None:
    """Return the parameter's values of the fewest bytes that lead to `targets`; None if they cannot enter a region."""
    values, waiting = dict[Value, list[Value]](), list(targets)
    while waiting:
        value = waiting.pop()
        if value not in values:
            operands = value.maker.operands if value.maker else []
            values[value] = [each for each in operands if _is_of(tracks, each, owner)]
            waiting += values[value]
    sizes = {value: _bytes_entering(value, tracks[value], by_matrix) for value in values}
    return minimum_cut(values, sizes, targets)


def _bytes_entering(value: Value, track: Track, by_matrix: bool) -> float:
    """Return the bytes of a value, and one more where a sum leads to it, which is sent too."""
    if track.rest is None or (by_matrix and value.aval.shape and (not track.apart or track.place == UNIFORM)):
        return math.inf
    if by_matrix and track.rest.flat is not None and len(track.rest.flat.at_rest) == 1:
        return math.inf  # the rows of several matrices are one
    return float(value.aval.size * value.aval.dtype.itemsize + track.reduced)
