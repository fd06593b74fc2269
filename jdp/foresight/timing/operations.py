"""A compiled step as timed operations: each kernel, collective, loop and call of every computation, with its seconds.

`Schedule(program, target)` reads a computation once, on demand. `kernels.py` times kernels with the chip's published
rates, `collective_cost` a group of GPUs by NCCL's model (`base/link_times.py`); the slowest group's time counts. The
schedule's `caveats` list the gaps of the text and of the model.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jdp.base.chips import Chip, Gpu
from jdp.base.errors import UserError
from jdp.base.link_times import RINGS, CollectiveCost, Group, group_cost
from jdp.foresight.program.collectives import KINDS, collective_of, overlaps
from jdp.foresight.program.module import Instruction, Program, is_host_copy
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.kernels import CostModel, KernelCost, cost, seconds, unknown_work


class TimedOp(NamedTuple):
    """One instruction, timed."""

    # "kernel", "start", "done", "sync" (a synchronous collective), "host start" and "host sync" (a copy from or to host
    # memory), "loop", "call" or "branch"
    kind: str
    step: Instruction  # the instruction
    seconds: float = 0.0  # on its lane
    bytes: float = 0.0  # memory traffic of a kernel, payload of a collective or copy
    cost: KernelCost = KernelCost()  # of a kernel
    inner: tuple[str, ...] = ()  # computations that it runs
    trips: int = 1  # rounds of a loop


COMPUTE, COMMUNICATION, HOST = "compute", "communication", "host"
LANES = {"kernel": COMPUTE, "start": COMMUNICATION, "sync": COMMUNICATION, "host start": HOST, "host sync": HOST}
"""Kind of operation -> its lane."""


class Schedule:
    """The operations of `program`, timed for `target`; `caveats` grow as computations are read."""

    def __init__(self, program: Program, target: Target, model: CostModel | None = None) -> None:
        if (chip := target.chip) is None:
            raise UserError(
                f"a timeline needs a device with published rates; given {target}: choose a GPU or TPU target"
            )
        self.program, self.target = program, target
        self._chip, lanes = chip, chip.lanes if isinstance(chip, Gpu) else 128
        # 16 exponentials a clock and core: compute capabilities 8.0, 9.0 and 10.0 (`CostModel.special_function_cost`).
        fitted = CostModel(matmul_efficiency=chip.matmul_efficiency, special_function_cost=lanes / 16)
        self._model = model or fitted
        self._host_rate = None if chip.host_bandwidth is None else chip.host_bandwidth * chip.host_efficiency
        # in order, each once
        first = f"times are simulated from published peaks and fitted efficiencies: {chip.compared_with}"
        self.caveats: dict[str, None] = {first: None}
        self._operations: dict[str, tuple[TimedOp, ...]] = {}

    def operations(self, computation: str) -> tuple[TimedOp, ...]:
        """Return a computation's operations that take time, in schedule order."""
        if computation not in self._operations:
            timed = (self._timed(step, computation) for step in self.program[computation])
            self._operations[computation] = tuple(op for op in timed if op is not None)
        return self._operations[computation]

    def _timed(self, step: Instruction, computation: str) -> TimedOp | None:
        if step.opcode.endswith("-done"):
            return TimedOp("done", step)
        if collectives := tuple(self._collectives(step)):
            duration, payload = (sum(column) for column in zip(*collectives, strict=True))
            return TimedOp("start" if overlaps(step) else "sync", step, duration, payload)
        if step.kind == "while":
            return self._loop(step)
        if step.kind == "conditional":
            self._warn("a conditional counts its longest branch", step)
            return TimedOp("branch", step, inner=step.callees)
        if step.kind == "call":
            return TimedOp("call", step, inner=step.callees)
        copies = is_host_copy(step, computation, self.program)
        if copies and (rate := self._host_rate) is not None:
            moved = cost(step, computation, self.program).bytes / 2  # each byte is read and written
            return TimedOp("host start" if step.is_start else "host sync", step, moved / rate, moved)
        if copies or step.kind in ("send", "recv", "infeed", "outfeed"):
            self._warn("transfers to or from the host are timed as if they stayed on the device", step)
        if (target := unknown_work(step)) is not None:
            self._warn(f"the work inside {target} is unknown: timed by its bytes alone", step)
        work = cost(step, computation, self.program)
        duration = seconds(work, self._chip, self._model)
        return TimedOp("kernel", step, duration, work.bytes, work) if work.launches else None

    def _collectives(self, step: Instruction) -> Iterator[tuple[float, float]]:
        if step.kind in KINDS:
            c = collective_of(step, self.program)
            payload = c.payload_bytes if c.group_size > 1 else 0
            yield collective_cost(c.kind, payload, c.groups, self.target).seconds if payload else 0.0, payload
        elif step.kind in ("fusion", "async", "custom-call"):
            for name in step.callees:
                for inner in self.program[name]:
                    yield from self._collectives(inner)

    def _loop(self, step: Instruction) -> TimedOp:
        (body,), (condition,) = step.called["body"], step.called["condition"]
        if step.trip_count is not None:
            return TimedOp("loop", step, inner=(body,), trips=step.trip_count)
        self._warn("a loop of unknown length is counted once", step)
        return TimedOp("loop", step, inner=(condition, body))

    def _warn(self, caveat: str, step: Instruction) -> None:
        line = self.program.source_line(step)
        self.caveats[f"{caveat} ({line})" if line else caveat] = None

    def executed(self, computation: str, times: int = 1) -> Iterator[tuple[TimedOp, int]]:
        """Yield the operations of `times` executions, and how often each runs; conditionals run the longest branch."""
        for op in self.operations(computation):
            if op.kind not in ("loop", "call", "branch"):
                yield op, times
                continue
            for name in (self.longest_branch(op),) if op.kind == "branch" else op.inner:
                yield from self.executed(name, times * op.trips)

    def busy(self, computation: str) -> Counter[str]:
        """Return lane -> busy seconds of one execution, without overlap."""
        lanes = Counter[str]()
        for op, times in self.executed(computation):
            lanes[LANES.get(op.kind, "")] += op.seconds * times  # pyright: ignore[reportArgumentType]
        return lanes

    def longest_branch(self, op: TimedOp) -> str:
        return max(op.inner, key=lambda name: self.busy(name)[COMPUTE] + self.busy(name)[COMMUNICATION])


