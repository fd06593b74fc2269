"""One run, compared with the record of the reference step by step; and making that record."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdp.checkpoint import Checkpoints
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.data.feed import shard_batches
from jdp.prove.bounds import PAIRS, Closest, Record, noise_amplitude, snapshot, sum_noise
from jdp.prove.reference import SILENT, Noise, Reference
from jdp.prove.settings import Resume, RunSpec, Setting

Batches = Callable[[int], Batch]
"""`batches(index)` -> the global batch of the step after `index` consumed batches, as NumPy arrays."""


@dataclass(frozen=True)
class Made:
    """The training under one setting, built with jdp.

    Attributes:
        step: the training step.
        state: returns the initial state.
        abstract_state: returns the state that a checkpoint is restored onto.
    """

    step: Step
    state: Callable[[], TrainState]
    abstract_state: Callable[[], TrainState]


Make = Callable[[Setting], Made]


def record_reference(reference: Reference, batches: Batches, steps: int, progress: Callable[[str], None]) -> Record:
    """Run the reference and its shadows, and record them; `progress` gets the name of each run before it starts."""
    batch = batches(0)
    record, noise = Record(sum_noise(batch)), noise_amplitude(reference.training.precision, batch)
    progress("one device, plainly: the reference")
    for _, values in _run_reference(reference, batches, steps, SILENT):
        record.add(values)
    for index in range(2 * PAIRS):
        progress(f"shadow {index + 1} of {2 * PAIRS}: the reference with exaggerated rounding")
        sign = -1 if index % 2 else 1
        shadow = Noise(np.uint32(index // 2), np.float32(sign * noise))
        for step, values in _run_reference(reference, batches, steps, shadow):
            record.widen(step, values)
    record.close()
    return record


def _run_reference(
    reference: Reference, batches: Batches, steps: int, noise: Noise
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, snapshot) before the first step and after each."""
    state = reference.initial_state()
    yield 0, snapshot(state)
    for step in range(1, steps + 1):
        state, metrics = reference.step(state, batches(step - 1), noise)
        yield step, snapshot(state, metrics)


@dataclass
class Trials:
    """Runs under different settings, all compared with one record."""

    make: Make  # builds the training under a setting
    batches: Batches  # the data
    steps: int  # optimizer steps of a run
    record: Record  # of the reference

    def __post_init__(self) -> None:
        self._made_for = functools.cache(self.make)  # a resumed run compiles nothing again

    def run(self, run: RunSpec) -> Closest:
        """Run until the end or the first step beyond a bound; return the element closest to its bound or beyond it."""
        compared = self._resumed(run) if isinstance(run, Resume) else self._uninterrupted(run)
        closest = Closest()
        for each in compared:
            closest = max(closest, each, key=lambda element: element.ratio)
            if each.ratio > 1:
                return each
        return closest

    def _uninterrupted(self, setting: Setting) -> Iterator[Closest]:
        made = self._made_for(setting)
        state = made.state()
        yield self.record.compare(0, snapshot(state))
        yield from self._steps(made, [state], 1, self.steps, position=0)

    def _resumed(self, run: Resume) -> Iterator[Closest]:
        first, second = self._made_for(run.first), self._made_for(run.second)
        with tempfile.TemporaryDirectory(prefix="jdp-prove-") as folder, Checkpoints(folder) as saved:
            holder = [first.state()]
            yield from self._steps(first, holder, 1, run.at, position=0)
            saved.save(holder.pop(), {"done": run.at})
            saved.wait()
            state, restored = saved.restore(second.abstract_state())
            yield self.record.compare(run.at, snapshot(state))
            yield from self._steps(second, [state], run.at + 1, self.steps, position=restored["done"])

    def _steps(self, made: Made, holder: list[TrainState], first: int, last: int, position: int) -> Iterator[Closest]:
        """Run and compare steps `first` to `last` with the batches from `position` on.

        `holder` is a list of one state, which is replaced by the last one: no other reference keeps its memory.
        """
        loader = (self.batches(index) for index in range(position, self.steps))
        with shard_batches(loader, made.step.plan, prefetch=1) as feed:
            for step in range(first, last + 1):
                state, metrics = made.step(holder.pop(), next(feed))
                holder.append(state)
                yield self.record.compare(step, snapshot(state, metrics))
