"""Search for the fastest way to run a step that fits, by compiling: one choice at a time, from the best so far.

A way is a choice in every dimension (strategy and mesh, rematerialisation, microbatches, the compiler's options, ...).
A round tries each dimension's other choices beside the best way's; rounds are repeated until one finds nothing better.
That finds what no single change improves (coordinate descent), in about as many compilations as there are choices,
where all combinations would be their product. The order is fixed, so the same choices give the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jdp.base.formatting import format_bytes, format_percent, format_seconds
from jdp.base.toml import toml_value
from jdp.base.words import CompilerPreset
from jdp.core.compiling.options import PRESETS
from jdp.foresight.forecast import Estimate

GAIN = 0.005
"""What is faster by less than this share is not taken for better: the model of time is coarser."""
MEASURED = "simulated with kernels of kinds whose times were compared with an H100's"
TUNED = ("way", "fits", "holds", "hidden", "waits", "step", "MFU", "a second")


@dataclass(frozen=True)
class Choice:
    """One value of a dimension."""

    label: str  # what names it, such as "remat=dots"; "" for what needs no name
    overrides: tuple[tuple[str, str], ...] = ()  # the experiment's keys that it sets -> text, as on a command line
    options: tuple[tuple[str, bool | int | float | str], ...] = ()  # of XLA's compiler, beside those of other choices
    preset: CompilerPreset | Literal[""] = ""  # of the compiler, to whose options those of choices are added
    basis: str = ""  # what its simulated time rests on beside kernels of kinds that were measured


@dataclass(frozen=True)
class Dimension:
    """What can be chosen."""

    choices: tuple[Choice, ...]  # of which a way has one
    start: int = 0  # which of them the search begins with
    ordered: bool = False  # neighbours are alike, as numbers are: the search goes on where it pays


Way = tuple[Choice, ...]
"""A choice of each dimension."""


def name_of(way: Way) -> str:
    """Return the labels of a way's choices."""
    return " ".join(choice.label for choice in way if choice.label)


def overrides_of(way: Way) -> dict[str, str]:
    """Return the experiment's keys that a way sets -> text. A preset and options of the compiler become one table."""
    keys = dict(pair for choice in way for pair in choice.overrides)
    if options := dict(option for choice in way for option in choice.options):
        presets = (PRESETS[choice.preset] for choice in way if choice.preset)
        keys["compiler"] = toml_value({**next(presets, {}), **options})
    return keys


@dataclass(frozen=True)
class Trial:
    """A way that was compiled."""

    way: Way  # its choices
    estimate: Estimate  # what was read off the program

    @property
    def name(self) -> str:
        """The labels of its choices."""
        return name_of(self.way)

    def __str__(self) -> str:
        seconds, held = self.estimate.step_seconds, self.estimate.bytes_per_device
        if held is None:
            return f"{self.name}, which does not compile"
        return f"{self.name}, {format_bytes(held) if seconds is None else format_seconds(seconds)}"

    def to_json(self) -> dict[str, Any]:
        """Return one of the `trials` that `jdp plan --tune --json` prints."""
        return {"name": self.name, "overrides": overrides_of(self.way), **self.estimate.to_json()}


