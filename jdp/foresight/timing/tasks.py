"""A compiled step as tasks: each kernel, collective, loop and call of every computation, with its seconds.

`Schedule(program, target)` reads a computation once, when it is asked for: `tasks(name)` in schedule order, which is
the order of launch, and `total(name)`, what one execution adds up to, loops counted in. Kernels are timed by
`foresight.costs` with the chip's published rates, collectives by `foresight.links`; on CPUs both by rates measured here
(`foresight.cpu_rates`). What the text does not tell, or the model leaves out, is put down in `caveats`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jdp.foresight.program.collectives import KINDS, collective_of, overlaps
from jdp.foresight.program.module import Instruction, Program
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing import cpu_rates
from jdp.foresight.timing.collectives import collective_seconds
from jdp.foresight.timing.kernels import Cost, CostModel, Rates, cost, seconds, unknown_work


@dataclass(frozen=True)
class Task:
    """One instruction.

    Attributes:
        kind: "kernel", "start", "done", "sync" (a collective that nothing runs beside), "loop", "call" or "branch".
        step: the instruction.
        seconds: on its lane.
        bytes: memory traffic of a kernel, payload of a collective.
        cost: of a kernel.
        inner: the computations that it runs.
        trips: rounds of a loop.
    """

    kind: str
    step: Instruction
    seconds: float = 0.0
    bytes: float = 0.0
    cost: Cost = field(default_factory=Cost)
    inner: tuple[str, ...] = ()
    trips: int = 1


@dataclass
class Total:
    """What tasks add up to, whatever hides what; `matmuls`: seconds of a kernel with products -> how many."""

    compute: float = 0.0
    communication: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    matmuls: Counter[float] = field(default_factory=Counter[float])

    def add(self, other: Total, times: int = 1) -> None:
        self.compute += times * other.compute
        self.communication += times * other.communication
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        for each, count in other.matmuls.items():
            self.matmuls[each] += times * count


class Schedule:
    """The tasks of `program`, timed for `target`.

    Attributes:
        program: scheduled.
        caveats: where the times may be wrong; grows as computations are read.
    """

    def __init__(self, program: Program, target: Target, model: CostModel | None = None) -> None:
        self.program = program
        self._devices = _devices(target, model)
        self.caveats = dict.fromkeys(self._devices.caveats)  # in order, each once
        self._tasks: dict[str, tuple[Task, ...]] = {}
        self._totals: dict[str, Total] = {}

    def tasks(self, computation: str) -> tuple[Task, ...]:
        if computation not in self._tasks:
            steps = self.program[computation]
            self._tasks[computation] = tuple(t for step in steps if (t := self._task(step, computation)) is not None)
        return self._tasks[computation]

    def _task(self, step: Instruction, computation: str) -> Task | None:
        called = tuple(name for names in step.called.values() for name in names)
        if step.opcode.endswith("-done"):
            return Task("done", step)
        if sent := tuple(self._collectives(step)):
            duration, payload = (sum(part) for part in zip(*sent, strict=True))
            return Task("start" if overlaps(step) else "sync", step, duration, payload)
        if step.kind == "while":
            return self._loop(step)
        if step.kind == "conditional":
            self._say("of a conditional's branches the one that takes longest is counted", step)
            return Task("branch", step, inner=called)
        if step.kind == "call":
            return Task("call", step, inner=called)
        # S(5) is the host's memory: openxla/xla, xla/layout.h, Layout::kHostMemorySpace.
        if step.kind in ("send", "recv", "infeed", "outfeed") or (step.kind == "copy" and "S(5)" in step.type):
            self._say("transfers to or from the host are timed as if they stayed on the device", step)
        if (target := unknown_work(step)) is not None:
            self._say(f"the work inside {target} is not known: timed by its bytes alone", step)
        work = cost(step, computation, self.program)
        duration = seconds(work, self._devices.rates, self._devices.model)
        return Task("kernel", step, duration, work.bytes, work) if work.launches else None

    def _collectives(self, step: Instruction) -> Iterator[tuple[float, float]]:
        """(seconds, payload bytes) of what an instruction sends, itself or inside a wrapper."""
        if step.kind in KINDS:
            found = collective_of(step, self.program)
            sent = found.payload_bytes if found.group_size > 1 else 0
            yield self._devices.collective(found.kind, sent, found.groups) if sent else 0.0, sent
        elif step.kind in ("fusion", "async", "custom-call"):
            for name in (name for names in step.called.values() for name in names):
                for inner in self.program[name]:
                    yield from self._collectives(inner)

    def _loop(self, step: Instruction) -> Task:
        """A loop's body; its condition too where the device does not know how often to run it."""
        (body,), (condition,) = step.called["body"], step.called["condition"]
        if step.trip_count is not None:
            return Task("loop", step, inner=(body,), trips=step.trip_count)
        self._say("a loop of unknown length is counted once", step)
        return Task("loop", step, inner=(condition, body))

    def _say(self, text: str, step: Instruction) -> None:
        place = next(iter(self.program.source_lines(step)), None)
        self.caveats[f"{text} ({place})" if place else text] = None

    def total(self, computation: str) -> Total:
        """What one execution of a computation adds up to; of a conditional, its dearest branch."""
        if computation not in self._totals:
            found = Total()
            for task in self.tasks(computation):
                self._add(task, found)
            self._totals[computation] = found
        return self._totals[computation]

    def _add(self, task: Task, found: Total) -> None:
        work = task.cost
        if task.kind == "kernel":
            matmul = Counter([task.seconds] if work.products else [])
            found.add(Total(task.seconds, 0.0, work.flops, work.bytes, work.launches, matmul))
        elif task.kind in ("start", "sync"):
            found.communication += task.seconds
        elif task.kind == "branch":
            found.add(self.total(self.dearest(task)))
        else:
            for name in task.inner:
                found.add(self.total(name), task.trips)

    def dearest(self, task: Task) -> str:
        """The branch of a conditional that keeps the lanes busy longest."""
        return max(task.inner, key=lambda name: self.total(name).compute + self.total(name).communication)


# The devices.


@dataclass(frozen=True)
class _Devices:
    rates: Rates
    model: CostModel
    collective: Callable[[str, float, tuple[tuple[int, ...], ...]], float]  # kind, payload, groups -> seconds
    caveats: tuple[str, ...]


def _devices(target: Target, model: CostModel | None) -> _Devices:
    if target.kind == "cpu":
        measured = cpu_rates.measure(target.devices)
        return _Devices(measured.rates, model or measured.model, measured.collective_seconds, (cpu_rates.CAVEAT,))
    if (chip := target.chip) is None:
        raise ValueError(f"a timeline needs the device's published rates, and none are known for {target}")
    rates = Rates(chip.matmul_flops, chip.vector_flops, chip.memory_bandwidth, getattr(chip, "cores", 1))
    return _Devices(
        rates,
        model or CostModel(),
        lambda kind, payload, groups: collective_seconds(kind, payload, groups, target),
        ("times are simulated from published peaks, with matrix products as fast as autotuned library kernels",),
    )
