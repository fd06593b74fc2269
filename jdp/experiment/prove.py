"""`jdp prove` on an experiment file: the same model, data order, optimizer and dtypes as `jdp train`.

Each run is an `Assembly` of the file in which only `strategy`, `partitioning`, `train.accumulate` and the devices
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jdp.core.types import Device
from jdp.data import NumpyBatch
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import check_for_devices
from jdp.experiment.schema.experiment import Experiment
from jdp.prove.equivalence import Made, OnProgress, Proof, Setting, Training, prove_training, space_of


def prove_experiment(
    experiment: Experiment,
    *,
    steps: int = 10,
    devices: Sequence[Device] | int | None = None,
    full: bool = False,
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Prove that an experiment learns the same on one device and on many, whatever is sharded.

    The learning rate follows the schedule of the whole run. The weights are the initial ones, for any
    `train.init_from`.
    """
    space = space_of(devices, (1, 2, experiment.train.accumulate), experiment.mesh)
    own = Assembly.on_devices(experiment, list(space.devices))
    training = Training(
        own.init,
        own.tx,
        own.loss,
        own.rng,
        own.precision,
        experiment.optimizer.clip_norm,
        experiment.train.wrt,
    )

    def make(setting: Setting) -> Made:
        train = experiment.train.model_copy(update={"accumulate": setting.accumulate})
        changed = {"strategy": setting.strategy, "partitioning": setting.partitioning, "train": train}
        assembly = Assembly(experiment.model_copy(update=changed), space.mesh(setting.devices))
        step = assembly.train_step.changed(check_loss=False)  # the proof itself compares losses
        return Made(step, assembly.state, assembly.abstract_state)

    check_for_devices(experiment, len(space.devices))
    step, count = own.train_step, experiment.train.accumulate
    if step.requested is None:  # tracing settles the partitioning, as in training
        jax.eval_shape(step, own.abstract_state(), own.abstract_batch())
    setting = Setting(experiment.strategy, step.partitioning or "auto", len(space.devices), count)
    return prove_training(
        training,
        make,
        _Reader(own),
        space,
        own=setting,
        steps=steps,
        full=full,
        quick=quick,
        only=only,
        progress=progress,
    )


@dataclass
class _Reader:
    """Reads batches by index, as training does: in one pass from the step at which a run starts or resumes."""

    assembly: Assembly
    _next: int = -1
    _batches: Iterator[NumpyBatch] = field(default_factory=lambda: iter(()))

    def __call__(self, index: int) -> NumpyBatch:
        if index != self._next:
            self._batches = iter(self.assembly.train_batches(index))
        self._next = index + 1
        return next(self._batches)
