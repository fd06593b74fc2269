"""The result of a proof: a table, the first difference in words, and JSON."""

from __future__ import annotations

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
        at: the element closest to its bound; if the run differs, the element farthest beyond it at the first step that
            differs.
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
        runs: in the order of their execution; if a resumed run differs, they include its two settings.
        first_difference: the differing run with the fewest changes from one device, resumed runs last; None if all
            are equal.
        skipped: part of a run's name -> why it was skipped.
        steps: optimizer steps of each run.
        notes: the limits of the proof.
    """

    runs: tuple[Run, ...]
    first_difference: Run | None
    skipped: dict[str, str]
    steps: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, results: Mapping[Trial, Closest], record: Record, skipped: dict[str, str]) -> Proof:
        """Return the result of runs that were compared with a record."""
        runs = {trial: _run(trial, at, len(record.values[at.step])) for trial, at in results.items()}
        differing = [trial for trial, run in runs.items() if not run.equal]
        first = runs[min(differing, key=lambda trial: trial.causal_order)] if differing else None
        if first is not None and len(differing) > 1:
            words = f"{first.words} {len(differing)} of {len(runs)} runs differ; this run has the fewest changes."
            first = replace(first, words=words)
        return cls(tuple(runs.values()), first, skipped, len(record.values) - 1, record.notes())

    @property
    def equal(self) -> bool:
        """True if all runs are equal to the reference."""
        return self.first_difference is None

    def __str__(self) -> str:
        cells = [("run", "equal", "difference", "bound", "of bound", "closest to its bound at")]
        for run in self.runs:
            at = run.at
            place = f"step {at.step}, {at.leaf}" if at.ratio else "bit for bit"
            sizes = f"{at.difference:.1e}", f"{at.bound:.1e}", f"{at.ratio:.2g}"
            cells.append((run.name, "yes" if run.equal else "NO", *sizes, place))
        skipped = (f"not run: {name}: {reason}" for name, reason in self.skipped.items())
        return "\n".join([*align_columns(cells), *skipped, *self.notes, self._verdict()])

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
            "runs": [{"name": run.name, "equal": run.equal, **_numbers(run.at, "max_difference")} for run in self.runs],
            "first_difference": first and {"run": first.name, **_numbers(first.at, "difference"), "words": first.words},
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
            "steps": self.steps,
            "notes": list(self.notes),
        }


def _numbers(at: Closest, name: str) -> dict[str, Any]:
    return {"step": at.step, "leaf": at.leaf, name: finite_or_none(at.difference), "bound": finite_or_none(at.bound)}


def _run(trial: Trial, at: Closest, leaves: int) -> Run:
    if at.ratio <= 1:
        return Run(str(trial), at)
    hint = HINTS.get(at.leaf, LEAF) if at.step else "`init` computes another initial state on this mesh"
    if trial.at and at.step == trial.at:
        hint = "saving or restoring changed the state: this is the restored state"
    elif trial.at and at.step == trial.at + 1:
        hint = f"the data did not continue where it stopped, because this is the first step after resuming; or {hint}"
    differs = f"not equal: {trial} differs from one device at step {at.step} in {at.leaf} by {at.difference:.1e}"
    beyond = f"{at.beyond} of {leaves} compared values exceed their bounds there"
    return Run(str(trial), at, f"{differs}; rounding explains at most {at.bound:.1e}; {beyond}. Check first: {hint}.")


HINTS = {
    "weight": "Loss.weight is not a sum over the examples, or the batch has other rows",
    "loss": "the forward pass or the sum has other rows or random masks, or averages means instead of adding sums",
    "grad_norm": "the norm is summed in another way, because the loss and all leaves agree",
}
LEAF = "the gradient of this leaf lacks a sum over devices or microbatches or has it twice, or its update is another"
