"""One run, step by step, held against the record as it goes; and the record itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdp.checkpoint import Checkpoints
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.data.feed import Feed, shard_batches
from jdp.prove.bounds import PAIRS, Closest, Record, amplitude, snapshot, sums
from jdp.prove.reference import SILENT, Noise, Reference
from jdp.prove.settings import Resume, Setting, Way

Batches = Callable[[int], Batch]
"""`batches(index)` -> the whole global batch that the step after `index` consumed ones gets, as NumPy arrays."""


@dataclass(frozen=True)
class Made:
    """The training under one setting, as jdp makes it.

    Attributes:
        step: the training step.
        state: makes the initial state.
        abstract_state: makes what a checkpoint is restored onto.
    """

    step: Step
    state: Callable[[], TrainState]
    abstract_state: Callable[[], TrainState]


Make = Callable[[Setting], Made]


def record(reference: Reference, batches: Batches, steps: int, say: Callable[[str], None]) -> Record:
    """Run the reference and its shadows."""
    first = batches(0)
    kept, noise = Record(sums(first)), amplitude(reference.training.precision, first)
    say("one device, plainly: the reference")
    for _, values in _plain(reference, batches, steps, SILENT):
        kept.add(values)
    for index in range(2 * PAIRS):
        say(f"shadow {index + 1} of {2 * PAIRS}: the reference with exaggerated rounding")
        sign = -1 if index % 2 else 1
        for step, values in _plain(reference, batches, steps, Noise(np.uint32(index // 2), np.float32(sign * noise))):
            kept.widen(step, values)
    kept.close()
    return kept


def _plain(reference: Reference, batches: Batches, steps: int, noise: Noise) -> Iterator[tuple[int, dict[str, Any]]]:
    state = reference.first()
    yield 0, snapshot(state)
    for step in range(1, steps + 1):
        state, metrics = reference.step(state, batches(step - 1), noise)
        yield step, snapshot(state, metrics)


@dataclass
class Trials:
    """Runs under different settings, all held against one record.

    Attributes:
        make: the training under a setting; what it made is kept, so that a resumed run compiles nothing again.
        batches: the data.
        steps: optimizer steps of a run.
        record: of the reference.
    """

    make: Make
    batches: Batches
    steps: int
    record: Record

    def __post_init__(self) -> None:
        self._made: dict[Setting, Made] = {}

    def run(self, run: Way) -> Closest:
        """Where the run comes closest to its bounds; it ends at the first step that goes beyond one."""
        found = self._resumed(run) if isinstance(run, Resume) else self._whole(run)
        closest = Closest()
        for each in found:
            closest = max(closest, each, key=lambda at: at.ratio)
            if each.ratio > 1:
                return each
        return closest

    def _whole(self, setting: Setting) -> Iterator[Closest]:
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
            state, beside = saved.restore(second.abstract_state())
            yield self.record.compare(run.at, snapshot(state))
            yield from self._steps(second, [state], run.at + 1, self.steps, position=beside["done"])

    def _steps(self, made: Made, holder: list[TrainState], first: int, last: int, position: int) -> Iterator[Closest]:
        """Steps `first` to `last` with the batches from `position` on; `holder` has the state, then the last one."""
        with self._feed(made, position) as feed:
            for step in range(first, last + 1):
                state, metrics = made.step(holder.pop(), next(feed))
                holder.append(state)
                yield self.record.compare(step, snapshot(state, metrics))

    def _feed(self, made: Made, position: int) -> Feed:
        loader = (self.batches(index) for index in range(position, self.steps))
        return shard_batches(loader, made.step.plan, prefetch=1)

    def _made_for(self, setting: Setting) -> Made:
        if setting not in self._made:
            self._made[setting] = self.make(setting)
        return self._made[setting]
