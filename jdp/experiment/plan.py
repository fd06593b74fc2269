"""An experiment's step for foresight to compile, in every requested variant, and for `jdp prove` to run.

An assembly on a target's devices makes the step and its abstract operands; `jdp plan` and `jdp verify` then call the
same functions as `jdp.foresee` and `jdp.verify`. `jdp prove` has the same model, data order, optimizer and dtypes as
`jdp train`; only the strategy, the microbatches and the devices differ between its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from jdp.base.machine import memory_bytes
from jdp.checkpoint.content import Content, stored_form
from jdp.checkpoint.memory.parts import layout
from jdp.core.types import Batch
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import check_for_devices
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.foresee import PlanReport, candidates
from jdp.foresight.memory import HostMemory
from jdp.foresight.targets.relocate import Candidate
from jdp.foresight.targets.resolve import Target
from jdp.prove.equivalence import OnProgress, Proof, prove


def candidates_of(
    experiment: Experiment, target: Target, *, strategies: Sequence[str], accumulate: Sequence[int]
) -> list[Candidate]:
    """Return the experiment's step under each strategy and number of microbatches, on the target's devices."""
    assembly = Assembly.on_devices(experiment, list(target.devices))
    return candidates(
        assembly.training.step,
        assembly.training.abstract_state,
        assembly.inputs.abstract_batch,
        target,
        strategies=strategies,
        accumulate=accumulate,
    )


def described_batch(batch: Batch) -> str:
    """Return a global batch in words: "64 × 2048 tokens", "64 images of 224×224×3" or "64 × 20 features".

    For data.make, the unit is the name of the first array.
    """
    if "images" in batch:
        rows, *shape = batch["images"].shape
        return f"{rows} images of {'×'.join(map(str, shape))}"
    name = next((name for name in ("tokens", "features") if name in batch), min(batch))
    return f"{' × '.join(map(str, batch[name].shape))} {name}"


def with_hosts(
    report: PlanReport, experiment: Experiment, tried: Sequence[Candidate], target: Target, available: int | None
) -> PlanReport:
    """Add the hosts' memory to a report if the experiment keeps copies of the state there."""
    if not experiment.guard.keep_in_memory:
        return report
    if available is None and target.kind == "cpu":
        available = memory_bytes()
    hosts = list(range(target.hosts))

    def held(candidate: Candidate, offloaded: int) -> HostMemory:
        leaves = Content.of(candidate.state).leaves
        arrays = {path: stored_form(leaf, path) for path, leaf in leaves.items() if leaf.size}
        staging = sum(x.size * x.dtype.itemsize for x in arrays.values()) // target.hosts
        copies = 2 * layout(arrays, hosts, 0).host_bytes
        return HostMemory(copies, staging, offloaded * target.per_host, available, target.per_host)

    estimates = tuple(
        replace(each, host=held(one, each.memory.host)) if each.memory is not None else each
        for one, each in zip(tried, report.estimates, strict=True)
    )
    return replace(report, estimates=estimates)


def prove_experiment(
    experiment: Experiment,
    *,
    steps: int = 10,
    devices: int | None = None,
    quick: bool = False,
    only: str | Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Proof:
    """Prove that an experiment learns the same on one device and on many, however the state is sharded.

    The learning rate follows the schedule of the whole run. The runs start from random weights, even with
    `train.init_from`. `devices` is the number of this machine's devices to use; None: all.
    """
    assembly = Assembly.on_devices(experiment, jax.devices()[:devices])
    check_for_devices(experiment, assembly.mesh.size)
    return prove(
        assembly.training.init,
        assembly.training.tx,
        assembly.training.step,
        lambda index: next(iter(assembly.inputs.train_batches(index))),
        steps=steps,
        wrt=experiment.train.wrt,
        rng=assembly.training.rng,
        accumulate=(2, experiment.train.accumulate),
        quick=quick,
        only=only,
        progress=progress,
    )
