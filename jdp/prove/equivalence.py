"""Equivalence with one device: does a training learn the same on many devices, whatever is sharded and how?

1. `reference.py`: the training as a plain loop on one device, recorded at every step.
2. `bounds.py`: shadows of it, which show how far rounding alone may move each element.
3. `settings.py`: which runs to make, and what prevents others.
4. `trials.py`: each run, compared with the record until the end or the first element beyond its bound. Some are saved
   in the middle and restored, under the same setting and under another.
5. `proof.py`: the table, or where the simplest differing run first differs: step, leaf, size.

Nothing is made smaller to fit: model, batches, dtypes and optimizer are the user's own. `guard/memory_check.py` refuses
what does not fit into memory, and what cannot be run unchanged is listed with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jdp.base.machine import available_memory
from jdp.base.words import PrecisionName
from jdp.core.batch import batch_rows
from jdp.core.compiling.options import Compiler, CompilerValue
from jdp.core.init.train_state import abstract_state, init_state
from jdp.core.make_step import make_train_step
from jdp.core.plan import MIN_SHARD_SIZE, Plan
from jdp.core.precision import Precision
from jdp.core.random.row_keys import THREEFRY
from jdp.core.sharding.axes import DATA
from jdp.core.state import TrainState
from jdp.core.types import Device, InitFn, LossFn
from jdp.guard.memory_check import check_proof
from jdp.prove.bounds import PAIRS, Closest, Record
from jdp.prove.proof import Difference, Proof, Run, difference_in_words
from jdp.prove.reference import Reference, Training
from jdp.prove.settings import Resume, RunSpec, Setting, Skip, Space, causal_order, choose_runs, common_choice
from jdp.prove.trials import Batches, Made, Make, Trials, record_reference

__all__ = ["Difference", "Made", "Proof", "Run", "Setting", "Skip", "Training", "prove", "prove_training", "space_of"]

QUICK: dict[str, CompilerValue] = {"xla_backend_optimization_level": 0}
"""Compiles in half of the time on CPU. What is proven is the same: XLA partitions the program before that."""

OnProgress = Callable[[int, int, str], None]
"""`progress(done, total, name)`: `done` of `total` runs, shadows included, are done; `name` is next, "" at the end."""


def prove(
    init: InitFn,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    batches: Batches,
    *,
    steps: int = 10,
    precision: PrecisionName | Precision = "fp32",
    clip_norm: float | None = None,
    wrt: Any = None,
    sync_batch_norm: bool = True,
    accumulate: Sequence[int] = (1, 2),
    devices: Sequence[Device] | int | None = None,
    rng: jax.Array | None = None,
    mesh: Mapping[str, int] | None = None,
    rules: Sequence[tuple[str, PartitionSpec]] = (),
    min_shard_size: int = MIN_SHARD_SIZE,
    full: bool = False,
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Compare a training on one device with itself under other strategies, partitionings and device counts.

        >>> batches = lambda index: batch
        >>> proof = jdp.prove.prove(init, optax.adam(1e-3), loss_fn, batches, steps=2, devices=2, quick=True)
        >>> proof.equal, [run.name for run in proof.runs]
        (True, ['resume after step 1: zero3 auto 2 devices K=1, onto zero2 manual 2 devices K=2'])

    Every run takes a few real optimizer steps. After each, its loss and every leaf of its state are compared with those
    of a plain loop on one device. They are equal if rounding, as measured on this training, explains the difference.
    Two runs are saved in the middle and resumed. The runs have every pair of choices at least once: strategy,
    partitioning, number of devices, number of microbatches.

    Args:
        init: returns the model from a key, as for `jdp.init_state`.
        tx: the optimizer.
        loss_fn: the loss, as for `jdp.make_train_step`.
        batches: `batches(index)` returns the global batch of the step after `index` consumed batches, as NumPy arrays:
            always the same for the same index, and of equal shapes for all.
        steps: optimizer steps of each run; a resumed run is saved after half of them.
        precision: as for `jdp.make_train_step`.
        clip_norm: largest global gradient norm; None: no clipping.
        wrt: which parameters are trained, as for `jdp.init_state`; None: all.
        sync_batch_norm: as for `jdp.make_train_step`.
        accumulate: numbers of microbatches a step to run with; 1 is added.
        devices: the devices, or how many of this machine's; None: all of them. The counts 1, 2, 4, 8 and all are run.
        rng: key of the initial weights and of every step; None: `jax.random.key(0)`.
        mesh: axis -> size, as `jdp.make_mesh` takes them; `data` takes what the others leave. None: `data` alone. Give
            it for a model with rules over an axis of its own.
        rules: as for `jdp.Plan`.
        min_shard_size: as for `jdp.Plan`, in elements.
        full: run every combination, not only every pair of choices, when a pair has shown a difference.
        quick: make one run only, for a check in minutes: the own setting, resumed under the one that differs most for
            the last step, with LLVM's optimisations off.
        only: keep the runs whose names have this text, or one of these, such as "zero3" or "8 devices". Give it to
            repeat a run that differs.
        progress: called before each run, and at the end, with the number of runs done, of all, and the next one's name.

    Returns:
        Whether all runs are equal to the reference, each run, and the first difference; `str()` is a table.

    Raises:
        ValueError: fewer than two devices; not enough memory; an argument out of range; nothing to run; several
            processes; or a loss that is not finite at the first step.
    """
    key = jax.random.key(0) if rng is None else rng
    typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    key = key if typed else jax.random.wrap_key_data(key)
    training = Training(init, tx, loss_fn, key, Precision.of(precision), clip_norm, wrt, sync_batch_norm)
    space = space_of(devices, accumulate, mesh or {DATA: -1})

    def make(setting: Setting) -> Made:
        plan = Plan(space.mesh(setting.devices), setting.strategy, rules=rules, min_shard_size=min_shard_size)
        step = make_train_step(
            loss_fn,
            plan,
            accumulate=setting.accumulate,
            precision=training.precision,
            partitioning=setting.partitioning,
            clip_norm=clip_norm,
            sync_batch_norm=sync_batch_norm,
            check_loss=False,  # the proof itself compares losses
        )
        return Made(
            step,
            lambda: init_state(init, tx, plan, rng=key, wrt=wrt),
            lambda: abstract_state(init, tx, plan, rng=key, wrt=wrt),
        )

    return prove_training(
        training, make, batches, space, steps=steps, full=full, quick=quick, only=only, progress=progress
    )