@dataclass(frozen=True)
class Tuned:
    """What a search found."""

    trials: tuple[Trial, ...]  # every way that was compiled, in order; the first is where it began
    best: Trial | None  # the fastest that fits, else the one that needs least memory; None: none compiled
    complete: bool  # whether it came to its end; False where the time was up
    path: tuple[Trial, ...] = ()  # from where it began to the best, each better than the one before

    @property
    def fits(self) -> bool:
        """Whether there is a way that fits, as far as the devices' memory is known."""
        return self.best is not None and self.best.estimate.fits is not False

    def table(self) -> list[tuple[str, ...]]:
        """Return a row for each trial, under `TUNED`."""
        return [_row(trial) for trial in self.trials]

    @property
    def why(self) -> tuple[str, ...]:
        """Sentences: which way is fastest, or nearest to fitting, and what was gained."""
        start, best = self.trials[0], self.best
        tried = "1 way was compiled" if len(self.trials) == 1 else f"{len(self.trials)} ways were compiled"
        tried += "." if self.complete else "; the time was up before the search was (--tune-minutes)."
        if best is None:
            return (tried, f"None compiled. {start.name}: {start.estimate.error}")
        held = format_bytes(best.estimate.bytes_per_device or 0)
        if not self.fits:
            available = format_bytes(best.estimate.available_bytes or 0)
            return (tried, f"None fits; the nearest is {best.name}, which needs {held} of {available}.")
        seconds, before = best.estimate.step_seconds or 0.0, start.estimate.step_seconds
        if best.estimate.fits is None:
            held += ", and whether that fits is not known, as these devices share a machine's memory"
        sentence = f"{best.name} takes {format_seconds(seconds)} a step and holds {held}"
        if best is start:
            return (tried, f"{sentence}: where it began, nothing was found that is faster.")
        if before is None:
            return (tried, f"{sentence}; {start.name}, where it began, does not fit.", *self._rests_on())
        gain = format_percent(1 - seconds / before)
        sentence = f"{sentence}: {gain} less than {start.name}, where it began ({format_seconds(before)})."
        return (tried, sentence, *self._rests_on())

    @property
    def gains(self) -> dict[Choice, float | None]:
        """Return the seconds a step that each choice of the best way saved; None where the step did not fit before."""
        found = dict[Choice, float | None]()
        for before, after in itertools.pairwise(self.path):
            place = next(i for i, pair in enumerate(zip(before.way, after.way, strict=True)) if pair[0] != pair[1])
            times = before.estimate.step_seconds, after.estimate.step_seconds
            saved = None if times[0] is None or times[1] is None else times[0] - times[1]
            earlier = found.pop(before.way[place], 0.0)
            found[after.way[place]] = None if saved is None or earlier is None else saved + earlier
        return found

    def _rests_on(self) -> Iterator[str]:
        """Yield a sentence for each kind of evidence that the gains rest on."""
        by_basis: dict[str, list[str]] = {}
        for choice, saved in self.gains.items():
            words = "what makes it fit" if saved is None else format_seconds(saved)
            by_basis.setdefault(choice.basis, []).append(f"{choice.label or 'no such option'} ({words})")
        for basis, labels in by_basis.items():
            yield f"{', '.join(labels)}: {basis or MEASURED}."

    def to_json(self) -> dict[str, Any]:
        """Return what `jdp plan --tune --json` prints beside the target."""
        return {
            "tuned": None if self.best is None or not self.fits else self.best.to_json(),
            "nearest": None if self.best is None or self.fits else self.best.to_json(),
            "complete": self.complete,
            "why": " ".join(self.why),
            "gains": [
                {
                    "name": choice.label,
                    "seconds": saved,
                    "measured": not choice.basis,
                    "basis": choice.basis or MEASURED,
                }
                for choice, saved in self.gains.items()
            ],
            "trials": [trial.to_json() for trial in self.trials],
        }


def search(
    dimensions: Sequence[Dimension],
    evaluate: Callable[[Way, Trial | None], Estimate | None],
    *,
    more: Callable[[], bool] = lambda: True,
) -> Tuned:
    """Search from the dimensions' starts."""
    start = tuple(dimension.choices[dimension.start] for dimension in dimensions)
    first = evaluate(start, None)
    assert first is not None, "a search begins with choices that go together"
    best = Trial(start, first)
    path, seen = [best], dict[Way, Trial | None]({start: best})
    improved = complete = True
    while improved and complete:
        improved = False
        for place, dimension in enumerate(dimensions):
            for way in (walk := _Walk(dimension, place, best)):
                if way not in seen:
                    if not more():
                        complete = False
                        break
                    found = evaluate(way, walk.best)
                    seen[way] = None if found is None else Trial(way, found)
                trial = seen[way]
                if trial is not None and _better(trial.estimate, walk.best.estimate):
                    walk.best, improved = trial, True
                    path.append(trial)
            best = walk.best
            if not complete:
                break
    trials = tuple(trial for trial in seen.values() if trial is not None)
    return Tuned(trials, None if best.estimate.memory is None else best, complete, tuple(path))


@dataclass
class _Walk:
    """The ways that differ from the best in one place: all of them, or neighbours for as long as they are better."""

    dimension: Dimension
    place: int
    best: Trial

    def __iter__(self) -> Iterator[Way]:
        choices, begin = self.dimension.choices, self.best
        at = choices.index(begin.way[self.place])
        if not self.dimension.ordered:
            yield from (self._way(choice) for choice in choices if choice != choices[at])
            return
        for direction in (1, -1):
            for choice in choices[at + 1 :] if direction > 0 else choices[:at][::-1]:
                before = self.best
                yield self._way(choice)
                if self.best is before:
                    break
            if self.best is not begin:
                return

    def _way(self, choice: Choice) -> Way:
        return (*self.best.way[: self.place], choice, *self.best.way[self.place + 1 :])


def _better(new: Estimate, old: Estimate) -> bool:
    """Return True if `new` fits where `old` does not, or is faster, or where neither fits needs less memory."""
    if new.memory is None or old.memory is None:
        return new.memory is not None
    if (new.fits is False) != (old.fits is False):
        return old.fits is False
    if new.fits is False:
        return new.memory.total < old.memory.total
    breaks = [estimate.report is not None and estimate.report.kept is False for estimate in (new, old)]
    if breaks[0] != breaks[1]:
        return breaks[1]
    return (new.step_seconds or 0.0) < (1 - GAIN) * (old.step_seconds or 0.0)


def _row(trial: Trial) -> tuple[str, ...]:
    estimate = trial.estimate
    if estimate.memory is None:
        return (trial.name, "no", "did not compile", *["–"] * (len(TUNED) - 3))
    return (trial.name, estimate.fits_in_words, format_bytes(estimate.memory.total), *estimate.speed_cells)
