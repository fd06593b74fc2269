"""`jdp prove` on an experiment file: the same model, data order, optimizer and dtypes as `jdp train`.

Each run has the file's step; only the strategy, the microbatches and the devices differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jdp.data import NumpyBatch
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import check_for_devices
from jdp.experiment.schema.experiment import Experiment
from jdp.prove.equivalence import OnProgress, prove
from jdp.prove.proof import Proof


def prove_experiment(
    experiment: Experiment,
    *,
    steps: int = 10,
    devices: int | None = None,
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Prove that an experiment learns the same on one device and on many, whatever is sharded.

    The learning rate follows the schedule of the whole run. The runs start from random weights, even with
    `train.init_from`. `devices` is the number of this machine's devices to use; None: all.
    """
    assembly = Assembly.on_devices(experiment, jax.devices()[:devices])
    check_for_devices(experiment, assembly.mesh.size)
    return prove(
        assembly.init,
        assembly.tx,
        assembly.train_step,
        _Reader(assembly),
        steps=steps,
        wrt=experiment.train.wrt,
        rng=assembly.rng,
        accumulate=(2, experiment.train.accumulate),
        quick=quick,
        only=only,
        progress=progress,
    )


@dataclass
class _Reader:
    """Reads batches by index like training: in one pass from the step at which a run starts or resumes."""

    assembly: Assembly
    _next: int = -1
    _batches: Iterator[NumpyBatch] = field(default_factory=lambda: iter(()))

    def __call__(self, index: int) -> NumpyBatch:
        if index != self._next:
            self._batches = iter(self.assembly.train_batches(index))
        self._next = index + 1
        return next(self._batches)
