"""`jdp plan`: compile an experiment's step in every variant asked for, for one target or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jdp.cli.options import UsageError, choose_target_platform, counts, words
from jdp.cli.plan_costs import GivenFailures, with_bill
from jdp.cli.plan_options import Options
from jdp.models.configs.choices import AUTO

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport


@dataclass(frozen=True)
class Plans:
    """An experiment's plan for each target."""

    name: str  # the experiment's
    stem: str  # of its file
    reports: tuple["PlanReport", ...]  # one a target
    described: tuple[str, ...]  # the experiment in a sentence, for each target


def compile_plans(
    options: Options, overrides: dict[str, str], failures: GivenFailures | None, targets: Sequence[str | None]
) -> Plans:
    """Compile every candidate for every target."""
    from jdp.experiment.file import load

    assert options.file is not None
    check_axes_free(options, overrides)
    strategies, remats = words(options.strategy, "--strategy"), remats_of(options)
    own = load(options.file, overrides)
    choose_target_platform(targets, own.devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.plan import (
        advised,
        candidates_of,
        described_batch,
        search_meshes,
        settings_of,
        with_hosts,
    )
    from jdp.experiment.remat import ladder
    from jdp.foresight.foresee import make_plan_report
    from jdp.foresight.targets.this_machine import target_of

    automatic = [] if remats else [*ladder(own)]
    policies: list[str | None] = [*(remats or automatic or [None])]
    settings = [overrides | ({} if remat is None else {"model.remat": remat}) for remat in policies]
    experiments = dict(zip(policies, (load(options.file, each) for each in settings), strict=True))
    first = experiments[policies[0]]
    accumulate = counts(options.accumulate, "--accumulate") or [first.train.accumulate]
    resolved = [target_of(name) for name in targets]
    searches = [
        search_meshes(first, target, strategies=strategies, accumulate=accumulate) if options.axes else None
        for target in resolved
    ]
    candidates = [
        [
            candidate
            for remat, each in experiments.items()
            for candidate in candidates_of(
                each, target, strategies=strategies, accumulate=accumulate, remat=remat, search=search
            )
        ]
        for target, search in zip(resolved, searches, strict=True)
    ]
    reports = list["PlanReport"]()
    for target, tried, search in zip(resolved, candidates, searches, strict=True):
        with Progress() as progress:
            report = make_plan_report(
                tried,
                target,
                max_batch=options.max_batch,
                smallest=options.smallest and target.kind not in {each.kind for each in resolved[: len(reports)]},
                cache=not options.no_cache,
                progress=progress.compiling,
            )
        given = [settings_of(experiments[one.remat], one, max_batch=options.max_batch) for one in tried]
        hosts = None if options.host_memory is None else round(options.host_memory * 2**30)
        report = advised(with_hosts(report, first, tried, target, hosts), given)
        if automatic:
            note = f'model.remat = "{AUTO}": jdp train takes the first that fits, of {", ".join(automatic)}'
            report = replace(report, notes=(note, *report.notes))
        if search is not None:
            report = replace(report, axes=search, notes=(search.words, *report.notes))
        is_compiled = any(estimate.error is None for estimate in report.estimates)
        if failures is not None and is_compiled:
            report = failures.added_to(report, target, first.train.checkpoint_every)
        reports.append(with_bill(report, options))
    if all(estimate.error is not None for report in reports for estimate in report.estimates):
        raise UsageError("\n".join(dict.fromkeys(note for report in reports for note in report.notes)))
    described = [f"{first.model.name}, {first.precision}, batches of {described_batch(c[0].batch)}" for c in candidates]
    return Plans(first.name, options.file.stem, tuple(reports), tuple(described))


def remats_of(options: Options) -> list[str] | None:
    """Return the policies of --remat; None: not given. Raises UsageError."""
    policies = None if options.remat is None else words(options.remat, "--remat")
    if policies and AUTO in policies:
        raise UsageError(
            f"--remat names policies to compare; given {AUTO}: leave it out, and give --model.remat {AUTO}"
        )
    return policies


def check_axes_free(options: Options, overrides: Mapping[str, str]) -> None:
    """Check that --axes is free to choose the mesh."""
    if options.axes and (given := next((key for key in overrides if key.partition(".")[0] == "mesh"), None)):
        raise UsageError(f"--axes searches the mesh, and keys that are given stay; given --{given} too: remove one")
