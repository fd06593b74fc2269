"""Equivalence with one device: tests that a training learns the same on many devices, under every strategy.

`reference.py` is the training as a plain loop on one device, and `bounds.py` measures how far rounding alone moves its
elements. Here every strategy runs on one device and on all of them, with one microbatch a step and with several. One
more run is saved in the middle and resumed under another setting. Model, batches, dtypes and optimizer are the user's
own, in full size. `guard/memory_check.py` refuses a proof that does not fit into memory.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import optax

from jdp.base.errors import UserError, public
from jdp.base.formatting import align_columns, finite_or_none
from jdp.base.machine import available_memory
from jdp.base.toml import described
from jdp.base.words import StrategyName
from jdp.checkpoint import Checkpoints
from jdp.core.batch import batch_rows
from jdp.core.init.train_state import abstract_state, init_state
from jdp.core.init.trees import typed_key
from jdp.core.sharding.axes import batch_unit
from jdp.core.sharding.strategy import STRATEGIES
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, InitFn, Loss
from jdp.data.feed import shard_batches
from jdp.guard.memory_check import check_proof
from jdp.prove.bounds import PAIRS, Closest, Record, snapshot
from jdp.prove.reference import Batches, Reference, record_reference

OnProgress = Callable[[int, int, str], None]
"""`progress(done, total, name)`: `done` of `total` runs (with shadows) are done; `name` is next, "" at the end."""


# The runs.


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
    return sum(a != b for a, b in zip(astuple(setting), astuple(other), strict=True))


class Trial(NamedTuple):
    """A run under one setting, or a run that is saved after step `at` and resumed under another setting."""

    setting: Setting
    at: int = 0
    onto: Setting | None = None

    def __str__(self) -> str:
        return f"resume after step {self.at}: {self.setting}, onto {self.onto}" if self.onto else str(self.setting)


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


# The result.


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
    def of(cls, results: Mapping[Trial, Closest], record: Record, skipped: dict[str, str]) -> Self:
        runs = {trial: _run(trial, at, len(record.values[at.step])) for trial, at in results.items()}
        differing = [trial for trial, run in runs.items() if not run.equal]
        # The likeliest cause comes first, because a run shares the faults of runs with fewer changes.
        differing.sort(key=lambda trial: (trial.at, changes(trial.setting, Setting()), astuple(trial.setting)[1:]))
        first = runs[differing[0]] if differing else None
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


# The proof.


@public()
def prove(
    init: InitFn,
    tx: optax.GradientTransformation,
    train_step: Step,
    batches: Batches,
    *,
    steps: int = 10,
    wrt: Any = None,
    rng: jax.Array | None = None,
    accumulate: Sequence[int] = (1, 2),
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Compare a training on one device with the same training under every strategy, on one and on all devices.

        >>> plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:2]), "zero3")
        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> batches = lambda index: batch
        >>> proof = jdp.prove.prove(init, optax.adam(1e-3), train_step, batches, steps=2, quick=True)
        >>> proof.equal, [run.name for run in proof.runs]
        (True, ['resume after step 1: zero3 2 devices K=1, onto zero2 2 devices K=2'])

    Every run takes a few optimizer steps. After each step, its loss and every leaf of its state are compared with a
    plain loop on one device. They are equal if rounding explains the difference, as measured on this training.

    Args:
        init: returns the model from a key, as for `jdp.init_state`.
        tx: the optimizer.
        train_step: the step, of `jdp.make_train_step`. Runs change its strategy, devices and microbatches, and keep
            the rest of its plan and settings.
        batches: `batches(index)` returns the global batch of the step after `index` consumed batches, as NumPy arrays:
            the same batch for the same index, and the same shapes for all.
        steps: optimizer steps of each run; the resumed run is saved after half of them.
        wrt: the parameters to train, as for `jdp.init_state`; None: all.
        rng: key of the initial weights and of every step; None: `jax.random.key(0)`.
        accumulate: the numbers of microbatches a step; 1 is added if it is missing.
        quick: make only the resumed run, with LLVM's optimisations off: a check in minutes.
        only: make only the runs whose names contain this text, or one of these texts, such as "zero3" or "8 devices".
        progress: called before each run and at the end (`OnProgress`).

    Returns:
        A `Proof`: `.equal`, `.runs` and `.first_difference`; `str()` is a table.

    Raises:
        ValueError: a plan on one device; not enough memory; an argument out of range; nothing to run; several
            processes; or a loss that is not finite at the first step.
    """
    _check(train_step, steps)
    key = typed_key(jax.random.key(0) if rng is None else rng)
    reference, first = Reference(init, tx, train_step, key, wrt, batches, quick), batches(0)
    shapes, devices = jax.eval_shape(reference.initial, key), train_step.plan.mesh.size
    precision = train_step.settings.precision
    check_proof(shapes, devices=devices, steps=steps, precision=precision, available=available_memory())
    whole_batch = _no_microbatches(reference, shapes, first)
    settings, skipped = steps_of(reference, sorted({1, *accumulate}), batch_rows(first), whole_batch)
    requested = Setting(train_step.plan.strategy, devices, train_step.settings.accumulate)
    texts = [only] if isinstance(only, str) else only
    trials = choose_trials([*settings], requested, steps=steps, only=texts, quick=quick)
    skipped |= {"resume": "saving in the middle takes at least 2 steps"} if steps < 2 else {}
    if not trials:
        raise UserError("There is nothing to run: " + "; ".join(map(": ".join, skipped.items())) + ".")
    skipped |= {"--quick": f"the {len(settings)} other runs; this one has LLVM's optimisations off"} if quick else {}
    done, total = itertools.count(), 1 + 2 * PAIRS + len(trials)
    begin = lambda name: progress and progress(next(done), total, name)  # noqa: E731
    record = record_reference(reference, steps, begin)
    return Proof.of(Trials(reference, settings, record).run_all(trials, begin), record, skipped)


def _check(train_step: Any, steps: int) -> None:
    if not isinstance(train_step, Step) or not train_step.settings.train:
        raise UserError(f"A proof needs a training step; given {described(train_step)}. Call jdp.make_train_step.")
    if steps < 1:
        raise UserError(f"steps, the optimizer steps of each run, must be at least 1; given {steps}. Use 10.")
    if jax.process_count() > 1:
        raise UserError("A proof runs in a single process; run it without jdp launch or Slurm.")
    if (count := train_step.plan.mesh.size) < 2:
        raise UserError(
            f"A proof compares one device with several, so the plan needs at least 2; given {count}. Request virtual "
            'CPU devices before any computation: --devices 8, or in Python jax.config.update("jax_platforms", "cpu") '
            'and jax.config.update("jax_num_cpu_devices", 8).'
        )


def _no_microbatches(reference: Reference, state: TrainState, batch: Batch) -> str | None:
    """Return the reason why a batch cannot be split into microbatches, if there is one."""
    value, _ = jax.eval_shape(reference.loss, state.params, state, batch, state.rng)
    if not isinstance(value, Loss):
        return "the loss returns a mean, and means of microbatches do not add up: return jdp.Loss(total, weight)"
    if state.static.adapter is not None and state.static.adapter.has_statistics:
        return "the model keeps statistics of its batch (BatchNorm), which are others for microbatches"
    return None
