"""`jdp verify`: compare what a compiled step sends with the communication contract, or with a baseline."""

import json as as_json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.cli.options import choose_target_platform, parse_with_overrides, stdout_to_stderr
from jdp.cli.programs import check_experiment, is_program

if TYPE_CHECKING:
    from jdp.foresight.verify import Report

BROKEN = 1


@dataclass(frozen=True)
class Options:
    """Compiles a step, counts what it sends: exit 0 if it keeps the strategy's contract, or a baseline; or 1.

    Collectives are counted in the compiled program, loops included, and compared with theory: the README's table of
    strategies; under zero3, what the step's own trace gathers. A breach names the collective, the parameter, the source
    line, and the fix. What is sent besides is listed even if the contract is kept, and so is a zero3 that keeps its
    weights gathered, like zero2.

    Any key of the experiment can be changed: --strategy zero3 --train.accumulate 4. The keys are listed below.

    A program of yours is given as my_train.py:make_step, or package.module:make_step. The function returns a jitted
    step and a tuple of its arguments, real or abstract; if it takes `devices`, it gets those of --target. --save writes
    what the step sends by source line, holds and waits for; --against compares with that.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML), or a program, FILE.py:FUNCTION."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to compile for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's."""
    save: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: write its numbers, to compare with later."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: compare with numbers that --save wrote, and exit with 1 if it sends, holds or waits for more.
    --target defaults to theirs."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="PERCENT")] = "2%"
    """For --against: how much a number may grow."""
    markdown: bool = False
    """For a program: print a table for a pull request."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Verify an experiment and print the report."""
    options, overrides = parse_with_overrides(Options, "verify", arguments)
    if is_program(options.file):
        from jdp.cli import verify_program

        return verify_program.run(options, overrides)
    check_experiment(options, ("save", "against", "tolerance", "markdown"))
    with stdout_to_stderr(options.json):
        report = _verify(options, overrides)
    print(as_json.dumps(report.to_json(), allow_nan=False) if options.json else report)
    return 0 if report.kept else BROKEN


def _verify(options: Options, overrides: dict[str, str]) -> "Report":
    """Put the experiment on the target's devices; from there on it is `jdp.verify`."""
    from jdp.experiment.file import load

    experiment = load(options.file, overrides)
    choose_target_platform([options.target], experiment.devices)

    from jdp.base.disk_cache import Cache
    from jdp.cli.terminal import Progress
    from jdp.experiment.assembly import Assembly
    from jdp.experiment.remat import settled
    from jdp.foresight.targets.this_machine import target_of
    from jdp.foresight.verify import verify

    target = target_of(options.target)
    experiment = settled(experiment, target, Cache.usual(not options.no_cache))
    assembly = Assembly.on_devices(experiment, list(target.devices))
    step, state, batch = assembly.train_step, assembly.abstract_state(), assembly.abstract_batch()
    with Progress() as progress:
        progress.compiling(0, 1, f"{experiment.strategy} for {target}")
        return verify(step, state, batch, target, cache=not options.no_cache)
