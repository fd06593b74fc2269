"""The divisor of a global batch's rows. It needs no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jdp.core.sharding.axes import DATA, REPLICA, equation


@dataclass(frozen=True)
class BatchUnit:
    """The divisor of a global batch's rows, as named factors. Every rule about it is here."""

    factors: Mapping[str, int]

    @property
    def rows(self) -> int:
        """The divisor: all factors multiplied."""
        return math.prod(self.factors.values())

    def round_up(self, rows: int) -> int:
        """Return the least multiple of the divisor that is not below `rows`."""
        return -(-rows // self.rows) * self.rows

    def rule(self, rows: int, subject: str = "a batch's rows") -> str:
        """Return the rule and the number given: "a batch's rows must divide by data=4 × accumulate=3 = 12; given 9"."""
        return f"{subject} must divide by {equation(self.factors)}; given {rows}"

    def check(self, rows: int, subject: str = "a batch's rows") -> None:
        """Check a number of rows."""
        if rows < 1 or rows % self.rows:
            below = max(rows, 0) // self.rows * self.rows
            near = f"{below} or {below + self.rows}" if below else f"{self.rows}"
            raise ValueError(f"{self.rule(rows, subject)}: the nearest that fit: {near}")


def batch_unit(
    mesh: Mapping[str, int],
    accumulate: int = 1,
    group: int = 1,
    local_steps: int = 1,
    named: Mapping[str, str] = MappingProxyType({}),
) -> BatchUnit:
    """Return the divisor of a global batch's rows: shards × steps × microbatches × group."""
    factors = {named.get(axis, axis): mesh[axis] for axis in (REPLICA, DATA) if axis in mesh}
    counts = {"local_steps": local_steps, "accumulate": accumulate, "group": group}
    return BatchUnit(factors | {name: count for name, count in counts.items() if count > 1})
