"""Which buffers a scheduled program holds at each moment, and where they peak.

`Liveness(program)` repeats what XLA's buffer assignment does before it packs a heap:
1. arrays that share memory are one `Buffer` (`aliasing.py`);
2. a buffer's writes and reads, loop bodies once, give the spans of time in which it is held;
3. a result is written into an operand that dies there, where element i depends on element i only.

The rules are those of openxla/xla: hlo/utils/hlo_live_range.cc (2) and service/heap_simulator/heap_simulator.cc (3).
What this leaves out is fragmentation: the heap may need more than the most that is live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from jdp.foresight.memory.aliasing import Aliases, Array, Path, inside, is_fusion, is_handed_on
from jdp.foresight.program.module import Instruction, Program, array_bytes


@dataclass(frozen=True)
class Write:
    """An instruction writes an array, at `time`; `path` is the array's in its result."""

    time: int
    computation: str
    step: Instruction
    path: Path


@dataclass(eq=False)
class Buffer:
    """Memory that one or more arrays share."""

    home: str = "temporary"  # "argument", "output" (a result in memory of its own), "constant", or "temporary"
    bytes: int = 0  # of its largest array, as dtype and dims are
    dtype: str = ""
    dims: tuple[int, ...] = ()
    writes: list[Write] = field(default_factory=list[Write], repr=False)  # what writes it, in time order
    # (time, instruction), in time order
    reads: list[tuple[int, Instruction]] = field(default_factory=list[tuple[int, Instruction]], repr=False)
    # (first, last) times in which it is held, both ends included
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    on_host: bool = False  # whether it is in host memory
    argument: str | None = None  # jax's name of the entry's parameter, such as "state.params['w']"


class Liveness:
    """Buffers of a scheduled program; times are positions in its `schedule` (`Aliases`)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.aliases = Aliases(program)
        self.schedule = self.aliases.schedule
        self._buffers: dict[Array, Buffer] = {}
        ends = {computation: time for time, (computation, _) in enumerate(self.schedule)}
        for time, (computation, step) in enumerate(self.schedule):
            self._write(time, computation, step)
            self._read(time, computation, step)
            # What leaves a loop's body or a branch is needed until its end, by the next round or by what follows.
            for called in step.called.get("body", ()) or (inside(step) if step.opcode == "conditional" else ()):
                self._leave(called, ends[called])
        for buffer in self._leave(program.entry, len(self.schedule) - 1):
            buffer.home = "output" if buffer.home == "temporary" else buffer.home
        self.buffers = list(self._buffers.values())
        for buffer in self.buffers:
            buffer.spans = _spans(buffer)

    def held(self, array: Array) -> Buffer:
        """Return the buffer of an array."""
        return self._buffers[self.aliases.of(array)]

    @cached_property
    def temporaries(self) -> list[Buffer]:
        """Buffers on the device that are no arguments, results or constants, and are not written into an operand."""
        vanished = self._reuse()
        return [b for b in self.buffers if b.home == "temporary" and b not in vanished and not b.on_host]

    @cached_property
    def peak(self) -> tuple[int, list[Buffer]]:
        """The time at which temporaries hold most, and those held then."""
        time, _ = self.most(self.temporaries)
        return time, [b for b in self.temporaries if any(first <= time <= last for first, last in b.spans)]

    def most(self, buffers: Iterable[Buffer]) -> tuple[int, int]:
        """Return (time, bytes): when these buffers hold most, and how much."""
        change = [0] * (len(self.schedule) + 1)
        for buffer in buffers:
            for first, last in buffer.spans:
                change[first] += buffer.bytes
                change[last + 1] -= buffer.bytes
        totals = [*accumulate(change)]
        time = max(range(len(self.schedule)), key=totals.__getitem__)
        return time, totals[time]

    def _write(self, time: int, computation: str, step: Instruction) -> None:
        on_host = self.aliases.on_host(computation, step.name)
        for path, (dtype, dims) in self.aliases.arrays(computation, step.name).items():
            buffer = self._buffers.setdefault(self.aliases.of((computation, step.name, path)), Buffer())
            size = array_bytes(dtype, dims)
            buffer.on_host |= path in on_host
            if size >= buffer.bytes:
                buffer.bytes, buffer.dtype, buffer.dims = size, dtype, dims
            if step.opcode == "parameter" and computation == self.program.entry:
                buffer.home, buffer.argument = "argument", step.op_name
            elif step.opcode == "constant":
                buffer.home = "constant"
            if step.opcode not in _VIEWS and not step.opcode.endswith("-done") and not is_handed_on(step, path):
                buffer.writes.append(Write(time, computation, step, path))

    def _read(self, time: int, computation: str, step: Instruction) -> None:
        """Record the reads of an instruction, without views, which read nothing, and loops, whose bodies do."""
        if step.opcode not in _VIEWS or step.opcode == "conditional":
            for _, array in self.aliases.taken(computation, step):
                self.held(array).reads.append((time, step))

    def _leave(self, computation: str, time: int) -> list[Buffer]:
        """Record that the results of a computation are read where it ends; return their buffers."""
        _, name, _ = self.aliases.result(computation)
        results = [self.held((computation, name, path)) for path in self.aliases.arrays(computation, name)]
        for buffer in results:
            buffer.reads.append((time, self.program.by_name[computation][name]))
        return results

    def _reuse(self) -> set[Buffer]:
        """Extend the spans of operands that a result is written into; return the results' buffers, which vanish."""
        written_into: dict[Buffer, Buffer] = {}
        for time, (computation, step) in enumerate(self.schedule):
            numbers = _elementwise(self.program, step)
            for path in self.aliases.arrays(computation, step.name) if numbers else ():
                result = self.held((computation, step.name, path))
                for operand in self._dying(time, computation, step, numbers) if _is_plain(result) else ():
                    buffer = written_into.get(operand, operand)
                    if operand.bytes == result.bytes and buffer.spans[-1][1] == time:
                        buffer.spans = [(buffer.spans[0][0], result.spans[-1][1])]
                        written_into[result] = buffer
                        break
        return set(written_into)

    def _dying(self, time: int, computation: str, step: Instruction, numbers: set[int]) -> Iterator[Buffer]:
        """Yield the buffers whose last use is this instruction, among the operands of these numbers."""
        for number, array in self.aliases.taken(computation, step):
            buffer = self.held(array)
            if number not in numbers or not _is_plain(buffer) or buffer.spans[-1][1] != time:
                continue
            if buffer.writes[0].step.name == array[1]:  # XLA looks no further than the operand itself
                yield buffer


