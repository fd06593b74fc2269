"""`jdp plan`: compile an experiment's step under every strategy, for devices that this machine need not have."""

import contextlib
import json as as_json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.cli.options import (
    UsageError,
    check_writable,
    choose_target_platform,
    counts,
    parse_with_overrides,
    stdout_to_stderr,
    words,
)

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport


@dataclass(frozen=True)
class Options:
    """Reports what every device will hold, send and wait for, under every strategy, before anything is launched.

    The experiment's real step is compiled by the real compiler for the devices of --target, which this machine need not
    have: jdp plan FILE --target h100:8x8. The report has memory by class compared with the device's, bytes sent
    compared with theory, step time and how much communication is hidden (simulated), what fits, what to take, and why.

    Any key of the experiment can be changed: --train.batch_size 512 --model.layers 2. The keys are listed below.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML)."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to plan for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's."""
    strategy: Annotated[str, tyro.conf.arg(metavar="NAMES")] = "ddp,zero1,zero2,zero3"
    """Strategies to compile, with commas between."""
    accumulate: Annotated[str | None, tyro.conf.arg(metavar="COUNTS")] = None
    """Microbatches a step to compile, such as 1,4. Default: the experiment's."""
    remat: Annotated[str | None, tyro.conf.arg(metavar="POLICIES")] = None
    """Rematerialisation policies to compile, such as none,dots,full. Default: the experiment's."""
    max_batch: bool = False
    """Find the largest batch that fits under the chosen strategy, by compiling."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="PAGE")] = None
    """Write a self-contained page: memory, timelines, collectives."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="TRACE")] = None
    """Write the simulated timeline of the chosen strategy for chrome://tracing or ui.perfetto.dev."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Plan an experiment, print the report and write the files that are asked for."""
    options, overrides = parse_with_overrides(Options, "plan", arguments)
    for path in (options.html, options.trace):
        check_writable(path)
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        report, described = _plan(options, overrides)
    if options.json:
        print(as_json.dumps(report.to_json(), allow_nan=False), flush=True)
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        _write(options, report, described)
    return 0


def _plan(options: Options, overrides: dict[str, str]) -> tuple["PlanReport", str]:
    """Return the report, and the experiment in a sentence. Raises UsageError if no candidate compiles."""
    from jdp.experiment.file import load

    strategies = words(options.strategy, "--strategy")
    remats: list[str | None] = [None] if options.remat is None else [*words(options.remat, "--remat")]
    settings = [overrides | ({} if remat is None else {"model.remat": remat}) for remat in remats]
    experiments = dict(zip(remats, (load(options.file, each) for each in settings), strict=True))
    first = experiments[remats[0]]
    accumulate = counts(options.accumulate, "--accumulate") or [first.train.accumulate]
    choose_target_platform(options.target, first.devices)

    from jdp.cli.terminal import Progress, show_plan
    from jdp.experiment.plan import candidates_of, described_batch
    from jdp.foresight.foresee import make_plan_report
    from jdp.foresight.targets.this_machine import target_of

    target = target_of(options.target)
    candidates = [
        candidate
        for remat, experiment in experiments.items()
        for candidate in candidates_of(experiment, target, strategies=strategies, accumulate=accumulate, remat=remat)
    ]
    described = f"{first.model.name}, {first.precision}, batches of {described_batch(candidates[0].batch)}"
    with Progress() as progress:
        report = make_plan_report(
            candidates,
            target,
            max_batch=options.max_batch,
            cache=not options.no_cache,
            progress=progress.compiling,
        )
    if all(estimate.error is not None for estimate in report.estimates):
        raise UsageError("\n".join(report.notes))
    if not options.json:
        show_plan(report, first.name, described)
    return report, described


def _write(options: Options, forecast: "PlanReport", described: str) -> None:
    """Write the files of --html and --trace. Raises UsageError."""
    if options.html is not None:
        from jdp.report.plan_page import plan_page

        page = plan_page(forecast, title=f"{options.file.stem} on {forecast.target}", described=described)
        _put(options.html, page)
    if options.trace is not None:
        from jdp.foresight.timing.chrome_trace import chrome_trace

        shown = forecast.choice or next((o for o in forecast.estimates if o.timeline is not None), None)
        if shown is None or shown.timeline is None:
            raise UsageError(
                f"--trace needs a simulated timeline; {forecast.target} has none: remove it, or name another --target"
            )
        _put(options.trace, as_json.dumps(chrome_trace(shown.timeline, shown.name)))


def _put(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another file") from None
    print(f"wrote {path}")
