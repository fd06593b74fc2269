"""Rules (`rules.py`) for operations that move, cut, join and reduce dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jdp.core.gradients.row_proof.rules import Op, Rule, dims_of, joined, part_of
from jdp.core.gradients.row_proof.states import (
    Const,
    Mixed,
    Pieces,
    Rows,
    RowSum,
    State,
    Unknown,
    moved,
    reshape_groups,
    scales,
    split_rows,
)

NAMES_OF_REDUCTIONS = {"argmax": "maximum", "argmin": "minimum", "reduce_max": "maximum", "reduce_min": "minimum"}


def _carried(op: Op, state: State, mapping: dict[int, int], gone: str) -> State:
    """Return a state whose dimensions moved; where one that counts rows is gone, `gone` says what that means."""
    assert isinstance(state, Const | Rows | RowSum)
    try:
        return moved(state, mapping)
    except KeyError:
        return op.unknown() if isinstance(state, Const) else op.mixed(gone)


def broadcast_in_dim(op: Op) -> State:
    into = op.params["broadcast_dimensions"]
    return _carried(op, op.operands[0], dict(enumerate(into)), "a row is repeated")


def transpose(op: Op) -> State:
    places = {old: new for new, old in enumerate(op.params["permutation"])}
    return _carried(op, op.operands[0], places, "")


def squeeze(op: Op) -> State:
    left = [dim for dim in range(len(op.shape(0))) if dim not in op.params["dimensions"]]
    return _carried(op, op.operands[0], {old: new for new, old in enumerate(left)}, "one row is taken")


def reshape(op: Op) -> State:
    state, shapes = op.operands[0], (op.shapes(0), op.out_shapes)
    if isinstance(state, Rows):
        return split_rows(state, *shapes) or op.unknown()
    assert isinstance(state, Const | RowSum)
    dims = state.varies if isinstance(state, Const) else state.dims
    found = list[int]()
    for before, after in reshape_groups(*shapes) if dims or isinstance(state, Const) else ():
        whole = [dim for dim in before if op.shape(0)[dim] > 1]
        if dims & set(before):
            if isinstance(state, RowSum) and not dims >= set(whole):
                return op.unknown()
            found += after
        elif isinstance(state, Const) and len(whole) > 1:  # elements of other dimensions come to lie along the rows
            found += scales(*op.out_shapes) & set(after)
    new = frozenset(found)
    return replace(state, varies=new) if isinstance(state, Const) else replace(state, dims=new)


def reduce_sum(op: Op) -> State:
    state, axes = op.operands[0], set(op.params["axes"])
    assert isinstance(state, Const | Rows | RowSum)
    left = [dim for dim in range(len(op.shape(0))) if dim not in axes]
    mapping = {old: new for new, old in enumerate(left)}
    over, more = axes & dims_of(state), op.growth(0, axes - dims_of(state))
    if isinstance(state, Const):
        more = None if over else more
        power = None if state.power is None or more is None else state.power + more
        return Const(frozenset(mapping[dim] for dim in state.varies if dim in mapping), power)
    if more is None:
        return op.unknown("what is summed grows with the rows in no simple way")
    state = replace(state, power=state.power + more)
    dims = frozenset(mapping[dim] for dim in state.dims if dim in mapping)
    if isinstance(state, Rows) and over:
        return RowSum(dims, state.power, part_of(state))
    return replace(state, dims=dims) if isinstance(state, RowSum) else moved(state, mapping)


def reduction(op: Op) -> State:
    """Read a maximum, a product or another reduction that is no sum."""
    axes = set(op.params.get("axes", op.params.get("dimensions", ())))
    count = len(op.operands) if op.name != "reduce" else len(op.operands) // 2
    states = op.operands[:count]
    if any(isinstance(state, RowSum) for state in states):
        return op.mixed("a sum over rows enters a reduction that is not linear")
    if any(isinstance(state, Rows) and axes & set(state.dims) for state in states):
        return op.mixed(f"a {NAMES_OF_REDUCTIONS.get(op.name, op.name)} is taken over rows")
    if any(axes & op.counts(i) for i in range(count)) and not all(isinstance(state, Const) for state in states):
        return op.unknown("a dimension that grows with the rows is reduced")
    left = [dim for dim in range(len(op.shape(0))) if dim not in axes]
    state = joined(op, states)
    if isinstance(state, Const):
        kept = frozenset(left.index(dim) for dim in state.varies if dim in left)
        return Const(kept, state.power if op.name in NAMES_OF_REDUCTIONS and op.name[0] == "r" else 0)
    return state if isinstance(state, Unknown | Mixed) else _carried(op, state, {d: i for i, d in enumerate(left)}, "")


def along(op: Op) -> State:
    """Cumulative sums, sorting, the largest: along one dimension."""
    axis = op.params.get("axis", op.params.get("dimension", len(op.shape(0)) - 1))
    state = joined(op, op.operands) if not isinstance(op.operands[0], RowSum) else op.operands[0]
    if isinstance(state, RowSum):
        return state if op.name == "cumsum" and axis not in state.dims else op.mixed("a sum over rows is not the end")
    if isinstance(state, Const):
        return replace(state, varies=state.varies | ({axis} & op.counts(0)))
    if isinstance(state, Rows) and axis not in state.dims and axis in op.counts(0):
        return op.unknown("a dimension that grows with the rows is gone through")
    if not isinstance(state, Rows) or axis not in state.dims:
        return state
    if op.name == "sort" and len(op.shape(0)) == 1:
        one_each = state.outer == state.inner == (1, 1)  # else a row's numbers do not stay in their places
        return replace(state, order=("sorted", object())) if one_each else op.unknown("several of a row are sorted")
    return op.mixed(
        {"sort": "rows are sorted", "top_k": "the largest of the rows are taken"}.get(
            op.name, f"{op.name} goes from row to row"
        )
    )


def rev(op: Op) -> State:
    state = op.operands[0]
    if isinstance(state, Rows) and set(state.dims) & set(op.params["dimensions"]):
        return replace(state, order=("reversed", state.order)) if len(state.dims) == 1 else op.unknown()
    return state


def iota(op: Op) -> State:
    return Const(scales(*op.out_shapes) & {op.params["dimension"]}, 0)


def concatenate(op: Op) -> State:
    axis, states = op.params["dimension"], op.operands
    rows = [state for state in states if isinstance(state, Rows)]
    if any(isinstance(state, RowSum) for state in states):
        zeros = [state for state in states if not isinstance(state, RowSum)]
        same = len({state for state in states if isinstance(state, RowSum)}) == 1
        fine = same and all(isinstance(z, Const) and z.is_zero for z in zeros)
        first = next(state for state in states if isinstance(state, RowSum))
        return first if fine and axis not in first.dims else op.unknown()
    if rows and axis in rows[0].dims:
        alike = len({(state.dims, state.inner, state.power, state.order) for state in rows}) == 1
        if not alike or len(rows) < len(states) or len(rows[0].dims) > 1:
            return op.unknown("rows are put beside what is not of them")
        return replace(rows[0], outer=(sum(x.outer[0] for x in rows), sum(x.outer[1] for x in rows)))
    if rows and any(isinstance(state, Const) and state.varies for state in states):
        last = axis == len(op.shape(0)) - 1
        parts = tuple((op.shape(i)[axis], state) for i, state in enumerate(states))
        return Pieces(parts) if last else op.unknown("a row's number counts")
    state = joined(op, states)
    along_rows = {axis} & scales(*op.out_shapes)
    return replace(state, varies=state.varies | along_rows) if isinstance(state, Const) else state


def stack(op: Op) -> State:
    axis, states = op.params["axis"], op.operands
    state = states[0] if len(set(states)) == 1 and isinstance(states[0], RowSum) else joined(op, states)
    shifted = {dim: dim + (dim >= axis) for dim in range(len(op.shape(0)))}
    return state if isinstance(state, Mixed | Unknown) else _carried(op, state, shifted, "")


def sliced(op: Op) -> State:
    state = op.operands[0]
    cuts = [_cuts(each.params, shape) for each, shape in zip((op.eqn, op.other), op.shapes(0), strict=True)]
    if any(cuts[0].get(dim) != cuts[1].get(dim) for dim in {*cuts[0], *cuts[1]} - dims_of(state)):
        return op.unknown("what is taken depends on the number of rows")
    hit = {dim for cut in cuts for dim in cut} & dims_of(state)
    if not hit or isinstance(state, Const):
        return state
    if not isinstance(state, Rows) or len(state.dims) > 1:
        return op.mixed("some of the rows are taken")
    [dim] = hit
    first, second = (_taken(cuts[i].get(dim), op.shapes(0)[i][dim], state, i) for i in (0, 1))
    if first is None or second is None:
        return op.mixed("some of the rows are taken")
    return replace(state, outer=(first[0], second[0]), inner=(first[1], second[1]))


def _cuts(params: dict[str, Any], shape: tuple[int, ...]) -> dict[int, tuple[int, int, int]]:
    """Return (start, limit, stride) of the dimensions that a slice cuts."""
    strides = params["strides"] or (1,) * len(shape)
    given = enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    return {dim: each for dim, each in given if each != (0, shape[dim], 1)}


def _taken(cut: tuple[int, int, int] | None, size: int, state: Rows, trace: int) -> tuple[int, int] | None:
    """Return outer and inner of a slice that takes something of each unit; None for another."""
    outer, inner = state.outer[trace], state.inner[trace]
    start, limit, stride = cut or (0, size, 1)
    whole = size // outer
    if stride == 1 and start % whole == 0 and limit % whole == 0:
        return (limit - start) // whole, inner
    if stride > 1 and inner % stride == 0 and start < stride and limit > size - stride + start:
        return outer, inner // stride
    return None


def split(op: Op) -> State:
    """Into whole repetitions of the batch, such as two views that were put one after another; or along no rows."""
    sizes, axis, state = op.params["sizes"], op.params["axis"], op.operands[0]
    if isinstance(state, Const) or axis not in dims_of(state):
        return state
    parts = len(sizes)
    if isinstance(state, Rows) and len(state.dims) == 1 and len(set(sizes)) == 1:
        outer = state.outer
        if outer[0] % parts == 0 and outer[1] % parts == 0:
            return replace(state, outer=(outer[0] // parts, outer[1] // parts))
    return op.mixed("some of the rows are taken")


def dynamic_slice(op: Op) -> State:
    state, indices = op.operands[0], op.operands[1:]
    cut = {d for d, (a, b) in enumerate(zip(op.shape(0), op.params["slice_sizes"], strict=True)) if a != b}
    if cut & dims_of(state) and not isinstance(state, Const):
        return op.mixed("some of the rows are taken")
    if all(isinstance(index, Const) for index in indices):
        return state
    return joined(op, op.operands) if not dims_of(state) else op.unknown()


def dynamic_update_slice(op: Op) -> State:
    state, update, *indices = op.operands
    cut = {d for d, (a, b) in enumerate(zip(op.shape(0), op.shape(1), strict=True)) if a != b}
    if not all(isinstance(index, Const) for index in indices) or cut & (dims_of(state) | dims_of(update)):
        return op.unknown()
    return joined(op, (state, update))


def pad(op: Op) -> State:
    state, value = op.operands
    changed = {dim for dim, entry in enumerate(op.params["padding_config"]) if any(entry)}
    if isinstance(state, RowSum):
        zero = isinstance(value, Const) and value.is_zero
        return state if zero and not changed & state.dims else op.unknown()
    if changed & dims_of(state) or not isinstance(value, Const):
        return op.unknown()
    found = joined(op, op.operands)
    along_rows = changed & scales(*op.out_shapes)
    return replace(found, varies=found.varies | along_rows) if isinstance(found, Const) else found


def tile(op: Op) -> State:
    """Repeat an array along its dimensions; whole batches too, as views that are put one after another."""
    state, reps = op.operands[0], list(zip(op.params["reps"], op.other.params["reps"], strict=True))
    assert isinstance(state, Const | Rows | RowSum)
    repeated = {dim for dim, pair in enumerate(reps) if max(pair) > 1}
    by_rows = {dim for dim, pair in enumerate(reps) if pair[0] != pair[1] and op.shape(0)[dim] > 1}
    if isinstance(state, Const):
        return replace(state, varies=state.varies | by_rows)
    over = repeated & dims_of(state)
    if not over and not by_rows:
        return state
    if by_rows or isinstance(state, RowSum) or len(state.dims) > 1:
        return op.unknown()
    [(first, second)] = [reps[dim] for dim in over]
    return replace(state, outer=(state.outer[0] * first, state.outer[1] * second))


SHAPES: dict[str, Rule] = {
    **dict.fromkeys(("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or"), reduction),
    **dict.fromkeys(("reduce_prod", "reduce_xor"), reduction),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "sort", "top_k"), along),
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "iota": iota,
    "pad": pad,
    "reduce_sum": reduce_sum,
    "reshape": reshape,
    "rev": rev,
    "slice": sliced,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "transpose": transpose,
}