_VIEWS = frozenset(
    """
    parameter constant bitcast optimization-barrier get-tuple-element tuple while conditional call
    """.split()  # noqa: SIM905
)

ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare convert copy cosine divide erf exponential exponential-minus-one floor
    is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power remainder round-nearest-afz
    round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan
    tanh xor
    """.split()  # noqa: SIM905
)


def _spans(buffer: Buffer) -> list[tuple[int, int]]:
    """Return (first, last) times of each write until the last read before the next write."""
    if not buffer.writes:
        return []
    events = sorted([(write.time, True) for write in buffer.writes] + [(time, False) for time, _ in buffer.reads])
    spans = list[tuple[int, int]]()
    for time, is_write in events:
        if is_write and (not spans or spans[-1][1] != time):
            spans.append((time, time))
        elif spans:
            spans[-1] = (spans[-1][0], time)
    return spans


def _is_plain(buffer: Buffer) -> bool:
    """Return True if a buffer is a temporary that is written once."""
    return buffer.home == "temporary" and len(buffer.writes) == 1


def _elementwise(program: Program, step: Instruction) -> set[int]:
    """Return the numbers of the operands of which element i of the result takes element i only."""
    if step.opcode in ELEMENTWISE:
        return set(range(len(step.operands)))
    if not is_fusion(step) or "kind=kLoop" not in step.line:
        return set()
    fused = program[step.called["calls"][0]]
    mixed = set[str]()
    for other in reversed(fused):
        if other.name in mixed or other.opcode not in (*ELEMENTWISE, "tuple", "bitcast", "parameter"):
            mixed.update(other.operands)
    numbers = {step.name: step.parameter_number for step in fused}
    return {number for name, number in numbers.items() if number is not None and name not in mixed}
