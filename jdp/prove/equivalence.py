"""Equivalence as a command: does it learn the same on one device and on many, whatever is sharded and how?

1. `reference.py`: the training as a plain loop on one device, recorded at every step.
2. `bounds.py`: shadows of it, from which follows how far rounding alone may move each element.
3. `settings.py`: which runs to make, and what keeps others from being made.
4. `trials.py`: each run, step by step against the record, until the end or the first place beyond its bound; some are
   saved in the middle and restored, onto the same setting and onto another.
5. `proof.py`: the table, or where the simplest run that parts does so: leaf, step, size.

Nothing is made smaller to fit: model, batches, dtypes and optimizer are the user's own (`room.py` says beforehand what
does not fit into memory), and what cannot be run as it is is listed with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jdp.core.batch import batch_rows
from jdp.core.batch_keys import THREEFRY
from jdp.core.init import abstract_state, init_state
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import DATA
from jdp.core.sharding.plan import MIN_SHARD_SIZE, Plan
from jdp.core.state import TrainState
from jdp.core.step import make_train_step
from jdp.core.types import Device, InitFn, LossFn
from jdp.prove.bounds import PAIRS, Closest, Record
from jdp.prove.memory_check import available_memory, check_room
from jdp.prove.proof import Difference, Proof, Run, difference_in_words
from jdp.prove.reference import Reference, Training
from jdp.prove.settings import Resume, Setting, Skip, Space, Way, causal_order, choose, in_common
from jdp.prove.trials import Batches, Made, Make, Trials, record

__all__ = ["Difference", "Made", "Proof", "Run", "Setting", "Skip", "Training", "prove", "prove_training", "space_of"]

Progress = Callable[[int, int, str], None]
"""`progress(done, total, name)`: `done` of `total` runs, shadows included, are done; `name` is next ("" at the end)."""


def prove(
    init: InitFn,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    batches: Batches,
    *,
    steps: int = 10,
    precision: str | Precision = "fp32",
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
    only: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Proof:
    """Run a training under every strategy, both partitionings, other device counts and microbatches, and resumed.

    Args:
        init, tx, loss_fn, precision, clip_norm, wrt, sync_batch_norm, rules, min_shard_size: as for `jdp.init_state`,
            `jdp.make_train_step` and `jdp.Plan`.
        batches: `batches(index)` -> the global batch that the step after `index` consumed batches gets, as NumPy
            arrays; the same for the same index, and of the same shapes for all.
        steps: optimizer steps of each run; saving and resuming happens after half of them.
        accumulate: numbers of microbatches; 1 is added.
        devices: to run on, or how many of this machine's; None: all of them. The counts 1, 2, 4, 8 and all are run.
        rng: as for `jdp.init_state`; None: `jax.random.key(0)`.
        mesh: axis -> size, as `jdp.make_mesh` takes them; `data` takes what the others leave. None: `data` alone.
        full: every combination, not only every pair of choices (see `jdp.prove.settings`).
        only: keep the runs whose names hold this text, or one of these, such as "zero3" or "8 devices".
        progress: called before each run, and at the end.

    Raises:
        ValueError: fewer than two devices; not enough memory; an argument out of range; nothing to run.
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
            check_loss=False,  # how losses differ is what a proof finds out
        )
        return Made(
            step,
            lambda: init_state(init, tx, plan, rng=key, wrt=wrt),
            lambda: abstract_state(init, tx, plan, rng=key, wrt=wrt),
        )

    return prove_training(training, make, batches, space, steps=steps, full=full, only=only, progress=progress)


