"""The runs of a proof: which to make, why some are skipped, and how each is compared with the reference's record.

Every strategy runs on one device and on all of them, with one microbatch a step and with several. One more run is
saved in the middle and resumed under another setting.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from jdp.base.errors import UserError
from jdp.base.words import StrategyName
from jdp.checkpoint import Checkpoints
from jdp.core.init.train_state import abstract_state, init_state
from jdp.core.sharding.axes import batch_unit
from jdp.core.sharding.strategy import STRATEGIES
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.data.feed import shard_batches
from jdp.prove.bounds import Closest, Record, snapshot
from jdp.prove.reference import Reference


@dataclass(frozen=True)
class Setting:
    """How to make one run. No setting may change the result.

        >>> print(jdp.prove.Setting("zero3", devices=8, accumulate=2))
        zero3 8 devices K=2

    Attributes:
        strategy: "ddp", "zero1", "zero2" or "zero3".
        devices: number of devices.
        accumulate: microbatches a step, K.
    """

    strategy: StrategyName = "ddp"
    devices: int = 1
    accumulate: int = 1

    def __str__(self) -> str:
        return f"{self.strategy} {self.devices} device{'s' * (self.devices > 1)} K={self.accumulate}"


def changes(setting: Setting, other: Setting) -> int:
    """Return the number of fields that differ."""
    return sum(a != b for a, b in zip(astuple(setting), astuple(other), strict=True))


class Trial(NamedTuple):
    """A run under one setting, or a run that is saved after step `at` and resumed under another setting."""

    setting: Setting
    at: int = 0
    onto: Setting | None = None

    def __str__(self) -> str:
        return f"resume after step {self.at}: {self.setting}, onto {self.onto}" if self.onto else str(self.setting)

    @property
    def causal_order(self) -> tuple[int, ...]:
        """Sort key, the likeliest cause first: a run shares the faults of runs with fewer changes."""
        return self.at, changes(self.setting, Setting()), self.setting.devices, self.setting.accumulate


def steps_of(
    reference: Reference, accumulates: Sequence[int], rows: int, no_microbatches: str | None
) -> tuple[dict[Setting, Step], dict[str, str]]:
    """Return the steps of the settings that can run batches of `rows`, and part of a name -> reason for the others."""
    steps, skipped = dict[Setting, Step](), dict[str, str]()
    for devices, name, k in itertools.product((reference.step.plan.mesh.size, 1), STRATEGIES, accumulates):
        setting, plan = Setting(name, devices, k), reference.plan(name, devices)
        try:
            batch_unit(plan.mesh.shape, k).check(rows)
        except ValueError as error:
            skipped[f"{setting}".removeprefix(f"{name} ")] = str(error)
            continue
        if k > 1 and no_microbatches:
            skipped[f"K={k}"] = no_microbatches
        else:
            steps[setting] = reference.step_on(plan, k)
    return steps, skipped


def choose_trials(
    settings: Sequence[Setting], requested: Setting, *, steps: int, only: Sequence[str] = (), quick: bool = False
) -> list[Trial]:
    """Return every setting, then the user's own resumed under the most different setting; or some of these."""
    several, stages = [setting for setting in settings if setting.devices > 1], list(STRATEGIES)
    if not several:
        return []
    first = requested if requested in several else several[0]
    other = max(several, key=lambda setting: (changes(setting, first), stages.index(setting.strategy)))
    trials = [*map(Trial, settings), *([Trial(first, steps // 2, other)] if steps > 1 else [])]
    if unknown := [text for text in only if not any(text in str(trial) for trial in trials)]:
        raise UserError(
            f"`only` selects runs by a part of their names; given {', '.join(unknown)}, which is in no name. "
            f"Use a part of: {'; '.join(map(str, trials))}."
        )
    named = [trial for trial in trials if not only or any(text in str(trial) for text in only)]
    return trials[-1:] if quick else named


class Trials(NamedTuple):
    """Runs under different settings, all compared with one record."""

    reference: Reference
    steps: Mapping[Setting, Step]
    record: Record  # of the reference

    def run_all(self, trials: Sequence[Trial], begin: Callable[[str], None]) -> dict[Trial, Closest]:
        """Return the result of each run. If a resumed run differs, run its two settings too."""
        results = dict[Trial, Closest]()
        for trial in trials:
            begin(str(trial))
            results[trial] = self._run(trial)
        begin("")
        resumed = [trial for trial, at in results.items() if trial.onto is not None and at.ratio > 1]
        suspects = [Trial(setting) for trial in resumed for setting in (trial.setting, trial.onto) if setting]
        return results | {suspect: self._run(suspect) for suspect in suspects if suspect not in results}

    def _run(self, trial: Trial) -> Closest:
        """Run to the end or the first step beyond a bound; return the element with the largest share of its bound."""
        closest = Closest()
        for element in self._compared(trial):
            closest = max(closest, element, key=lambda compared: compared.ratio)
            if element.ratio > 1:
                break
        return closest

    def _compared(self, trial: Trial) -> Iterator[Closest]:
        reference, last, step = self.reference, len(self.record.values) - 1, self.steps[trial.setting]
        drawn = {"rng": reference.rng, "wrt": reference.wrt}
        holder, saved_at = [init_state(reference.init, reference.tx, step.plan, **drawn)], trial.at or last
        yield self.record.compare(0, snapshot(holder[0]))
        yield from self._steps(step, holder, range(1, saved_at + 1), position=0)
        if trial.onto is not None:
            step = self.steps[trial.onto]
            with tempfile.TemporaryDirectory(prefix="jdp-prove-") as folder, Checkpoints(folder) as checkpoints:
                checkpoints.save(holder.pop(), {"done": saved_at})
                checkpoints.wait()
                state, restored = checkpoints.restore(abstract_state(reference.init, reference.tx, step.plan, **drawn))
            yield self.record.compare(saved_at, snapshot(state))
            yield from self._steps(step, [state], range(saved_at + 1, last + 1), position=restored["done"])

    def _steps(self, step: Step, holder: list[TrainState], numbers: range, position: int) -> Iterator[Closest]:
        """Run and compare steps; `holder`, a list with one state, keeps no other reference to its memory."""
        loader = (self.reference.batches(index) for index in range(position, len(self.record.values) - 1))
        with shard_batches(loader, step.plan, prefetch=1) as feed:
            for number in numbers:
                state, metrics = step(holder.pop(), next(feed))
                holder.append(state)
                yield self.record.compare(number, snapshot(state, metrics))
