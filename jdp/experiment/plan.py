"""An experiment's step on a target's devices, in every requested variant, as foresight compiles it.

An assembly on the target's devices gives the step and its abstract operands; from there `jdp plan` and `jdp verify` go
through the same functions as `jdp.foresee` and `jdp.verify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jdp.base.machine import memory_bytes
from jdp.checkpoint.format.content import stored_form
from jdp.checkpoint.format.trees import Content
from jdp.checkpoint.memory.layout import layout
from jdp.core.batch import batch_rows
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import axes_of
from jdp.core.types import Batch
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.advice.advice import advise
from jdp.foresight.candidates.meshes import MeshSearch, search_axes
from jdp.foresight.forecast import PlanReport, Settings
from jdp.foresight.foresee import candidates, count_batch
from jdp.foresight.memory.host import HostMemory
from jdp.foresight.targets.relocate import Candidate
from jdp.foresight.targets.resolve import Target


def candidates_of(
    experiment: Experiment,
    target: Target,
    *,
    strategies: Sequence[str],
    accumulate: Sequence[int],
    remat: str | None = None,
    hybrid: bool = True,
    search: MeshSearch | None = None,
) -> list[Candidate]:
    """Return the experiment's step under each strategy and number of microbatches, on the target's devices."""
    assembly = Assembly.on_devices(experiment, list(target.devices))
    return candidates(
        assembly.train_step,
        assembly.abstract_state(),
        assembly.abstract_batch(),
        target,
        strategies=strategies,
        accumulate=accumulate,
        remat=remat,
        hybrid=hybrid and search is None and experiment.mesh == {DATA: -1},
        others=[] if search is None else [(way.strategy, way.axes) for way in search.kept],
    )


def search_meshes(
    experiment: Experiment, target: Target, *, strategies: Sequence[str], accumulate: Sequence[int]
) -> MeshSearch:
    """Choose strategies on other meshes of a target that are worth compiling (`foresight/candidates/meshes.py`)."""
    if experiment.local_steps.steps is not None:
        raise ExperimentError(
            "[local_steps] trains each replica by itself, so another mesh would learn something else; given --axes: "
            "remove it"
        )
    assembly = Assembly.on_devices(experiment, list(target.devices))
    batch, config = assembly.abstract_batch(), experiment.model.config
    heads = {name: getattr(config, name, None) for name in ("heads", "key_value_heads")}
    over = {
        axis
        for path, rule in experiment.rules.items()
        if "attention" in path
        for entry in rule
        for axis in axes_of(entry or None)
    }

    def refuse(axes: Mapping[str, int]) -> str | None:
        for axis, (name, count) in itertools.product(over & {*axes}, heads.items()):
            if isinstance(count, int) and count % axes[axis]:
                return f"{axis}={axes[axis]} does not divide the {count} {name.replace('_', ' ')}"
        return None

    return search_axes(
        assembly.train_step,
        assembly.abstract_state(),
        batch,
        target,
        strategies=strategies,
        accumulate=accumulate,
        tokens=count_batch(batch)[0],
        refuse=refuse,
    )


def described_batch(batch: Batch) -> str:
    """Return a global batch in words: "64 × 2048 tokens", "64 images of 224×224×3" or "64 × 20 features".

    For a plug-in's data it names the first array.
    """
    if "images" in batch:
        rows, *shape = batch["images"].shape
        return f"{rows} images of {'×'.join(map(str, shape))}"
    name = next((name for name in ("tokens", "features") if name in batch), min(batch))
    return f"{' × '.join(map(str, batch[name].shape))} {name}"


def settings_of(experiment: Experiment, candidate: Candidate, *, max_batch: bool = False) -> Settings:
    """Return the settings of an experiment, for the advice on one of its candidates."""
    model, step = experiment.model.config, candidate.step
    return Settings(
        precision=experiment.precision,
        compiler=candidate.compiler,
        remat=getattr(model, "remat", "") or ("none" if hasattr(model, "remat") else ""),
        scan=getattr(model, "scan", False),
        attention=getattr(model, "attention", None),
        rows=batch_rows(candidate.batch) // (step.plan.batch_shards * step.microbatches),
        max_batch=max_batch,
    )


def with_hosts(
    report: PlanReport, experiment: Experiment, tried: Sequence[Candidate], target: Target, available: int | None
) -> PlanReport:
    """Return a report with what a host's memory holds, if the experiment keeps copies of the state there."""
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


def advised(report: PlanReport, settings: Sequence[Settings]) -> PlanReport:
    """Return a report whose advice leaves out what is set already."""
    estimates = tuple(replace(each, settings=one) for each, one in zip(report.estimates, settings, strict=True))
    choice, why = advise(estimates)
    return replace(report, estimates=estimates, choice=choice, why=why)
