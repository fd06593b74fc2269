"""When a compiled step computes and when it waits: its schedule, simulated on two lanes.

`timeline(program, target)` takes the step's tasks and their times (`foresight.schedule`) and walks the entry in the
order of launch: a kernel advances the compute lane; an asynchronous start queues its collective on the communication
lane, and its done makes compute wait for it; a synchronous collective holds both. A loop's rounds are walked until two
take equally long: the others do too.

What compute waits is exposed communication: compute + exposed = step. The lanes are taken not to slow each other, the
host to launch in time, and no kernel to find in the cache what the one before it wrote.
"""

from collections import Counter
from dataclasses import dataclass, field

from jdp.foresight.program.module import Program
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.kernels import CostModel
from jdp.foresight.timing.tasks import Schedule, Task, Total

COMPUTE, COMMUNICATION = "compute", "communication"
MOST_EVENTS = 5000
_ROUNDS_SHOWN = 2  # of a loop, one by one
_STEADY = 1e-9  # relative difference below which two rounds take equally long


@dataclass(frozen=True)
class Event:
    """A stretch of one lane.

    Attributes:
        name: the instruction.
        lane: "compute" or "communication".
        start, seconds: since the step began; how long the lane is busy.
        what: jax's path to the operation, or the kind of instruction where the text does not tell.
        source: "file:line" that wrote it.
        times: how many rounds of a loop it stands for.
        bytes: memory traffic of a kernel, payload of a collective.
    """

    name: str
    lane: str
    start: float
    seconds: float
    what: str
    source: str | None = None
    times: int = 1
    bytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step as simulated; everything per device.

    Attributes:
        step_seconds: from its first kernel to the end of its last.
        compute_seconds, communication_seconds: how long either lane is busy.
        exposed_seconds: communication that nothing hides: compute waits.
        flops: executed, of matrix products and convolutions; recomputation included.
        bytes: memory traffic of all kernels.
        matmul_seconds: of all kernels that hold a matrix product.
        median_matmul_seconds: half of `matmul_seconds` is spent in kernels that take at most this long.
        kernels: launches.
        events: both lanes, by start; loops by their first rounds and one event for the others, at most `MOST_EVENTS`.
        caveats: where the model may be wrong about this program.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    flops: float
    bytes: float
    matmul_seconds: float
    median_matmul_seconds: float
    kernels: int
    events: tuple[Event, ...] = field(repr=False)
    caveats: tuple[str, ...]

    @property
    def exposed_fraction(self) -> float:
        """Share of the communication that nothing hides; 0 when nothing is sent."""
        return min(self.exposed_seconds / self.communication_seconds, 1.0) if self.communication_seconds else 0.0


def timeline(program: Program, target: Target, model: CostModel | None = None) -> Timeline:
    """Simulate one execution of a compiled step.

    Args:
        program: scheduled, as `.compile().as_text()` gives it.
        target: the devices that it was compiled for. A chip with published rates is timed by them; for CPUs the rates
            are measured here, once in a process.
        model: other constants than `CostModel`'s.

    Raises:
        ValueError: the target's rates are not known, or the text has something that `foresight.hlo` cannot read.
    """
    schedule = Schedule(program, target, model)
    total = schedule.total(program.entry)
    walk = _Walk(schedule)
    walk.computation(program.entry)
    step, caveats, events = max(walk.compute, walk.lane), list(schedule.caveats), walk.events
    if len(events) > MOST_EVENTS:
        events = sorted(events, key=lambda event: event.seconds)[-MOST_EVENTS:]
        caveats.append(f"only the {MOST_EVENTS} longest events are shown")
    return Timeline(
        step_seconds=step,
        compute_seconds=total.compute,
        communication_seconds=total.communication,
        exposed_seconds=max(0.0, step - total.compute),
        flops=total.flops,
        bytes=total.bytes,
        matmul_seconds=sum(each * count for each, count in total.matmuls.items()),
        median_matmul_seconds=_median(total.matmuls),
        kernels=total.kernels,
        events=tuple(sorted(events, key=lambda event: event.start)),
        caveats=tuple(caveats),
    )


class _Walk:
    """Where the walk is.

    Attributes:
        compute, lane: when compute and communication are free again.
        events: what happened.
        recording: whether it is written down.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.compute = self.lane = 0.0
        self.events = list[Event]()
        self.recording = True

    def computation(self, name: str) -> None:
        """Execute it once."""
        pending: dict[str, float] = {}
        for task in self.schedule.tasks(name):
            match task.kind:
                case "kernel":
                    self._record(task, COMPUTE, self.compute)
                    self.compute += task.seconds
                case "start" | "sync":
                    begin = max(self.compute, self.lane)
                    self._record(task, COMMUNICATION, begin)
                    self.lane = begin + task.seconds
                    if task.kind == "start":
                        pending[task.step.name] = self.lane
                    else:
                        self.compute = self.lane
                case "done":
                    self.compute = max(self.compute, pending.pop(task.step.operands[0], 0.0))
                case "loop":
                    self._loop(task)
                case "branch":
                    self.computation(self.schedule.dearest(task))
                case _:
                    for inner in task.inner:
                        self.computation(inner)

    def _loop(self, task: Task) -> None:
        before, outer = None, self.recording
        for i in range(task.trips):
            if i == _ROUNDS_SHOWN:
                self._record_rest(task)
                self.recording = False
            compute, lag = self.compute, self._lag
            for inner in task.inner:
                self.computation(inner)
            advance = self.compute - compute
            equal = _STEADY * advance
            if before is not None and abs(advance - before) <= equal and abs(self._lag - lag) <= equal:
                rest = task.trips - 1 - i
                if i == _ROUNDS_SHOWN - 1 and rest:
                    self._record_rest(task)
                self.compute, self.lane = self.compute + rest * advance, self.lane + rest * advance
                break
            before = advance
        self.recording = outer

    @property
    def _lag(self) -> float:
        """How far communication is behind."""
        return max(0.0, self.lane - self.compute)

    def _record(self, task: Task, lane: str, start: float) -> None:
        if self.recording and task.seconds:
            what, place = self._origin(task)
            self.events.append(Event(task.step.name, lane, start, task.seconds, what, place, bytes=task.bytes))

    def _record_rest(self, task: Task) -> None:
        """One event a lane for the rounds not shown: as long as the lane is busy in them."""
        if not self.recording:
            return
        times, rest = task.trips - _ROUNDS_SHOWN, Total()
        for name in task.inner:
            rest.add(self.schedule.total(name), times)
        what, place = self._origin(task)
        what = f"{what}: {times} more rounds"
        for lane, start, busy in (
            (COMPUTE, self.compute, rest.compute),
            (COMMUNICATION, max(self.compute, self.lane), rest.communication),
        ):
            if busy:
                self.events.append(Event(task.step.name, lane, start, busy, what, place, times))

    def _origin(self, task: Task) -> tuple[str, str | None]:
        place = next(iter(self.schedule.program.source_lines(task.step)), None)
        return task.step.op_name or task.step.kind, place


def _median(durations: Counter[float]) -> float:
    """The duration that half of the time is spent at or below."""
    half, passed = sum(each * count for each, count in durations.items()) / 2, 0.0
    for each in sorted(durations):
        passed += each * durations[each]
        if passed >= half:
            return each
    return 0.0
