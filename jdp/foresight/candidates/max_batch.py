"""The largest batch that fits, found by compiling.

Memory grows almost linearly with the rows a device holds: two compilations give the slope, and the next probe is where
the line meets the device's memory. The interval between "fits" and "does not" closes from there, halved every other
time should memory not be a line. It ends at neighbouring numbers of rows, above 64 rows within 1/64.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from jdp.base.disk_cache import Cache
from jdp.base.formatting import format_bytes
from jdp.core.batch import batch_rows
from jdp.foresight.memory.peak import Memory, available_bytes, memory
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets.relocate import Candidate
from jdp.foresight.targets.resolve import Target

PROBES = 30
"""More than a search takes whose memory grows with the rows."""

OnProgress = Callable[[int, int | None, str], None]
"""Called with (compilations done, compilations in all or None where that is not known, what is compiled next)."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits."""

    rows: int  # a device's rows of one microbatch; 0 when not even one fits
    batch_size: int  # the global batch, all devices and microbatches
    needed: int  # bytes a device holds with it
    too_many: int  # the least number of rows that was tried and does not fit; `too_many_needed` its bytes
    too_many_needed: int
    available: int  # bytes of a device's memory that a step can have
    compilations: int  # how many steps were compiled
    advice: str = ""  # what has to be set for it, in words

    def to_json(self) -> dict[str, Any]:
        """Return the `max_batch` that `jdp plan --json` prints."""
        return asdict(self)

    def __str__(self) -> str:
        available, too_many_needed = format_bytes(self.available), format_bytes(self.too_many_needed)
        if self.rows == 0:
            return f"Not even one row a device fits: it needs {too_many_needed} of {available}."
        return (
            f"The largest batch that fits is {self.batch_size} ({self.rows} rows a device and microbatch): it needs "
            f"{format_bytes(self.needed)} of {available}; {self.too_many} rows need {too_many_needed}."
            f"{self.advice and f' It {self.advice}.'}"
        )


def largest_batch(
    candidate: Candidate, target: Target, *, cache: Cache | None = None, progress: OnProgress | None = None
) -> MaxBatch:
    """Find the largest batch of a step that fits the target's devices, by compiling."""
    assert target.memory_bytes is not None, target
    available = available_bytes(target.memory_bytes)
    step = candidate.step
    per_group = step.batch_unit.rows
    held: dict[int, Memory] = {}

    def needs(groups: int) -> int:
        if progress is not None:
            progress(0, None, f"{candidate.name} with {groups} rows a device")
        try:
            compiled = candidate.with_rows(groups * per_group).compile(target, cache)
        except CompileError:  # XLA gives up on what is far too large
            return available + 1
        held[groups] = memory(compiled, step, candidate.state)
        return held[groups].total

    found = max_batch(needs, available, per_row=per_group, start=batch_rows(candidate.batch) // per_group)
    if not found.rows:
        return found
    headroom = held[found.rows].fits(target.memory_bytes)
    return found if headroom.fraction is None else replace(found, advice=headroom.words)


def max_batch(needs: Callable[[int], int], available: int, *, per_row: int, start: int = 1) -> MaxBatch:
    """Search for the most rows a device whose bytes are at most `available`."""
    seen: dict[int, int] = {}
    low, high = 0, 0  # fits; does not (0: none seen yet)
    probe = max(start, 1)
    while len(seen) < PROBES:
        seen[probe] = needs(probe)
        if seen[probe] <= available:
            low = probe
        else:
            high = probe
        if high and high - low <= max(1, low // 64):
            return MaxBatch(low, low * per_row, seen.get(low, 0), high, seen[high], available, len(seen))
        probe = _inside(seen, low, high, available) if high else _above(seen, low, available)
    raise ValueError(
        f"The largest batch needs memory that grows with the rows; given a step of which {low} rows a device need "
        f"{format_bytes(seen[low])} of {format_bytes(available)}. Choose the batch size without --max-batch."
    )


def _above(seen: dict[int, int], low: int, available: int) -> int:
    """Return the next probe where all so far fit: on the line through the last two, at most 16 times as many rows."""
    below = max((rows for rows in seen if rows < low), default=0)
    if not below or seen[low] <= seen[below]:
        return low * 2
    slope = (seen[low] - seen[below]) / (low - below)
    return min(max(int(low + (available - seen[low]) / slope), low + 1), low * 16)


def _inside(seen: dict[int, int], low: int, high: int, available: int) -> int:
    """Return the next probe between one that fits and one that does not.

    It is where the line through both meets `available`, and every other time the middle. Where the line meets it at the
    last probe, the neighbour is next: were memory a line, that would be the other side of the border.
    """
    if low not in seen or len(seen) % 2:
        return (low + high) // 2
    slope = (seen[high] - seen[low]) / (high - low)
    return min(max(int(low + (available - seen[low]) / slope), low + 1), high - 1)
