"""The axes of a mesh: names, rules about sizes, their product, and the divisor of a batch's rows. It needs no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jdp.base.errors import UserError
from jdp.base.toml import LONGEST, cut
from jdp.base.words import is_integer

DATA = "data"
"""The axis over which the batch is split, and ZeRO shards."""
REPLICA = "replica"
"""The axis over slow links: the batch is split over it too, and the state is replicated over it (HSDP)."""


def axis_sizes(axes: Mapping[str, int], count: int, how: str = " (on CPU: --devices {0})") -> dict[str, int]:
    """Return the sizes of a mesh of `count` devices, with its -1 filled in; `how` tells how to run on {0} devices."""
    check_axes(axes)
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: count // known if size == -1 else size for name, size in axes.items()}
    if math.prod(sizes.values()) == count:
        return sizes
    run = f"run on {known} devices"
    if -1 in axes.values():
        product, fits, run = f"{factors(axes)} (the others make {known})", "", f"{run} or a multiple of them"
    else:
        others = known // axes[DATA]
        product = equation(axes)
        fits = f"Take data={count // others}, or c" if count % others == 0 else ""
    raise UserError(
        f"The mesh must multiply to the number of devices: {product}, but there are {count} devices. "
        f"{fits or 'C'}hange an axis, or {run}{how.format(known)}."
    )


def check_axes(axes: Mapping[str, int]) -> None:
    """Check the rules for any number of devices: names, sizes, `data`, at most one -1."""
    for name, size in axes.items():
        if not name.isidentifier() or name == "devices" or len(name) > LONGEST:
            rule = "Mesh axes are named like variables, and not `devices`"
            raise UserError(f"{rule}; given {cut(repr(name))}. Rename it.")
        if not is_integer(size):
            raise UserError(f"Mesh axes are integers, as in make_mesh(data=8); given {name}={size!r}. Give an integer.")
    if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        rule = "Mesh axes are positive sizes, and one may be -1 (the rest)"
        raise UserError(f"{rule}; given {factors(axes)}. Write 1 or more, or -1 for one axis.")
    if DATA not in axes:
        raise UserError(f"A mesh needs a `data` axis; given {factors(axes)}. Add data=-1 for the remaining devices.")


def factors(sizes: Mapping[str, int]) -> str:
    """Return the factors of a mesh or a batch as text: "data=4 × model=2"."""
    return " × ".join(f"{name}={size}" for name, size in sizes.items())


def equation(sizes: Mapping[str, int]) -> str:
    """Return the factors and, if there are several, their product: "data=4 × model=2 = 8", or "data=4"."""
    product = math.prod(sizes.values())
    return f"{factors(sizes)} = {product}" if len(sizes) > 1 else factors(sizes)


@dataclass(frozen=True)
class BatchUnit:
    """The divisor of a global batch's rows, as named factors."""

    factors: Mapping[str, int]

    @property
    def rows(self) -> int:
        return math.prod(self.factors.values())

    def rule(self, rows: int, subject: str = "a batch's rows") -> str:
        """Return the rule and the number given: "a batch's rows must divide by data=4 × accumulate=3 = 12; given 9"."""
        return f"{subject} must divide by {equation(self.factors)}; given {rows}"

    def check(self, rows: int, subject: str = "a batch's rows", *, microbatches: bool = True) -> None:
        """Check a number of rows. With `microbatches` False the error says that a step may divide them further."""
        if not is_integer(rows):
            raise UserError(f"{subject} are an integer; given {rows!r}. Give a multiple of {self.rows}.")
        if rows < 1 or rows % self.rows:
            further = f" ({self._near(rows, 2)} under accumulate=2, {self._near(rows, 4)} under 4)" * (not microbatches)
            raise UserError(f"{self.rule(rows, subject)}: the nearest that fit: {self._near(rows)}{further}")

    def _near(self, rows: int, accumulate: int = 1) -> str:
        unit = self.rows * accumulate
        below = max(rows, 0) // unit * unit
        return f"{below} or {below + unit}" if below else f"{unit}"


def batch_unit(mesh: Mapping[str, int], accumulate: int = 1) -> BatchUnit:
    """Return the divisor of a global batch's rows: shards × microbatches."""
    factors = {axis: mesh[axis] for axis in (REPLICA, DATA) if axis in mesh}
    return BatchUnit(factors | ({"accumulate": accumulate} if accumulate > 1 else {}))
