"""The schedule of a compiled step, simulated on three lanes: when it computes and when it waits.

`timeline` walks the entry's timed operations (`operations.py`) in the order of launch. A kernel advances the compute
lane. An asynchronous start queues its collective on the communication lane, or its copy from or to host memory on the
host's, and its done makes compute wait. A synchronous operation holds both lanes. A loop's rounds are walked until two
take equally long. The model assumes that lanes do not slow each other, that the host launches in time, and that kernels
do not share data in the cache.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdp.foresight.program.module import Program
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.kernels import CostModel
from jdp.foresight.timing.operations import COMMUNICATION, COMPUTE, HOST, LANES, Schedule, TimedOp

MOST_EVENTS = 5000
_ROUNDS_SHOWN = 2  # rounds of a loop with events of their own
_STEADY = 1e-9  # relative difference below which two rounds take equally long


@dataclass(frozen=True)
class Event:
    """One operation on one lane."""

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
    matmul_seconds: float  # of all kernels that contain a matrix product or fused attention
    # all lanes, by start; a loop has its first rounds and one event for the others; at most `MOST_EVENTS`
    events: tuple[Event, ...] = field(repr=False)
    caveats: tuple[str, ...]  # possible errors of the model for this program
    attention_seconds: float = 0.0  # of fused attention
    host_seconds: float = 0.0
    host_wait_seconds: float = 0.0  # compute waits for copies from and to host memory
    # seconds of computing by kind of work (`_part`), the costliest first
    parts: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    error: float | None = None  # the chip's `time_error`, relative to these seconds; None if unknown

    @property
    def exposed_fraction(self) -> float:
        """Share of the communication that overlaps with no computation; 0 if nothing is sent."""
        return min(self.exposed_seconds / self.communication_seconds, 1.0) if self.communication_seconds else 0.0


def timeline(program: Program, target: Target, model: CostModel | None = None) -> Timeline:
    """Simulate one execution of a compiled step."""
    schedule = Schedule(program, target, model)
    busy, parts, flops = schedule.busy(program.entry), Counter[str](), 0
    for op, times in schedule.executed(program.entry):
        if op.kind == "kernel":
            parts[_part(op)] += op.seconds * times  # pyright: ignore[reportArgumentType]
            flops += op.cost.flops * times
    walk = _Walk(schedule)
    walk.computation(program.entry)
    walk.wait(HOST, walk.free[HOST])  # for the last copies
    step, caveats, events = max(walk.free.values()), list(schedule.caveats), walk.events
    if len(events) > MOST_EVENTS:
        events = sorted(events, key=lambda event: event.seconds)[-MOST_EVENTS:]
        caveats.append(f"only the {MOST_EVENTS} longest events are shown")
    return Timeline(
        step_seconds=step,
        compute_seconds=busy[COMPUTE],
        communication_seconds=busy[COMMUNICATION],
        exposed_seconds=max(0.0, step - busy[COMPUTE] - walk.host_wait),
        flops=flops,
        matmul_seconds=parts[PRODUCTS] + parts[ATTENTION],
        events=tuple(sorted(events, key=lambda event: event.start)),
        caveats=tuple(caveats),
        attention_seconds=parts[ATTENTION],
        host_seconds=busy[HOST],
        host_wait_seconds=walk.host_wait,
        parts=dict(parts.most_common()),
        error=None if model is not None or target.chip is None else target.chip.time_error,
    )


class _Walk:
    """The state of the simulation."""

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
                case "call":
                    for inner in op.inner:
                        self.computation(inner)
                case _:
                    lane = LANES[op.kind]
                    begin = max(self.free[COMPUTE], self.free[lane])
                    self._record(op, lane, begin, op.seconds)
                    self.free[lane] = begin + op.seconds
                    if op.kind.endswith("start"):
                        pending[op.step.name] = (lane, self.free[lane])
                    else:
                        self.wait(lane, self.free[lane])

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