Groups = tuple[tuple[int, ...], ...]
# "How to Scale Your Model" (jax-ml/scaling-book), "A note on ICI latency": about a microsecond a hop between chips.
_TORUS_HOP = 1e-6


def collective_cost(kind: str, payload_bytes: float, groups: Groups, target: Target) -> CollectiveCost:
    if kind not in KINDS:
        raise UserError(f"the cost of a collective is known for {', '.join(KINDS)}; given {kind!r}: name one of these")
    if target.chip is None:
        raise UserError(f"a collective is timed by published link rates; given {target}: choose a GPU or TPU target")
    chip = target.chip

    def cost(group: Group) -> CollectiveCost:
        if isinstance(chip, Gpu):
            return group_cost(kind, payload_bytes, group, chip)
        return _torus(kind, payload_bytes, group, chip, target.shape)

    costs = map(cost, _grouped(groups, target.per_host, len(target.devices)))
    return max(costs, key=lambda cost: cost.seconds, default=CollectiveCost(0.0, 0.0, "none"))


@functools.lru_cache(maxsize=256)
def _grouped(groups: Groups, per_host: int, devices: int) -> tuple[Group, ...]:
    """Return the distinct groups by members and hosts, smallest first, without groups of one device."""
    distinct = set[Group]()
    for group in groups:
        if not all(0 <= member < devices for member in group):
            raise UserError(
                f"a program's groups must be within the target's {devices} devices; given device {max(group)}: use the "
                "target that the program was compiled for"
            )
        distinct.add(Group.of(member // per_host for member in set(group)))  # devices are ordered host by host
    return tuple(sorted(group for group in distinct if group.members > 1))


def _torus(kind: str, payload: float, group: Group, chip: Chip, shape: str) -> CollectiveCost:
    """Return the optimistic time of rings along all axes of a TPU slice's torus, in both directions."""
    n = group.members
    rounds = RINGS.get(kind, 1)
    wire = payload if kind in ("collective-permute", "collective-broadcast") else rounds * payload * (n - 1) / n
    hops = rounds * sum(max(int(axis) // 2, 1) for axis in shape.split("x") if axis != "1")
    return CollectiveCost(hops * _TORUS_HOP, wire / (chip.link_bandwidth * chip.link_efficiency), "torus")
