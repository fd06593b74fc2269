"""Equivalence with one device: tests that a training learns the same on many devices, under every strategy.

`reference.py` is the training as a plain loop on one device, and `bounds.py` measures how far rounding alone moves its
elements. `runs.py` makes the runs and compares them, and `proof.py` reports. Model, batches, dtypes and optimizer are
the user's own, in full size. `guard/memory_check.py` refuses a proof that does not fit into memory.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jdp.base.errors import UserError
from jdp.base.machine import available_memory
from jdp.base.public import public
from jdp.base.toml import described
from jdp.core.batch import batch_rows
from jdp.core.init.trees import typed_key
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, InitFn, Loss
from jdp.guard.memory_check import check_proof
from jdp.prove.bounds import PAIRS
from jdp.prove.proof import Proof
from jdp.prove.reference import Batches, Reference, record_reference
from jdp.prove.runs import Setting, Trials, choose_trials, steps_of

OnProgress = Callable[[int, int, str], None]
"""`progress(done, total, name)`: `done` of `total` runs (with shadows) are done; `name` is next, "" at the end."""


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
