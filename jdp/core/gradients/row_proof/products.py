"""Rules (`rules.py`) for products, convolutions, windows, decompositions and draws."""

from __future__ import annotations

from dataclasses import replace

from jdp.core.gradients.row_proof.rules import Op, Rule, dims_of, is_arange, joined, part_of
from jdp.core.gradients.row_proof.states import Const, Rows, RowSum, State, moved, scales

BATCHED_MATRICES = frozenset(
    "cholesky eigh lu qr svd triangular_solve householder_product tridiagonal_solve".split()  # noqa: SIM905
)


def dot_general(op: Op) -> State:
    (contracted, batched), states = op.params["dimension_numbers"], op.operands
    ranks = [len(op.shape(0)), len(op.shape(1))]
    mappings = list[dict[int, int]]()
    place = len(batched[0])
    for side in (0, 1):
        free = [d for d in range(ranks[side]) if d not in contracted[side] and d not in batched[side]]
        mappings.append({d: i for i, d in enumerate(batched[side])} | {d: place + i for i, d in enumerate(free)})
        place += len(free)
    pairs = dict(zip((*contracted[0], *batched[0]), (*contracted[1], *batched[1]), strict=True))
    powers = [getattr(state, "power", None) for state in states]
    left, right = states
    if isinstance(left, Rows) and isinstance(right, Rows):
        paired = tuple(pairs.get(dim) for dim in left.dims) == right.dims
        if not paired or left.place[1:] != right.place[1:]:
            return op.mixed("rows are multiplied with other rows")
        return _product(op, left, mappings[0], set(contracted[0]), left.power + right.power, 0)
    side = 0 if not isinstance(left, Const) else 1
    state, other = states[side], states[1 - side]
    if not isinstance(other, Const):
        return op.mixed("a sum over rows is multiplied with what depends on rows")
    if isinstance(state, Const):
        return _product_of_constants(op, mappings)
    if other.varies:
        return op.unknown("a row's number counts")
    if powers[0] is None or powers[1] is None:
        return op.unknown("a factor grows with the rows in no simple way")
    return _product(op, state, mappings[side], set(contracted[side]), powers[0] + powers[1], side)


def _product(op: Op, state: State, mapping: dict[int, int], contracted: set[int], power: int, side: int) -> State:
    dims = dims_of(state)
    more = op.growth(side, contracted - dims)
    if more is None:
        return op.unknown("what is summed grows with the rows in no simple way")
    power += more
    left = frozenset(mapping[dim] for dim in dims - contracted)
    if isinstance(state, RowSum):
        return op.unknown() if state.part in ("all", "every") else replace(state, dims=left, power=power)
    assert isinstance(state, Rows)
    if dims & contracted:
        return RowSum(left, power, part_of(state))
    return replace(moved(state, mapping), power=power)


def _product_of_constants(op: Op, mappings: list[dict[int, int]]) -> State:
    found, power = set[int](), 0
    for side, mapping in enumerate(mappings):
        state = op.operands[side]
        assert isinstance(state, Const)
        found |= {mapping[dim] for dim in state.varies if dim in mapping}
        power = None if power is None or state.power is None else power + state.power
    contracted = set(op.params["dimension_numbers"][0][0])
    return Const(frozenset(found), None if contracted & op.counts(0) else power)


def conv(op: Op) -> State:
    numbers, (image, kernel) = op.params["dimension_numbers"], op.operands
    batch, out = numbers.lhs_spec[0], numbers.out_spec[0]
    if isinstance(image, Const) and isinstance(kernel, Const):
        return Const(frozenset({out} if image.varies else ()) | ({0} if kernel.varies else frozenset()), None)
    if (
        isinstance(image, RowSum)
        or not isinstance(kernel, Const)
        or kernel.varies
        or op.params["batch_group_count"] > 1
    ):
        return op.unknown()
    if not isinstance(image, Rows) or set(image.dims) != {batch} or image.power or kernel.power != 0:
        return op.mixed("a convolution goes over rows")
    return moved(image, {batch: out})


def windows(op: Op) -> State:
    sizes = op.params["window_dimensions"]
    plain = {"window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1, "window_dimensions": 1}
    given = {name: op.params.get(name) or (usual,) * len(sizes) for name, usual in plain.items()}
    over = {dim for name, values in given.items() for dim, value in enumerate(values) if value != plain[name]}
    states = [state for i, state in enumerate(op.operands) if len(op.shape(i)) == len(sizes)]
    state = joined(op, states)
    if isinstance(state, Rows) and over & set(state.dims):
        return op.mixed("a window goes over rows")
    return state


def matrices(op: Op) -> State:
    """Decompositions of matrices in the last two dimensions, and Fourier transforms along the last."""
    state, rank = joined(op, op.operands), len(op.shape(0))
    inner = len(op.params["fft_lengths"]) if op.name == "fft" else 2
    if isinstance(state, Rows) and any(dim >= rank - inner for dim in state.dims):
        return op.mixed("a matrix of several rows is decomposed")
    return state


def attention(op: Op) -> State:
    """cuDNN's fused attention: all operands and results have the rows first."""
    state = joined(op, [x for x in op.operands if not isinstance(x, Const)])
    return state if isinstance(state, Rows) and state.dims == (0,) and state.inner == (1, 1) else op.unknown()


def draw(op: Op) -> State:
    """Take a draw with one dimension of rows as drawn by row (`rowwise_loss.py`), one without as shared by all."""
    counted, known = scales(*op.out_shapes), op.operands[-1]
    rows = [state for state in op.operands if isinstance(state, Rows)]
    if rows:
        return joined(op, op.operands) if counted <= set(rows[0].dims) else op.mixed("each row draws for all rows")
    if not counted:
        return Const()
    numbered = op.name not in ("random_fold_in", "random_seed") or (isinstance(known, Const) and _numbers(op, known))
    sizes = [[shape[dim] for dim in counted] for shape in op.out_shapes]
    if len(counted) > 1 or not numbered or any(size[0] % n for size, n in zip(sizes, op.units, strict=True)):
        return op.unknown("a draw has no one dimension of the rows")
    [dim] = counted
    return Rows((dim,), inner=(sizes[0][0] // op.units[0], sizes[1][0] // op.units[1]))


def _numbers(op: Op, state: Const) -> bool:
    """Return True for the numbers of all rows, in order."""
    return is_arange(state, (0,)) if len(op.shape(len(op.operands) - 1)) == 1 else False


PRODUCTS: dict[str, Rule] = {
    **dict.fromkeys(("random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split"), draw),
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), windows),
    **dict.fromkeys(BATCHED_MATRICES | {"fft"}, matrices),
    **dict.fromkeys(("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"), attention),
    "conv_general_dilated": conv,
    "dot_general": dot_general,
}
