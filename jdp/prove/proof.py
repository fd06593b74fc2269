"""The result of a proof: a table, the first difference in words, and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jdp.base.formatting import align_columns, finite_or_none
from jdp.prove.bounds import Closest, Record
from jdp.prove.runs import Trial


@dataclass(frozen=True)
class Run:
    """One run, compared with the reference.

    Attributes:
        name: such as "zero3 8 devices K=2".
        at: the element closest to its bound; if the run differs, the element farthest beyond it at the first such step.
        words: how the run differs and the likely cause; "" if it is equal.
    """

    name: str
    at: Closest
    words: str = ""

    @property
    def equal(self) -> bool:
        """True if every loss and every leaf stayed within its bound."""
        return self.at.ratio <= 1


@dataclass(frozen=True)
class Proof:
    """The result of `prove`; `str()` is a table.

    Attributes:
        runs: in the order they were made; if a resumed run differs, both of its settings are among them.
        first_difference: the differing run with the fewest changes from one device, resumed runs last
            (`Trial.causal_order`); None if all are equal.
        skipped: part of a run's name -> why it was skipped.
        steps: optimizer steps of each run.
        notes: a sentence for each thing that the proof cannot show.
    """

    runs: tuple[Run, ...]
    first_difference: Run | None
    skipped: dict[str, str]
    steps: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, results: Mapping[Trial, Closest], record: Record, skipped: dict[str, str], *, quick: bool) -> Proof:
        """Return the result of runs that were compared with a record."""
        differing = sorted((t for t, at in results.items() if at.ratio > 1), key=lambda trial: trial.causal_order)
        runs = {trial: _run(trial, at, len(record.values[at.step])) for trial, at in results.items()}
        first = runs[differing[0]] if differing else None
        if first is not None and len(differing) > 1:
            words = f"{first.words} {len(differing)} of {len(runs)} runs differ; this run has the fewest changes."
            first = replace(first, words=words)
        notes = [*record.notes()]
        notes += ["--quick turns LLVM's optimisations off; jdp train has them on"] * quick
        return cls(tuple(runs.values()), first, skipped, len(record.values) - 1, tuple(notes))

    @property
    def equal(self) -> bool:
        """True if all runs are equal to the reference."""
        return self.first_difference is None

    def __str__(self) -> str:
        rows = align_columns([_HEADINGS, *map(_cells, self.runs)])
        rows += [f"not run: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([*rows, *self.notes, self._verdict()])

    def _verdict(self) -> str:
        if self.first_difference is not None:
            return self.first_difference.words
        runs, verb = (f"{len(self.runs)} runs", "match") if len(self.runs) > 1 else ("one run", "matches")
        closest = max((run.at for run in self.runs), key=lambda at: at.ratio)
        largest, bound = (f"{number:.0e}".replace("e-0", "e-") for number in (closest.difference, closest.bound))
        explained = f" (largest difference {largest}, bound {bound})" if closest.ratio else ", bit for bit"
        return f"equal: {runs} of {self.steps} step{'s' * (self.steps > 1)} {verb} one device{explained}"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp prove --json` prints; infinities and NaN are null."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "runs": [{"name": run.name, "equal": run.equal, **_numbers(run, "max_difference")} for run in self.runs],
            "first_difference": first and {"run": first.name, **_numbers(first, "difference"), "words": first.words},
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
            "steps": self.steps,
            "notes": list(self.notes),
        }


def _numbers(run: Run, difference: str) -> dict[str, Any]:
    numbers = {difference: finite_or_none(run.at.difference), "bound": finite_or_none(run.at.bound)}
    return {"step": run.at.step, "leaf": run.at.leaf, **numbers}


def _run(trial: Trial, at: Closest, leaves: int) -> Run:
    """Describe a run; if it differs, name the place and the likely faults."""
    words = ""
    if at.ratio > 1:
        when = f"at step {at.step}" if at.step else "before the first step"
        what = f"in the {at.leaf}" if at.leaf in HINTS else f"in {at.leaf}"
        times = f" ({at.ratio:,.0f} times)" if math.isfinite(at.ratio) else ""
        hint = HINTS.get(at.leaf, LEAVES if at.step else START)
        if trial.at and at.step == trial.at:
            hint = "this is the restored state, so saving or restoring changed it"
        elif trial.at and at.step == trial.at + 1:
            hint = f"this is the first step after resuming: the data did not continue where it stopped, or {hint}"
        words = (
            f"not equal: {trial} differs from one device {when} {what} by {at.difference:.1e}; rounding explains at "
            f"most {at.bound:.1e}{times}; {at.beyond} of {leaves} compared values exceed their bounds there. "
            f"Check first: {hint}."
        )
    return Run(str(trial), at, words)


HINTS = {
    "weight": "Loss.weight is not a sum over the examples (but a constant or a mean), or the batch differs: rows are "
    "missing or belong to another step",
    "loss": "the parameters and the examples' weight agree, so the fault is in the forward pass or the sum: rows, "
    "random masks, or means that are averaged instead of sums that are added",
    "grad_norm": "loss and leaves agree, so the fault is in how the norm is summed",
}
LEAVES = (
    "the loss agrees, so the fault is in this leaf's gradient (a sum over devices or microbatches is missing or done "
    "twice) or in the optimizer's update"
)
START = "this is the initial state: `init` draws or computes it differently on this mesh"


_HEADINGS = ("run", "equal", "difference", "bound", "of bound", "closest to its bound at")


def _cells(run: Run) -> tuple[str, ...]:
    at = run.at
    share = f"{at.ratio:.3f}" if at.ratio < 10 else f"{at.ratio:.2g}"
    place = f"step {at.step}, {at.leaf}" if at.ratio else "the same bits"
    return run.name, "yes" if run.equal else "NO", f"{at.difference:.1e}", f"{at.bound:.1e}", share, place
