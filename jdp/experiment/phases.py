"""The phases of a run: where `train.batch_size` or `data.length` changes, another program begins.

Each phase is an experiment of its own, of one size and one length, for what looks at a step. Training reads the whole
schedule: what a step reads is a function of its number alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jdp.base.by_step import ByStep, together
from jdp.data import Source
from jdp.data.text.cut import CutSamples
from jdp.experiment.schema.experiment import Experiment


@dataclass(frozen=True)
class Phase:
    """Steps of one batch size and one length.

    Attributes:
        start, end: steps done before it, and after it.
        experiment: with these constant; weights of a mixture may change in it.
    """

    start: int
    end: int
    experiment: Experiment

    @property
    def steps(self) -> str:
        """The phase's steps in words: "7", "8 to 20"."""
        first = self.start + 1
        return f"{first:,} to {self.end:,}" if self.end > first else f"{first:,}"


def lengths(experiment: Experiment) -> ByStep[int]:
    """Return the tokens of a text's samples by step; 1 of other data."""
    return experiment.data.lengths if experiment.kind == "text" else ByStep((0,), (1,))


def batch_shapes(experiment: Experiment) -> ByStep[tuple[int, int]]:
    """Return the rows and the length of a batch by step, as far as the run goes."""
    both = together([experiment.train.sizes, lengths(experiment)])
    begun = sum(start < experiment.train.steps for start in both.starts)
    return ByStep(both.starts[:begun], tuple((rows, length) for rows, length in both.values[:begun]))


def phases(experiment: Experiment) -> list[Phase]:
    """Return the phases in their order; one where nothing changes."""
    found = batch_shapes(experiment)
    each = zip(pairwise((*found.starts, experiment.train.steps)), found.values, strict=True)
    return [Phase(start, end, _constant(experiment, *shape)) for (start, end), shape in each]


def largest(experiment: Experiment) -> Experiment:
    """Return the experiment of the phase whose batches are the largest: what it needs is enough for the others."""
    found = batch_shapes(experiment)
    return _constant(experiment, *max(found.values, key=lambda shape: (shape[0] * shape[1], shape[1])))


def _constant(experiment: Experiment, rows: int, length: int) -> Experiment:
    if not (experiment.train.sizes.changes or lengths(experiment).changes):
        return experiment
    train = experiment.train.model_copy(update={"batch_size": rows})
    text = experiment.kind == "text"
    data = experiment.data.model_copy(update={"length": length}) if text else experiment.data
    return experiment.model_copy(update={"train": train, "data": data})


def in_rows(experiment: Experiment, source: Source) -> Source:
    """Return the source as a run reads it: its samples, or rows that are cut from them where the length changes."""
    return _cut(experiment, source) if lengths(experiment).changes else source


def samples_before(experiment: Experiment, step: int) -> int:
    """Return how many samples the steps before this one read, or began to read."""
    rows = experiment.train.sizes.total(step)
    return _cut(experiment, ()).begun(rows) if lengths(experiment).changes else rows


def _cut(experiment: Experiment, source: Source) -> CutSamples:
    data, sizes = experiment.data, experiment.train.sizes
    by_row = ByStep(tuple(map(sizes.total, lengths(experiment).starts)), lengths(experiment).values)
    return CutSamples(source, data.longest, by_row, data.shuffle)