def prove_training(
    training: Training,
    make: Make,
    batches: Batches,
    space: Space,
    *,
    own: Setting | None = None,
    steps: int = 10,
    full: bool = False,
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Prove a training whose plans and steps the caller builds; `prove` builds them itself.

        >>> from jdp.prove import Made, Training
        >>> tx, key = optax.adam(1e-3), jax.random.key(0)
        >>> def make(setting):
        ...     plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[: setting.devices]), setting.strategy)
        ...     step = jdp.make_train_step(loss_fn, plan, partitioning=setting.partitioning, donate=False)
        ...     new = lambda: jdp.init_state(init, tx, plan, rng=key)
        ...     return Made(step, new, lambda: jdp.abstract_state(init, tx, plan, rng=key))
        >>> space = jdp.prove.space_of(2, accumulate=[1], mesh={"data": -1})
        >>> training = Training(init, tx, loss_fn, key, jdp.Precision())
        >>> jdp.prove.prove_training(training, make, lambda index: batch, space, steps=2, only="zero1 auto").equal
        True

    Args:
        training: what the reference trains.
        make: builds the training under a setting.
        space: the settings that could be run, of `space_of`.
        own: the setting the user trains under, which is run first and resumed; None: `zero3` on all devices.
        batches, steps, full, quick, only, progress: as for `prove`.

    Returns:
        Whether all runs are equal to the reference, each run, and the first difference.

    Raises:
        ValueError: not enough memory; `steps` is out of range; nothing to run; or a loss that is not finite at the
            first step.
    """
    if steps < 1:
        raise ValueError(f"steps is how many optimizer steps each run takes, at least 1; given {steps}. Take 10.")
    count = len(space.devices)
    reference, first = Reference(training, space.devices[0], QUICK if quick else {}), batches(0)
    rows = batch_rows(first)
    abstract = reference.abstract_state(first)
    check_proof(abstract, devices=count, steps=steps, precision=training.precision, available=available_memory())
    space = _with_limits(space, rows, reference, abstract)
    texts = (only,) if isinstance(only, str) else tuple(only)
    own = own or Setting("zero3", "auto", count)
    runs, skips = choose_runs(space, own, steps=steps, full=full, only=texts, quick=quick)

    count_run = _ProgressCounter(progress, total=1 + 2 * PAIRS + len(runs))
    record = record_reference(reference, batches, steps, count_run)
    trials = Trials(_quickly(make) if quick else make, batches, steps, record)
    if not math.isfinite(loss := float(trials.record.values[1]["loss"])):
        raise ValueError(f"One device's own loss is {loss} at the first step: there is nothing to compare with.")
    results = _run_all(trials, runs, count_run)
    proven = tuple(Run(str(run), at.ratio <= 1, at.difference, at.bound, at) for run, at in results.items())
    first_difference = _first_difference(results, trials.record)
    notes = (*_notes(training.rng, space.devices[0]), *trials.record.notes())
    notes += ("--quick: compiled with LLVM's optimisations off, which jdp train has on",) * quick
    return Proof(all(run.equal for run in proven), proven, first_difference, tuple(skips), steps, notes)


def _run_all(trials: Trials, runs: Sequence[RunSpec], count_run: _ProgressCounter) -> dict[RunSpec, Closest]:
    """Return the result of each run, and of the settings of differing resumed runs: the fault may be theirs."""
    results: dict[RunSpec, Closest] = {}
    for run in runs:
        count_run(str(run))
        results[run] = trials.run(run)
    resumed = [run for run, at in results.items() if isinstance(run, Resume) and at.ratio > 1]
    suspects = dict.fromkeys(setting for run in resumed for setting in (run.first, run.second))
    for setting in [setting for setting in suspects if setting not in results]:
        count_run.total += 1
        count_run(str(setting))
        results[setting] = trials.run(setting)
    count_run("")
    return results


def _quickly(make: Make) -> Make:
    """Have the steps compiled with `QUICK` too."""

    def made(setting: Setting) -> Made:
        plain = make(setting)
        compiler = Compiler.of({**dict(plain.step.compiler.options), **QUICK})
        return replace(plain, step=plain.step.changed(compiler=compiler))

    return made


def _first_difference(results: Mapping[RunSpec, Closest], record: Record) -> Difference | None:
    """Describe the differing run that is the likeliest cause of the others; None if no run differs."""
    differing = [run for run, at in results.items() if at.ratio > 1]
    if not differing:
        return None
    run = min(differing, key=causal_order)  # of equals the first that was run
    settings = [each for each in results if isinstance(each, Setting)]
    common = common_choice([s for s in settings if s in differing], [s for s in settings if s not in differing])
    at = results[run]
    return difference_in_words(
        str(run),
        at,
        leaves=len(record.values[at.step]),
        resumed_at=run.at if isinstance(run, Resume) else None,
        differing=(len(differing), len(results)),
        common=common,
    )


@dataclass
class _ProgressCounter:
    """Counts runs as they begin, and calls `progress`."""

    progress: OnProgress | None
    total: int
    done: int = -1

    def __call__(self, name: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def space_of(devices: Sequence[Device] | int | None, accumulate: Sequence[int], mesh: Mapping[str, int]) -> Space:
    """Return the settings that could be run on these devices, before limits of the batch and the loss.

        >>> space = jdp.prove.space_of(4, accumulate=[2], mesh={"data": -1})
        >>> space.counts, space.accumulates
        ((1, 2, 4), (1, 2))

    Args:
        devices: the devices, or how many of this machine's; None: all of them.
        accumulate: numbers of microbatches a step; 1 is added.
        mesh: axis -> size; `data` takes what the others leave.

    Raises:
        ValueError: several processes, fewer than two devices, more than there are, or fewer than one microbatch.
    """
    if jax.process_count() > 1:
        raise ValueError("A proof runs in one process, on its own devices; run it without jdp launch or Slurm.")
    every = jax.devices()
    if isinstance(devices, int) and devices > len(every):
        raise ValueError(f"devices is how many of this machine's {len(every)} to use; given {devices}. {MORE_DEVICES}")
    chosen = every if devices is None else every[:devices] if isinstance(devices, int) else list(devices)
    if len(chosen) < 2:
        raise ValueError(
            f"A proof compares one device with several, so it takes at least 2; given {len(chosen)}. {MORE_DEVICES}"
        )
    if any(k < 1 for k in accumulate):
        raise ValueError(
            f"accumulate lists numbers of microbatches, at least 1 each; given {list(accumulate)}. Give 1 or more."
        )
    counts = tuple(sorted({1, *(n for n in (2, 4, 8) if n < len(chosen)), len(chosen)}))
    return Space(chosen, counts, tuple(sorted({1, *accumulate})), mesh)


MORE_DEVICES = (
    "Ask for virtual CPU devices before anything is computed: --devices 8, or in Python "
    'jax.config.update("jax_platforms", "cpu") and jax.config.update("jax_num_cpu_devices", 8).'
)


def _with_limits(space: Space, rows: int, reference: Reference, state: TrainState) -> Space:
    """Return `space` with the limits of the batch's rows, the loss and the model."""
    no_manual = (
        None if reference.returns_loss else "the loss returns a mean, and manual takes a jdp.Loss: a sum and a weight"
    )
    no_microbatches = None
    adapter = state.static.adapter
    if adapter is not None and adapter.has_statistics:
        why = "the model keeps statistics of its batch (BatchNorm)"
        if not reference.training.sync_batch_norm or adapter.unsynchronised:
            no_manual = f"{why}, which manual takes over each device's own rows: another computation, not another order"
        no_microbatches = f"{why}, which are of each microbatch then: another computation, not another order"
    return replace(space, rows=rows, no_manual=no_manual, no_microbatches=no_microbatches)


def _notes(rng: jax.Array, device: Device) -> list[str]:
    """Return sentences about what a proof with this key and on these devices cannot show."""
    notes: list[str] = []
    if str(jax.random.key_impl(rng)) != THREEFRY:
        notes.append(
            f"the PRNG {jax.random.key_impl(rng)} cannot be indexed by row, so random masks depend on the mesh: "
            "use jax.random.key(seed)"
        )
    if device.platform != "cpu":
        notes.append(
            f"the bounds are for virtual CPU devices; where {device.platform} multiplies fp32 in TF32 or bf16, set "
            'jax.config.update("jax_default_matmul_precision", "highest")'
        )
    return notes
