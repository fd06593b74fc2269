"""`jdp verify`: compare a compiled step's communication with the strategy's contract, or with a baseline.

A program, FILE.py:FUNCTION, is only compared with a baseline."""

import json as as_json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jdp.base.toml import brief
from jdp.cli.options import (
    UsageError,
    check_writable,
    choose_target_platform,
    parse_with_overrides,
    stdout_to_stderr,
    write_file,
)
from jdp.cli.programs import check_only, check_program, forecast_on, is_program
from jdp.experiment.file import load

if TYPE_CHECKING:
    from jdp.foresight.verify import Report

TOLERANCE = "2%"  # unless --tolerance is given


@dataclass(frozen=True)
class Options:
    """Compiles a step and checks its communication: exit 0 if it matches the strategy or a baseline, else 1.

    Collectives are counted in the compiled program, loops included, and compared with theory: the README's table of
    strategies; under zero3, the gathers in the step's trace. Each breach is reported with its collective, parameter,
    source line and fix. Other traffic is listed even if the contract holds, and so are weights that zero3 keeps
    gathered, like zero2. On CPU devices nothing is judged (exit 0), because XLA:CPU uses other collectives.

    Any key of the experiment can be changed: --strategy zero3 --train.accumulate 4.

    Give your own program as my_train.py:make_step, or package.module:make_step. The function returns a jitted step and
    a tuple of its arguments, real or abstract; if it takes `devices`, it gets those of --target. --save writes the
    step's traffic by source line, its memory and its time; --against compares with such a file.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Experiment (TOML file or the name of a shipped one, such as quickstart), or a program, FILE.py:FUNCTION."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to compile for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's."""
    save: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: write its numbers for a later comparison."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: compare with a file of --save, and exit with 1 if traffic, memory or time grew. --target defaults
    to the file's."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="PERCENT")] = TOLERANCE
    """For --against: largest growth of a number."""
    markdown: bool = False
    """For a program: print a table for a pull request."""
    no_cache: bool = False
    """Compile again instead of reading the cache ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    options, overrides = parse_with_overrides(Options, "verify", arguments)
    if is_program(options.file):
        return _run_program(options, overrides)
    rule = f"{{}} is for a program, FILE.py:FUNCTION; given the experiment {options.file}: remove it"
    check_only(options, {}, ("file", "target", "no_cache", "json"), rule)
    with stdout_to_stderr(options.json):
        report = _verify(options, overrides)
    print(as_json.dumps(report.to_json(), allow_nan=False) if options.json else report)
    return int(report.kept is False)


def _verify(options: Options, overrides: dict[str, str]) -> "Report":
    experiment = load(options.file, overrides)
    choose_target_platform([options.target], experiment.devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.assembly import Assembly
    from jdp.foresight.targets.resolve import target_of
    from jdp.foresight.verify import verify

    target = target_of(options.target)
    assembly = Assembly.on_devices(experiment, list(target.devices))
    step, state, batch = assembly.training.step, assembly.training.abstract_state, assembly.inputs.abstract_batch
    with Progress() as progress:
        progress.compiling(0, 1, f"{experiment.strategy} for {target}")
        return verify(step, state, batch, target, cache=not options.no_cache)


TAKEN = ("file", "target", "save", "against", "tolerance", "markdown", "no_cache", "json")


def _run_program(options: Options, overrides: dict[str, str]) -> int:
    check_program(options, overrides, TAKEN)
    tolerance = _tolerance(options)
    with stdout_to_stderr():  # the user's file may print
        from jdp.cli.baseline import WORSE, baseline_of, compare, read_baseline, report_markdown

        before = None if options.against is None else read_baseline(options.against)
        named = options.target or (None if before is None else before.target)
        root, report = forecast_on(options.file, named, cache=not options.no_cache)
        now = baseline_of(report, str(options.file), root)
        comparison = None
        if before is not None and options.against is not None:
            comparison = compare(before, now, tolerance=tolerance, file=options.against.name)
        if options.save is not None:
            write_file(options.save, now.to_text())
            print(f"wrote {options.save}")
    is_worse = comparison is not None and comparison.verdict == WORSE
    if options.json:
        against: dict[str, Any] = {} if comparison is None else {"against": comparison.to_json()}
        print(as_json.dumps({**report.to_json(), "kept": not is_worse, **against}, allow_nan=False))
    elif comparison is None:
        print(report_markdown(now) if options.markdown else report)
    else:
        print(comparison.to_markdown() if options.markdown else comparison)
        if is_worse and report.symptoms:
            print("\nSymptoms:", "", *(f"- {each}" for each in report.symptoms), sep="\n")
    return int(is_worse)


def _tolerance(options: Options) -> float:
    """Return the tolerance as a fraction, and check the other options against each other. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?) ?%", options.tolerance)
    if found is None:
        raise UsageError(f"--tolerance is a percentage; given {brief(options.tolerance)}: write 2%")
    if options.against is None and options.tolerance != TOLERANCE:
        raise UsageError(f"--tolerance is for --against; given {options.tolerance} without it: add --against BASELINE")
    if options.markdown and options.json:
        raise UsageError("--markdown and --json both print on stdout; given both: remove one")
    if options.save is not None and options.against is not None and options.save.resolve() == options.against.resolve():
        raise UsageError(
            f"--save would replace the baseline of --against before you read the comparison; given {options.save} for "
            "both: save to another file"
        )
    check_writable(options.save)
    return float(found[1]) / 100
