"""`jdp plan --tune`: search for the fastest way that fits, and write the experiment that has it."""

import json as as_json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jdp.base.shorten import brief
from jdp.cli.options import (
    UsageError,
    check_writable,
    choose_target_platform,
    counts,
    flag_of,
    stdout_to_stderr,
    words,
    write_file,
)
from jdp.cli.plan_compile import check_axes_free, remats_of
from jdp.cli.plan_options import Options

if TYPE_CHECKING:
    from jdp.experiment.tune import Tuning
    from jdp.foresight.advice.tune import Trial, Tuned

MINUTES = 30.0
NOTHING_FITS = 1
_TRY = "To try on the machine, as the simulation does not see it:"
_KEEPS = "Batch size, order of samples, optimizer and learning rate stay as they are: what is learnt does not change."


def check_tune(options: Options) -> None:
    """Check the options that go with --tune, and those that need it. Raises UsageError."""
    if not options.tune:
        for flag, given in (("--tune-minutes", options.tune_minutes), ("-o", options.output)):
            if given is not None:
                raise UsageError(f"{flag} is for --tune, which is not given: add --tune, or remove {flag}")
        return
    others = ("max_batch", "smallest", "tokens", "mtbf", "html", "trace")
    if beside := [flag_of(name) for name in others if getattr(options, name)]:
        raise UsageError(f"--tune goes without {beside[0]}; given both: tune first, then plan what -o wrote")
    if options.target is None:
        raise UsageError("--tune compiles for a run's devices; given no --target: name them, such as --target h100:8x8")
    if "," in options.target:
        raise UsageError(f"--tune searches for one target; given {brief(options.target)}: name one of them")
    if options.tune_minutes is not None and not 0 < options.tune_minutes <= 10_000:
        raise UsageError(f"--tune-minutes takes minutes, more than 0; given {options.tune_minutes:g}: give 30")
    check_writable(options.output)
    if options.file is not None and options.output is not None and options.output.resolve() == options.file.resolve():
        raise UsageError(f"-o is a file of its own; given the experiment, {options.file}: name another")


def tune(options: Options, overrides: dict[str, str]) -> int:
    """Search, print what was found, and write the experiment that has it."""
    with stdout_to_stderr(options.json):
        tuning, found = _search(options, overrides)
    if options.json:
        untimed = [{"line": line, "why": why} for line, why in _untimed(tuning, found)]
        report = {"target": str(tuning.target), **found.to_json(), "untimed": untimed}
        print(as_json.dumps(report, allow_nan=False), flush=True)
    else:
        _show(tuning, found)
    if found.best is None or not found.fits:
        return NOTHING_FITS
    if options.output is not None:
        _write(options.output, tuning, found.best)
    return 0


def _search(options: Options, overrides: dict[str, str]) -> "tuple[Tuning, Tuned]":
    """Return what is tuned, and what was found. Raises UsageError."""
    from jdp.experiment.file import load

    assert options.file is not None
    check_axes_free(options, overrides)
    strategies, accumulate = words(options.strategy, "--strategy"), counts(options.accumulate, "--accumulate")
    remats = remats_of(options)
    choose_target_platform([options.target], load(options.file, overrides).devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.tune import Tuning
    from jdp.foresight.targets.this_machine import target_of

    target = target_of(options.target)
    if not target.is_timed:
        raise UsageError(f"--tune needs devices whose rates are known; given {target}: name another --target")
    if target.devices[0].platform != "cpu":  # the experiment may be one of virtual CPU devices
        overrides = {"devices": "none", **overrides}
    tuning = Tuning(options.file, overrides, target, strategies, accumulate, remats, options.axes)
    with Progress() as progress:
        found = tuning.search(
            minutes=options.tune_minutes or MINUTES,
            cache=not options.no_cache,
            progress=lambda what: progress.compiling(0, None, what),
        )
    return tuning, found


def _show(tuning: "Tuning", found: "Tuned") -> None:
    from jdp.cli.terminal import show_table
    from jdp.foresight.advice.tune import TUNED, overrides_of

    marked = None if found.best is None or not found.fits else found.trials.index(found.best)
    show_table(f"{tuning.file.name} on {tuning.target}, as compiled", TUNED, found.table(), marked=marked)
    print("", *found.why, sep="\n")
    if found.best is not None and found.fits:
        changed = {key: text for key, text in overrides_of(found.best.way).items() if tuning.changes(key, text)}
        flags = [word for key, text in {**tuning.overrides, **changed}.items() for word in (f"--{key}", text)]
        print(f"{_KEEPS}\n{shlex.join(['jdp', 'train', str(tuning.file), *flags])}")
    if untimed := _untimed(tuning, found):
        print("", _TRY, *(f"    {line}  # {why}" for line, why in untimed), sep="\n")


def _untimed(tuning: "Tuning", found: "Tuned") -> list[tuple[str, str]]:
    return [] if found.best is None or not found.fits else tuning.untimed(found.best)


def _write(path: Path, tuning: "Tuning", best: "Trial") -> None:
    """Write the whole experiment. Raises UsageError."""
    from jdp.experiment.file import to_toml

    words = f"{tuning.file.name}, tuned for {tuning.target}: {best}"
    head = f"# {''.join(each if each.isprintable() else '?' for each in words)}\n"
    experiment = tuning.experiment(best.way)
    write_file(path, head + to_toml(experiment))
    plugin = "" if experiment.plugin is None else f" --plugin {experiment.plugin}"
    print(f"wrote {path}: jdp train {path}{plugin}", file=sys.stderr)
