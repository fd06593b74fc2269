"""`jdp prove` on an experiment file: the same model, data order, optimizer and dtypes as `jdp train`.

Each run is an `Assembly` of the file with only `strategy`, `partitioning`, `train.accumulate` and the devices changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jdp.core.precision import Precision
from jdp.core.types import Device
from jdp.data import NumpyBatch, global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import check_for_devices
from jdp.experiment.schema.experiment import Experiment
from jdp.prove.equivalence import Made, Progress, Proof, Setting, Training, prove_training, space_of


def prove_experiment(
    experiment: Experiment,
    *,
    steps: int = 10,
    devices: Sequence[Device] | int | None = None,
    full: bool = False,
    only: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Proof:
    """Prove an experiment; see `jdp.prove.prove` for the arguments.

    The learning rate's schedule stays that of the whole run: `steps` only says where to stop. Weights are the initial
    ones, whatever `train.init_from` says.

    Raises:
        ExperimentError: the file's model cannot read its data.
        ValueError: what `jdp.prove.prove` raises.
    """
    space = space_of(devices, (1, 2, experiment.train.accumulate), experiment.mesh)
    whole = Assembly.on_devices(experiment, list(space.devices))
    training = Training(
        whole.init,
        whole.tx,
        whole.loss,
        whole.rng,
        Precision.of(experiment.precision),
        experiment.optimizer.clip_norm,
        whole.wrt,
        experiment.sync_batch_norm,
    )

    def make(setting: Setting) -> Made:
        train = experiment.train.model_copy(update={"accumulate": setting.accumulate})
        changed = {"strategy": setting.strategy, "partitioning": setting.partitioning, "train": train}
        assembly = Assembly(experiment.model_copy(update=changed), space.mesh(setting.devices))
        return Made(assembly.train_step, assembly.state, assembly.abstract_state)

    check_for_devices(experiment, len(space.devices))
    train_step = whole.train_step
    if train_step.requested is None:  # as training settles it
        jax.eval_shape(train_step, whole.abstract_state(), whole.abstract_batch())
    own = Setting(
        experiment.strategy, train_step.partitioning or "auto", len(space.devices), experiment.train.accumulate
    )
    return prove_training(
        training, make, _Reader(whole), space, own=own, steps=steps, full=full, only=only, progress=progress
    )


@dataclass
class _Reader:
    """Batches by index, read as training reads them: in one go from where a run starts or resumes."""

    assembly: Assembly
    _next: int = -1
    _batches: Iterator[NumpyBatch] = field(default_factory=lambda: iter(()))

    def __call__(self, index: int) -> NumpyBatch:
        if index != self._next:
            self._batches = iter(self._from(index))
        self._next = index + 1
        return next(self._batches)

    def _from(self, index: int) -> Any:
        chosen = self.assembly.experiment
        return global_batches(
            self.assembly.data.train,
            batch_size=chosen.train.batch_size,
            seed=chosen.seed,
            start=index,
            shuffle=chosen.data.shuffle,
        )
