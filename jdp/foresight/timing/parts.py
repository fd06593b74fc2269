"""What a step's computing time is spent on, in the words of a model: attention, matrix products, the loss, copies.

A kernel belongs to the first part that fits:

1. attention: a fused call, work on an array with the sequence's length twice, batches of products at the same line.
2. matrix products: those of weights, and convolutions.
3. loss: written in a module of losses (jdp's, optax' or your own).
4. copies: slices of stacked layers and what is kept for the backward pass, layouts changed.
5. optimizer: what is not differentiated: the update, clipping, gathering of state.
6. element-wise: the rest, which reads and writes memory.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from jdp.foresight.timing.operations import Schedule, TimedOp

ATTENTION, PRODUCTS, LOSS = "attention", "matrix products", "loss"
COPIES, OPTIMIZER, ELEMENTWISE = "copies", "optimizer", "element-wise"
_LENGTH = 256
"""A dimension this long that an array of four or more has twice is a sequence's length."""
_COPIES = ("copy", "dynamic_slice", "dynamic_update_slice", "transpose", "squeeze", "reshape", "broadcast_in_dim")
_LOSSES = re.compile(r"losses[^/\\]*(?:[/\\][^/\\]+)?$")
"""Of "file:line": the file or its folder is named so; the folders that a checkout is in say nothing."""


def parts(schedule: Schedule) -> dict[str, float]:
    """Return the seconds of a step's kernels by part, the costliest part first."""
    kernels = list(_kernels(schedule, schedule.program.entry, 1))
    square = {_line(schedule, op) for op, _ in kernels if not op.cost.flops and _has_length_twice(op)} - {None}
    seconds = defaultdict[str, float](float)
    for op, times in kernels:
        seconds[_part(schedule, op, _line(schedule, op) in square)] += op.seconds * times
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _kernels(schedule: Schedule, computation: str, times: int) -> Iterator[tuple[TimedOp, int]]:
    """Yield each kernel that a computation runs, and how often."""
    for op in schedule.operations(computation):
        if op.kind == "kernel":
            yield op, times
        else:
            for name in (schedule.longest_branch(op),) if op.kind == "branch" else op.inner:
                yield from _kernels(schedule, name, times * op.trips)


def _part(schedule: Schedule, op: TimedOp, beside_attention: bool) -> str:
    name, last = op.step.op_name or "", (op.step.op_name or op.step.kind).rpartition("/")[2]
    if op.cost.attention or (not op.cost.flops and _has_length_twice(op)):
        return ATTENTION
    if op.cost.flops:
        batches = beside_attention and any(product.batch > 1 for product in op.cost.products)
        return ATTENTION if batches else PRODUCTS
    if any(_LOSSES.search(line) for line in schedule.program.source_lines(op.step)[:2]):
        return LOSS
    if last in _COPIES or (not name and re.search("copy|transpose|slice", op.step.name)):
        return COPIES
    return OPTIMIZER if name and "jvp(" not in name else ELEMENTWISE


def _line(schedule: Schedule, op: TimedOp) -> str | None:
    return schedule.program.source_line(op.step)


def _has_length_twice(op: TimedOp) -> bool:
    return any(
        len(dims) > 3 and max((size for size, count in Counter(dims).items() if count > 1), default=0) >= _LENGTH
        for _, dims in op.step.shapes
    )
