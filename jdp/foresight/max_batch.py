"""The largest batch that fits, found by compiling.

Memory grows almost linearly with the rows a device holds: two compilations give the slope, and the next probe is where
the line meets the device's memory. The interval between "fits" and "does not" closes from there, halved every other
time should memory not be a line. It ends at neighbouring numbers of rows, above 64 rows within 1/64.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jdp.core.formatting import format_bytes

PROBES = 30
"""More than a search takes whose memory grows with the rows."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits.

    Attributes:
        rows: a device's rows of one microbatch; 0 when not even one fits.
        batch_size: the global batch, all devices and microbatches.
        needed: bytes a device holds with it.
        too_many: the least number of rows that was seen not to fit; `too_many_needed` its bytes.
        available: bytes that a device has.
        compilations: how many steps were compiled.
        advice: what has to be set for it, in words.
    """

    rows: int
    batch_size: int
    needed: int
    too_many: int
    too_many_needed: int
    available: int
    compilations: int
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
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


def max_batch(needs: Callable[[int], int], available: int, *, per_row: int, start: int = 1) -> MaxBatch:
    """Search.

    Args:
        needs: rows a device -> bytes it holds; compiles.
        available: bytes a device has.
        per_row: rows of the global batch for each row of a device: batch shards × microbatches.
        start: the number of rows to begin with.

    Raises:
        ValueError: memory does not grow with the rows.
    """
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
        f"No end of the batch was found: {low} rows a device need {format_bytes(seen[low])} of "
        f"{format_bytes(available)}."
    )


def _above(seen: dict[int, int], low: int, available: int) -> int:
    """Everything so far fits: follow the line through the last two probes, at most to 16 times as many rows."""
    below = max((rows for rows in seen if rows < low), default=0)
    if not below or seen[low] <= seen[below]:
        return low * 2
    slope = (seen[low] - seen[below]) / (low - below)
    return min(max(int(low + (available - seen[low]) / slope), low + 1), low * 16)


def _inside(seen: dict[int, int], low: int, high: int, available: int) -> int:
    """Between one that fits and one that does not: where their line meets `available`, every other time the middle.

    When the line lands where the last probe was, its neighbour is next: on a line it is the other side of the border.
    """
    if low not in seen or len(seen) % 2:
        return (low + high) // 2
    slope = (seen[high] - seen[low]) / (high - low)
    return min(max(int(low + (available - seen[low]) / slope), low + 1), high - 1)
