"""Reading and writing by index (`gather`, `scatter`): what its results depend on.

`x[i]` for an index of each row is of that row; `x[arange(rows), i]` too. Other reads along the rows take other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jdp.core.gradients.row_proof.rules import Op, common_power, first_bad, is_arange, joined
from jdp.core.gradients.row_proof.states import Const, Pieces, Rows, RowSum, State


def gather(op: Op) -> State:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    array, index = op.operands
    rank, last = len(op.out_shapes[0]), len(op.shape(1)) - 1
    outside = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(len(op.shape(0))) if dim not in hidden]
    of_array = dict(zip(kept, numbers.offset_dims, strict=True))
    of_index = dict(enumerate(outside))
    of_batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    pieces, by_row = _pieces(op, index), _rows_of(index)
    if (bad := first_bad([state for _, state in pieces])) is not None:
        return bad
    if any(isinstance(state, RowSum) for _, state in pieces):
        return op.mixed("a sum over rows is an index")
    if isinstance(array, Const) and not array.varies:
        if isinstance(index, Pieces):
            return op.unknown("a row's number counts")
        if by_row is None:
            varies = frozenset(of_index[d] for d in _varies(index) if d in of_index)
            return Const(varies, array.power if index.power == 0 else None)  # pyright: ignore[reportAttributeAccessIssue]
        if last in by_row.dims or array.power != 0 or by_row.power:
            return op.unknown()
        return replace(by_row, dims=tuple(of_index[dim] for dim in by_row.dims))
    if isinstance(array, Const):
        return Const(frozenset(range(rank))) if by_row is None and array.power == 0 else op.unknown()
    if isinstance(array, RowSum):
        whole = all(dim in of_array and sizes[dim] == op.shape(0)[dim] for dim in array.dims)
        if by_row is not None or not whole or _varies(index):
            return op.mixed("a sum over rows is read by index")
        return replace(array, dims=frozenset(of_array[dim] for dim in array.dims))
    assert isinstance(array, Rows)
    places, numbered = list[int](), set[int]()
    for dim in array.dims:
        if dim in of_batch:
            places.append(of_index[of_batch[dim]])
        elif dim in of_array and sizes[dim] == op.shape(0)[dim]:
            places.append(of_array[dim])
        elif (found := _numbered_along(op, dim, numbers.start_index_map, numbers.collapsed_slice_dims, pieces)) is None:
            return op.mixed("rows are taken by index")
        else:
            places.append(of_index[found])
            numbered.add(found)
    result = replace(array, dims=tuple(places))
    varying = [state for _, state in pieces if isinstance(state, Const) and state.varies]
    if any(not (state.varies <= numbered and is_arange(state, tuple(state.varies))) for state in varying):
        return op.unknown("a row's number counts")
    if by_row is not None:
        index_places = tuple(of_index[dim] for dim in by_row.dims if dim in of_index)
        if replace(by_row, dims=index_places).place != result.place:
            return op.mixed("rows are taken by index")
    return result


def _pieces(op: Op, index: State) -> Sequence[tuple[int, State]]:
    return index.parts if isinstance(index, Pieces) else [(op.shape(1)[-1], index)]


def _rows_of(index: State) -> Rows | None:
    parts = [state for _, state in index.parts] if isinstance(index, Pieces) else [index]
    return next((state for state in parts if isinstance(state, Rows)), None)


def _varies(index: State) -> frozenset[int]:
    return index.varies if isinstance(index, Const) else frozenset()


def _numbered_along(
    op: Op, dim: int, index_map: Sequence[int], collapsed: Sequence[int], pieces: Sequence[tuple[int, State]]
) -> int | None:
    """Return the dimension of the index along which `dim` is numbered in order, from 0 to its size."""
    if dim not in index_map or dim not in collapsed:
        return None
    place = index_map.index(dim)
    for size, state in pieces:
        if place < size:
            dims = sorted(state.varies) if size == 1 and isinstance(state, Const) else []
            same = [d for d in dims if op.shape(1)[d] == op.shape(0)[dim]]
            return same[0] if len(dims) == 1 and same and is_arange(state, (same[0],)) else None
        place -= size
    return None


def scatter(op: Op) -> State:
    numbers = op.params["dimension_numbers"]
    array, index, updates = op.operands
    if isinstance(array, Const) and isinstance(index, Const) and isinstance(updates, Const):
        power = common_power([array, updates]) if index.power == 0 else None
        return Const(frozenset(range(len(op.shape(0)))) & op.counts(0), power)
    if isinstance(index, Pieces | RowSum) or isinstance(array, RowSum) or isinstance(updates, RowSum):
        return op.unknown()
    into = [dim for dim in range(len(op.shape(2))) if dim not in numbers.update_window_dims]
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(len(op.shape(0))) if dim not in hidden]
    window = dict(zip(numbers.update_window_dims, kept, strict=True))
    batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    of_index = {update: batch.get(i) for i, update in enumerate(into)} | window
    moved = list[State]()
    for state, places in ((index, dict(enumerate(into))), (updates, None)):
        if not isinstance(state, Rows):
            moved.append(state)
            continue
        dims = [of_index.get(places[dim] if places is not None else dim) for dim in state.dims]
        if None in dims:
            return _counted(op, array, index, updates, dict(enumerate(into)))
        moved.append(replace(state, dims=tuple(dim for dim in dims if dim is not None)))
    result = joined(op, [array, *moved])
    whole = {into: update for update, into in window.items() if op.shape(2)[update] == op.shape(0)[into]}
    if isinstance(result, Rows) and not set(result.dims) <= {*whole, *numbers.operand_batching_dims}:
        return op.unknown("some of the rows are written")
    return result


def _counted(op: Op, array: State, index: State, updates: State, into: dict[int, int]) -> State:
    """Rows are added up at places of theirs, such as in a histogram: a sum over rows."""
    if op.name != "scatter-add" or not (isinstance(array, Const) and array.is_zero):
        return op.unknown("rows are written by index")
    if isinstance(updates, Rows) and not set(updates.dims) <= set(into.values()):
        return op.unknown("rows are written by index")
    placed = replace(index, dims=tuple(into[dim] for dim in index.dims)) if isinstance(index, Rows) else index
    state = joined(op, [placed, updates])
    return RowSum(frozenset(), state.power) if isinstance(state, Rows) else op.unknown()
