"""`jdp plan`: compile an experiment's step in every variant asked for, for one target or several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jdp.cli.options import UsageError, choose_target_platform, counts, words
from jdp.cli.plan_options import Options

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport


@dataclass(frozen=True)
class Plans:
    """An experiment's plan for each target."""

    name: str  # the experiment's
    stem: str  # of its file
    reports: tuple["PlanReport", ...]  # one a target
    described: tuple[str, ...]  # the experiment in a sentence, for each target


def compile_plans(options: Options, overrides: dict[str, str], targets: Sequence[str | None]) -> Plans:
    """Compile every candidate for every target."""
    from jdp.experiment.file import load

    assert options.file is not None
    strategies = words(options.strategy, "--strategy")
    experiment = load(options.file, overrides)
    choose_target_platform(targets, experiment.devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.plan import candidates_of, described_batch, with_hosts
    from jdp.foresight.foresee import make_plan_report
    from jdp.foresight.targets.this_machine import target_of

    accumulate = counts(options.accumulate, "--accumulate") or [experiment.train.accumulate]
    hosts = None if options.host_memory is None else round(options.host_memory * 2**30)
    resolved = [target_of(name) for name in targets]
    candidates = [
        candidates_of(experiment, target, strategies=strategies, accumulate=accumulate) for target in resolved
    ]
    reports = list["PlanReport"]()
    for target, tried in zip(resolved, candidates, strict=True):
        with Progress() as progress:
            report = make_plan_report(tried, target, cache=not options.no_cache, progress=progress.compiling)
        reports.append(with_hosts(report, experiment, tried, target, hosts))
    if all(estimate.error is not None for report in reports for estimate in report.estimates):
        raise UsageError("\n".join(dict.fromkeys(note for report in reports for note in report.notes)))
    model = f"{experiment.model.name or experiment.model.make}, {experiment.precision}"
    described = tuple(f"{model}, batches of {described_batch(tried[0].batch)}" for tried in candidates)
    return Plans(experiment.name, options.file.stem, tuple(reports), described)
