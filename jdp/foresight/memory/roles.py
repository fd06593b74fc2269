"""Which buffers of a train step are working copies of the weights, and which are gradients.

`working_copies` follows the weights forward: what only moves, casts or gathers them is a copy of them. `gradients`
follows the new weights and moments backward through sums, scaling and collectives, to the operations that made them
(matrix products, reductions, scatters). Both walk over buffers (`liveness.py`), so loops and views need no rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from jdp.foresight.memory.aliasing import is_fusion
from jdp.foresight.memory.liveness import ELEMENTWISE, Buffer, Liveness, Write
from jdp.foresight.program.module import Program

WEIGHTS = "state.params"
OPTIMIZER = "state.opt_state"

# Opcodes to walk through, and which of their operands to walk to.
_FIRST, _ALL = slice(0, 1), slice(None)
_MOVES: Mapping[str, slice] = {
    **dict.fromkeys(("bitcast", "convert", "copy", "pad", "reshape", "reverse", "slice", "transpose"), _FIRST),
    **dict.fromkeys(("dynamic-slice", "optimization-barrier", "reduce-precision"), _FIRST),
    "dynamic-update-slice": slice(1, 2),
    "concatenate": _ALL,
}
_SUMS: Mapping[str, slice] = {
    **_MOVES,
    **dict.fromkeys(ELEMENTWISE, _ALL),
    "dynamic-update-slice": slice(0, 2),
    "scatter": _FIRST,
    "select": slice(1, 3),
}
_GATHERS = frozenset(("all-gather", "all-to-all", "collective-permute", "collective-broadcast"))
_COLLECTIVES = _GATHERS | {"all-reduce", "reduce-scatter"}


def working_copies(live: Liveness) -> set[Buffer]:
    """Return the buffers that hold weights in another dtype, layout or sharding than at rest, whole or in part."""
    weights = {b for b in live.buffers if (b.argument or "").startswith(WEIGHTS)}
    copies = set[Buffer]()
    writes = sorted((w.time, i, b) for i, b in enumerate(live.buffers) for w in b.writes if b.home == "temporary")
    for time, _, buffer in writes:
        for write in (w for w in buffer.writes if w.time == time):
            taken = _taken(live, write, _MOVES, _GATHERS, strict=True) - {buffer}
            if taken and taken <= copies | weights:
                copies.add(buffer)
    return copies


def gradients(live: Liveness) -> set[Buffer]:
    """Return the buffers that hold gradients, sums of them, or the optimizer's updates, whole or in part."""
    summed = set[Buffer]()
    todo = [b for b in live.buffers if (b.argument or "").startswith((WEIGHTS, OPTIMIZER))]
    while todo:
        for write in todo.pop().writes:
            taken = _taken(live, write, _SUMS, _COLLECTIVES, strict=False)
            new = {b for b in taken if b.home == "temporary" and b.dims} - summed
            summed |= new
            todo += new
    return summed


def _taken(
    live: Liveness, write: Write, follow: Mapping[str, slice], collectives: frozenset[str], *, strict: bool
) -> set[Buffer]:
    """Return the buffers that one array is made from by opcodes in `follow` and `collectives` alone.

    With `strict` none, if the array is made from anything else too; without it that is left out.
    """
    step, path = write.step, write.path
    if is_fusion(step):
        numbers = _fused(live.program, step.called["calls"][0], path[1:] if step.is_start else path, follow, strict)
    elif step.kind in collectives:
        numbers = {path[-1] if len(step.operands) > 1 else 0}
    else:
        numbers = set(range(len(step.operands))[follow.get(step.kind, slice(0))])
    return {live.held(array) for number, array in live.aliases.taken(write.computation, step) if number in numbers}


def _fused(program: Program, fused: str, path: tuple[int, ...], follow: Mapping[str, slice], strict: bool) -> set[int]:
    """Return the numbers of a fusion's operands that its array at `path` is made from, as `_taken` does."""
    steps = program.by_name[fused]
    root = next(step for step in program[fused] if step.is_root)
    todo = [steps[root.operands[path[0]]] if root.opcode == "tuple" and path else root]
    seen, numbers = set[str](), set[int]()
    while todo:
        step = todo.pop()
        number = step.parameter_number
        if number is not None:
            numbers.add(number)
        elif step.opcode in follow and step.name not in seen:
            seen.add(step.name)
            todo += [steps[name] for name in step.operands[follow[step.opcode]]]
        elif step.opcode not in follow and strict:
            return set()
    return numbers
