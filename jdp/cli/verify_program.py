"""`jdp verify FILE.py:FUNCTION`: what any step sends, holds and waits for, compared with a baseline."""

import json as as_json
import re
from typing import Any

from jdp.base.shorten import brief
from jdp.cli.options import UsageError, check_writable, stdout_to_stderr, write_file
from jdp.cli.programs import check_only, forecast_on
from jdp.cli.verify_options import Options

TAKEN = ("file", "target", "save", "against", "tolerance", "markdown", "no_cache", "json")


def run(options: Options, overrides: dict[str, str]) -> int:
    """Compile a program's step and print what it sends, or how that differs from the baseline; return the exit code."""
    check_only(options, overrides, TAKEN)
    tolerance = _tolerance(options)
    with stdout_to_stderr():  # the user's file may print
        from jdp.foresight.any_step.baseline import baseline_of, read_baseline
        from jdp.foresight.any_step.compare import WORSE, compare
        from jdp.foresight.any_step.markdown import report_markdown

        before = None if options.against is None else read_baseline(options.against)
        named = options.target or (None if before is None else before.target)
        program, report = forecast_on(options.file, named, cache=not options.no_cache)
        now = baseline_of(report, program.name, program.root)
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
    if options.markdown and options.json:
        raise UsageError("--markdown and --json both print on stdout; given both: remove one")
    if options.save is not None and options.against is not None and options.save.resolve() == options.against.resolve():
        raise UsageError(
            f"--save would replace the baseline of --against before anyone reads how they differ; given {options.save} "
            "for both: save to another file"
        )
    check_writable(options.save)
    return float(found[1]) / 100
