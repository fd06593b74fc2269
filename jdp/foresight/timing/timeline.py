"""The schedule of a compiled step, simulated on three lanes: when it computes and when it waits.

`Schedule` reads a computation once, on demand: `kernels.py` times kernels with the chip's published rates,
`collective_cost` a group of GPUs by NCCL's model (`base/link_times.py`); the slowest group's time counts.

`timeline` walks the entry's timed operations in the order of launch. A kernel advances the compute lane. An
asynchronous start queues its collective on the communication lane, or its copy from or to host memory on the host's,
and its done makes compute wait. A synchronous operation holds both lanes. A loop's rounds are walked until two take
equally long. The model assumes that lanes do not slow each other, that the host launches in time, and that kernels do
not share data in the cache.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jdp.base.link_times import CollectiveCost, Group, group_cost
from jdp.foresight.program.collectives import KINDS, collective_of, overlaps
from jdp.foresight.program.module import Instruction, Program, is_host_copy
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.kernels import CostModel, KernelCost, cost, seconds, unknown_work

_ROUNDS_SHOWN = 2  # rounds of a loop with events of their own
_STEADY = 1e-9  # relative difference below which two rounds take equally long


@dataclass(frozen=True)
class Event:
    name: str  # the instruction
    lane: str  # "compute", "communication" or "host"
    start: float  # since the step began
    seconds: float  # busy time of the lane
    what: str  # jax's path to the operation, or the kind of instruction if the text lacks it
    source: str | None = None  # "file:line" that wrote it
    times: int = 1  # rounds of a loop that it represents
    bytes: float = 0.0  # memory traffic of a kernel, payload of a collective


@dataclass(frozen=True)
class Timeline:
    """A simulated step, per device."""

    step_seconds: float  # from the start of its first kernel to the end of its last
    compute_seconds: float  # busy time of the compute lane
    communication_seconds: float  # busy time of the communication lane
    exposed_seconds: float  # communication without computation: compute waits
    flops: float  # of matrix products, convolutions and fused attention, with recomputation
    # all lanes, by start; a loop has its first rounds and one event for the others
    events: tuple[Event, ...] = field(repr=False)
    caveats: tuple[str, ...]  # possible errors of the model for this program
    host_seconds: float = 0.0
    host_wait_seconds: float = 0.0  # compute waits for copies from and to host memory
    # seconds of computing by kind of work (`_part`), the costliest first
    parts: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    error: float | None = None  # the chip's `time_error`, relative to these seconds; None if unknown

    @property
    def exposed_fraction(self) -> float:
        """Share of the communication that overlaps with no computation; 0 if nothing is sent."""
        return min(self.exposed_seconds / self.communication_seconds, 1.0) if self.communication_seconds else 0.0


class TimedOp(NamedTuple):
    kind: str  # "run", "start" and "done" of an asynchronous operation, "loop" (also a call), "branch"
    step: Instruction
    lane: str = ""  # of a run or a start
    seconds: float = 0.0  # on its lane
    bytes: float = 0.0  # memory traffic of a kernel, payload of a collective or copy
    cost: KernelCost = KernelCost()  # of a kernel
    inner: tuple[str, ...] = ()  # computations that it runs
    trips: int = 1  # rounds of a loop


COMPUTE, COMMUNICATION, HOST = "compute", "communication", "host"


class Schedule:
    """The operations of `program`, timed for `target`, whose chip has published rates.

    `caveats` list the gaps of the text and of the model, and grow as computations are read.
    """

    def __init__(self, program: Program, target: Target, model: CostModel | None = None) -> None:
        assert target.chip is not None
        self.program, self.target, self._chip = program, target, target.chip
        lanes = self._chip.lanes
        # 16 exponentials a clock and core: compute capabilities 8.0, 9.0 and 10.0 (`CostModel.special_function_cost`).
        fitted = CostModel(matmul_efficiency=self._chip.matmul_efficiency, special_function_cost=lanes / 16)
        self._model = model or fitted
        # in order, each once
        first = f"times are simulated from published peaks and fitted efficiencies: {self._chip.compared_with}"
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
            return TimedOp("start" if overlaps(step) else "run", step, COMMUNICATION, duration, payload)
        if step.kind == "while" and step.trip_count is not None:
            return TimedOp("loop", step, inner=step.called["body"], trips=step.trip_count)
        if step.kind == "while":
            self._warn("a loop of unknown length is counted once", step)
            return TimedOp("loop", step, inner=(*step.called["condition"], *step.called["body"]))
        if step.kind == "conditional":
            self._warn("a conditional counts its longest branch", step)
            return TimedOp("branch", step, inner=step.callees)
        if step.kind == "call":
            return TimedOp("loop", step, inner=step.callees)
        copies = is_host_copy(step, computation, self.program)
        if copies and self._chip.host_bandwidth is not None:
            moved = cost(step, computation, self.program).bytes / 2  # each byte is read and written
            rate = self._chip.host_bandwidth * self._chip.host_efficiency
            return TimedOp("start" if step.is_start else "run", step, HOST, moved / rate, moved)
        if copies or step.kind in ("send", "recv", "infeed", "outfeed"):
            self._warn("transfers to or from the host are timed as if they stayed on the device", step)
        if (target := unknown_work(step)) is not None:
            self._warn(f"the work inside {target} is unknown: timed by its bytes alone", step)
        work = cost(step, computation, self.program)
        duration = seconds(work, self._chip, self._model)
        return TimedOp("run", step, COMPUTE, duration, work.bytes, work) if work.launches else None

    def _collectives(self, step: Instruction) -> Iterator[tuple[float, float]]:
        """Yield (seconds, payload bytes) of an instruction's collectives."""
        if step.kind in KINDS:
            c = collective_of(step, self.program)
            payload = c.payload_bytes if c.group_size > 1 else 0
            yield collective_cost(c.kind, payload, c.groups, self.target).seconds if payload else 0.0, payload
        elif step.kind in ("fusion", "async", "custom-call"):
            for name in step.callees:
                for inner in self.program[name]:
                    yield from self._collectives(inner)

    def _warn(self, caveat: str, step: Instruction) -> None:
        line = self.program.source_line(step)
        self.caveats[f"{caveat} ({line})" if line else caveat] = None

    def executed(self, computation: str, times: int = 1) -> Iterator[tuple[TimedOp, int]]:
        """Yield the operations of `times` executions, and how often each runs; conditionals run the longest branch."""
        for op in self.operations(computation):
            if op.kind not in ("loop", "branch"):
                yield op, times
                continue
            for name in (self.longest_branch(op),) if op.kind == "branch" else op.inner:
                yield from self.executed(name, times * op.trips)

    def busy(self, computation: str) -> Counter[str]:
        """Return lane -> busy seconds of one execution, without overlap."""
        lanes = Counter[str]()
        for op, times in self.executed(computation):
            lanes[op.lane] += op.seconds * times  # pyright: ignore[reportArgumentType]
        return lanes

    def longest_branch(self, op: TimedOp) -> str:
        return max(op.inner, key=lambda name: self.busy(name)[COMPUTE] + self.busy(name)[COMMUNICATION])