def prove_training(
    training: Training,
    make: Make,
    batches: Batches,
    space: Space,
    *,
    own: Setting | None = None,
    steps: int = 10,
    full: bool = False,
    only: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Proof:
    """`prove`, with the training already taken apart, and whatever makes a plan and a step of it for a setting.

    Args:
        own: the setting the user trains under, which is run first and resumed; None: `zero3` on all devices.
    """
    if steps < 1:
        raise ValueError(f"steps is how many optimizer steps each run takes, at least 1; got {steps}.")
    count = len(space.devices)
    reference, first = Reference(training, space.devices[0]), batches(0)
    rows = batch_rows(first)
    abstract = reference.abstract(first)
    check_room(abstract, devices=count, steps=steps, precision=training.precision, available=available_memory())
    space = _limited(space, rows, reference, abstract)
    texts = (only,) if isinstance(only, str) else tuple(only)
    runs, skips = choose(space, own or Setting("zero3", "auto", count), steps=steps, full=full, only=texts)

    say = _Count(progress, total=1 + 2 * PAIRS + len(runs))
    trials = Trials(make, batches, steps, record(reference, batches, steps, say))
    if not math.isfinite(loss := float(trials.record.values[1]["loss"])):
        raise ValueError(f"One device's own loss is {loss} at the first step: there is nothing to compare with.")
    found: dict[Way, Closest] = {}
    for run in runs:
        say(str(run))
        found[run] = trials.run(run)
    for run in _suspects(found):
        say.total += 1
        say(str(run))
        found[run] = trials.run(run)
    say("")
    proven = tuple(Run(str(run), at.ratio <= 1, at.difference, at.bound, at) for run, at in found.items())
    notes = (*_notes(training.rng, space.devices[0]), *trials.record.notes())
    return Proof(all(run.equal for run in proven), proven, _first(found, trials.record), tuple(skips), steps, notes)


def _suspects(found: Mapping[Way, Closest]) -> list[Setting]:
    """The settings of resumed runs that part, where they were not run by themselves: the fault may be theirs."""
    resumed = [run for run, at in found.items() if isinstance(run, Resume) and at.ratio > 1]
    settings = dict.fromkeys(setting for run in resumed for setting in (run.first, run.second))
    return [setting for setting in settings if setting not in found]


def _first(found: Mapping[Way, Closest], held: Record) -> Difference | None:
    """The first cause among the runs that part: what they have in common is looked for among the plain ones."""
    parted = [run for run, at in found.items() if at.ratio > 1]
    if not parted:
        return None
    run = min(parted, key=causal_order)  # of equals the first that was run
    plain = [each for each in found if isinstance(each, Setting)]
    common = in_common([s for s in plain if s in parted], [s for s in plain if s not in parted])
    at = found[run]
    return difference_in_words(
        str(run),
        at,
        leaves=len(held.values[at.step]),
        resumed_at=run.at if isinstance(run, Resume) else None,
        parted=(len(parted), len(found)),
        common=common,
    )


@dataclass
class _Count:
    """Calls `progress` as run after run begins."""

    progress: Progress | None
    total: int
    done: int = -1

    def __call__(self, name: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def space_of(devices: Sequence[Device] | int | None, accumulate: Sequence[int], mesh: Mapping[str, int]) -> Space:
    """What could be run on these devices, as far as the batch and the loss allow; see `prove` for the arguments."""
    if jax.process_count() > 1:
        raise ValueError("A proof runs in one process, on its own devices; run it without jdp launch or Slurm.")
    here = jax.devices()
    if isinstance(devices, int) and devices > len(here):
        raise ValueError(f"devices is how many of this machine's {len(here)} to use; got {devices}. {MORE_DEVICES}")
    chosen = here if devices is None else here[:devices] if isinstance(devices, int) else list(devices)
    if len(chosen) < 2:
        raise ValueError(
            f"A proof compares one device with several, so it takes at least 2; got {len(chosen)}. {MORE_DEVICES}"
        )
    if any(k < 1 for k in accumulate):
        raise ValueError(f"accumulate lists numbers of microbatches, at least 1 each; got {list(accumulate)}.")
    counts = tuple(sorted({1, *(n for n in (2, 4, 8) if n < len(chosen)), len(chosen)}))
    return Space(chosen, counts, tuple(sorted({1, *accumulate})), mesh)


MORE_DEVICES = (
    "Ask for virtual CPU devices before anything is computed: --devices 8, or in Python "
    'jax.config.update("jax_platforms", "cpu") and jax.config.update("jax_num_cpu_devices", 8).'
)


def _limited(space: Space, rows: int, reference: Reference, state: TrainState) -> Space:
    """What could be run, given the batch's rows, the loss and the model."""
    no_manual = (
        None if reference.returns_loss else "the loss returns a mean, and manual takes a jdp.Loss: a sum and a weight"
    )
    no_parts = None
    adapter = state.static.adapter
    if adapter is not None and adapter.has_statistics:
        why = "the model keeps statistics of its batch (BatchNorm)"
        if not reference.training.sync_batch_norm or adapter.unsynchronised:
            no_manual = f"{why}, which manual takes over each device's own rows: another computation, not another order"
        no_parts = f"{why}, which are of each microbatch then: another computation, not another order"
    return replace(space, rows=rows, no_manual=no_manual, no_parts=no_parts)


def _notes(rng: jax.Array, device: Device) -> list[str]:
    """What limits a proof with this key and on these devices."""
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
