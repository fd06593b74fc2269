"""The result of a proof: a table, the first difference in words, the object for `--json`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jdp.base.formatting import finite_or_none
from jdp.prove.bounds import Closest
from jdp.prove.settings import Skip


@dataclass(frozen=True)
class Run:
    """One run, compared with the reference.

    Attributes:
        name: such as "zero3 manual 8 devices K=2".
        equal: True if every loss and every leaf stayed within its bound.
        max_difference: absolute, of the element that came closest to its bound, or went farthest beyond it at the first
            step that differs.
        bound: the largest difference of that element that rounding explains.
        closest: that element: step, leaf, ratio.
    """

    name: str
    equal: bool
    max_difference: float
    bound: float
    closest: Closest


@dataclass(frozen=True)
class Difference:
    """Where a run first differs from the reference.

    Attributes:
        run: its name.
        step: after how many optimizer steps; 0: before the first.
        leaf: "weight", "loss" or "grad_norm" of that step, else the path of the leaf farthest beyond its bound.
        difference: absolute, of the element farthest beyond its bound.
        bound: the largest difference of that element that rounding explains.
        words: this in a sentence, and what it points to.
    """

    run: str
    step: int
    leaf: str
    difference: float
    bound: float
    words: str


@dataclass(frozen=True)
class Proof:
    """The result of `prove`; `str()` is a table.

    Attributes:
        equal: True if all runs are equal to the reference.
        runs: in the order they were made; if a resumed one differs, the settings it consists of are among them.
        first_difference: of the differing run with the fewest changes from one device, resumed ones last
            (`settings.causal_order`); None if all are equal.
        skipped: what was not run, and why.
        steps: optimizer steps of each run.
        notes: sentences about what the proof cannot show.
    """

    equal: bool
    runs: tuple[Run, ...]
    first_difference: Difference | None
    skipped: tuple[Skip, ...]
    steps: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(run.name) for run in self.runs)
        head = f"{'run':<{width}}  equal  difference  bound    of bound  closest to its bound at"
        rows = [head, *(_row(run, width) for run in self.runs)]
        rows += [f"not run: {skip.name}: {skip.reason}" for skip in self.skipped]
        rows += self.notes
        count = f"{len(self.runs)} runs of {self.steps} steps"
        verdict = f"equal: {count} agree with one device, within rounding"
        return "\n".join([*rows, verdict if self.first_difference is None else self.first_difference.words])

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object; a number that is not finite is null."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "runs": [_object(run) for run in self.runs],
            "first_difference": None if first is None else {k: finite_or_none(v) for k, v in asdict(first).items()},
            "skipped": [asdict(skip) for skip in self.skipped],
            "steps": self.steps,
            "notes": list(self.notes),
        }


def difference_in_words(
    run: str, at: Closest, *, leaves: int, resumed_at: int | None, differing: tuple[int, int] = (1, 1), common: str = ""
) -> Difference:
    """Describe where a run differs, and which kinds of fault show there first."""
    when = f"at step {at.step}" if at.step else "before the first step"
    what = f"in the {at.leaf}" if at.leaf in HINTS else f"in {at.leaf}"
    size = f"by {at.difference:.1e}, of which rounding explains {at.bound:.1e}"
    times = f" ({at.ratio:,.0f} times)" if math.isfinite(at.ratio) else ""
    hint = HINTS.get(at.leaf, LEAVES if at.step else START)
    if resumed_at is not None and at.step == resumed_at:
        hint = "that is the state as it was restored: what was saved or read back is not what it was"
    elif resumed_at is not None and at.step == resumed_at + 1:
        hint = f"that is the first step after resuming: the data did not continue where it stopped, or {hint}"
    many = f"{at.beyond} of {leaves} compared values are beyond their bounds there"
    words = f"not equal: {run} differs from one device {when} {what} {size}{times}; {many}. Look at this first: {hint}."
    if differing[0] > 1:
        pattern = f" Of those that are not resumed, all with {common} differ, and no others." if common else ""
        words += f" {differing[0]} of {differing[1]} runs differ; this one changes least.{pattern}"
    return Difference(run, at.step, at.leaf, at.difference, at.bound, words)


HINTS = {
    "weight": "Loss.weight is no sum over the examples (a constant, a mean), or the batch is another: rows missing, or "
    "of another step",
    "loss": "the weights and the examples' weight agree, so it is in the forward pass or the sum: rows, random masks, "
    "or means that are averaged where sums should be added",
    "grad_norm": "loss and leaves agree, so it is in how the norm is summed",
}
LEAVES = (
    "the loss agrees, so it is in this leaf's gradient (a sum over devices or microbatches that is missing or done "
    "twice) or in what the optimizer does with it"
)
START = "that is the initial state: `init` draws or computes it differently on this mesh"


def _row(run: Run, width: int) -> str:
    at = run.closest
    share = f"{at.ratio:.3f}" if at.ratio < 10 else f"{at.ratio:.2g}"
    place = f"step {at.step}, {at.leaf}" if at.ratio else "the same bits"
    equal = "yes" if run.equal else "NO"
    return f"{run.name:<{width}}  {equal:<5}  {run.max_difference:<10.1e}  {run.bound:<7.1e}  {share:<8}  {place}"


def _object(run: Run) -> dict[str, Any]:
    at = run.closest
    named = {"name": run.name, "equal": run.equal, "max_difference": run.max_difference, "bound": run.bound}
    return {key: finite_or_none(value) for key, value in (named | {"step": at.step, "leaf": at.leaf}).items()}