Groups = tuple[tuple[int, ...], ...]


def collective_cost(kind: str, payload_bytes: float, groups: Groups, target: Target) -> CollectiveCost:
    """Return the cost of the slowest of a collective's groups, on a target with published link rates."""
    chip = target.chip
    assert chip is not None
    costs = (group_cost(kind, payload_bytes, group, chip) for group in _grouped(groups, target.per_host))
    return max(costs, key=lambda cost: cost.seconds, default=CollectiveCost(0.0, 0.0, "none"))


@functools.lru_cache(maxsize=256)
def _grouped(groups: Groups, per_host: int) -> tuple[Group, ...]:
    """Return the distinct groups by members and hosts, smallest first, without groups of one device."""
    # devices are ordered host by host
    distinct = {Group.of(member // per_host for member in set(group)) for group in groups}
    return tuple(sorted(group for group in distinct if group.members > 1))


def timeline(program: Program, target: Target, model: CostModel | None = None) -> Timeline:
    """Simulate one execution of a compiled step."""
    schedule = Schedule(program, target, model)
    busy, parts, flops = schedule.busy(program.entry), Counter[str](), 0
    for op, times in schedule.executed(program.entry):
        if op.lane == COMPUTE:
            parts[_part(op)] += op.seconds * times  # pyright: ignore[reportArgumentType]
            flops += op.cost.flops * times
    walk = _Walk(schedule)
    walk.computation(program.entry)
    walk.wait(HOST, walk.free[HOST])  # for the last copies
    step = max(walk.free.values())
    return Timeline(
        step_seconds=step,
        compute_seconds=busy[COMPUTE],
        communication_seconds=busy[COMMUNICATION],
        exposed_seconds=max(0.0, step - busy[COMPUTE] - walk.host_wait),
        flops=flops,
        events=tuple(sorted(walk.events, key=lambda event: event.start)),
        caveats=tuple(schedule.caveats),
        host_seconds=busy[HOST],
        host_wait_seconds=walk.host_wait,
        parts=dict(parts.most_common()),
        error=None if model is not None or target.chip is None else target.chip.time_error,
    )


class _Walk:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.free: dict[str, float] = {COMPUTE: 0.0, COMMUNICATION: 0.0, HOST: 0.0}  # seconds at which lanes are free
        self.host_wait = 0.0  # seconds that compute waited for the host's lane
        self.events = list[Event]()
        self.recording = True  # operations become events

    def computation(self, name: str) -> None:
        pending = dict[str, tuple[str, float]]()  # start of an asynchronous operation -> its lane, its end in seconds
        for op in self.schedule.operations(name):
            match op.kind:
                case "done":
                    self.wait(*pending.pop(op.step.operands[0], (COMMUNICATION, 0.0)))
                case "loop":
                    self._loop(op)
                case "branch":
                    self.computation(self.schedule.longest_branch(op))
                case _:
                    begin = max(self.free[COMPUTE], self.free[op.lane])
                    self._record(op, op.lane, begin, op.seconds)
                    self.free[op.lane] = begin + op.seconds
                    if op.kind == "start":
                        pending[op.step.name] = (op.lane, self.free[op.lane])
                    else:
                        self.wait(op.lane, self.free[op.lane])

    def wait(self, lane: str, until: float) -> None:
        """Make compute wait for an operation of `lane` that ends at `until`."""
        if lane == HOST:
            self.host_wait += max(0.0, until - self.free[COMPUTE])
        self.free[COMPUTE] = max(self.free[COMPUTE], until)

    def _loop(self, op: TimedOp) -> None:
        previous, outer = None, self.recording
        for i in range(op.trips):
            if i == _ROUNDS_SHOWN:
                self._record_remaining_rounds(op)
                self.recording = False
            begin, waited, lag = self.free[COMPUTE], self.host_wait, self._lag()
            for inner in op.inner:
                self.computation(inner)
            advance = self.free[COMPUTE] - begin
            equal = _STEADY * advance
            lag_change = max(abs(now - before) for now, before in zip(self._lag(), lag, strict=True))
            if previous is not None and abs(advance - previous) <= equal and lag_change <= equal:
                remaining = op.trips - 1 - i
                if i == _ROUNDS_SHOWN - 1 and remaining:
                    self._record_remaining_rounds(op)
                self.free = {lane: seconds + remaining * advance for lane, seconds in self.free.items()}
                self.host_wait += remaining * (self.host_wait - waited)
                break
            previous = advance
        self.recording = outer

    def _lag(self) -> list[float]:
        return [max(0.0, seconds - self.free[COMPUTE]) for seconds in self.free.values()]

    def _record(self, op: TimedOp, lane: str, start: float, seconds: float, rounds: int = 0) -> None:
        """Add an event for an operation, or for the remaining `rounds` of a loop."""
        if self.recording and seconds:
            what = (op.step.op_name or op.step.kind) + (f": {rounds} more rounds" if rounds else "")
            source = self.schedule.program.source_line(op.step)
            self.events.append(Event(op.step.name, lane, start, seconds, what, source, rounds or 1, op.bytes))

    def _record_remaining_rounds(self, op: TimedOp) -> None:
        if self.recording:
            rounds = op.trips - _ROUNDS_SHOWN
            busy = sum((self.schedule.busy(name) for name in op.inner), Counter[str]())
            for lane, free in self.free.items():
                self._record(op, lane, max(self.free[COMPUTE], free), rounds * busy[lane], rounds)


ATTENTION, PRODUCTS, COPIES, ELEMENTWISE = "attention", "matrix products", "copies", "element-wise"
_COPIES = ("copy", "dynamic_slice", "dynamic_update_slice", "transpose", "squeeze", "reshape", "broadcast_in_dim")


def _part(op: TimedOp) -> str:
    if op.cost.flops:
        return ATTENTION if op.cost.attention else PRODUCTS
    name, operation = op.step.op_name, (op.step.op_name or op.step.kind).rpartition("/")[2]
    is_copy = operation in _COPIES or (not name and re.search("copy|transpose|slice", op.step.name))
    return COPIES if is_copy else ELEMENTWISE
