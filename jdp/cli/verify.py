"""`jdp verify`: compare what a compiled step sends with the communication contract, or with a baseline."""

import json as as_json
from typing import TYPE_CHECKING

from jdp.cli.options import choose_target_platform, parse_with_overrides, stdout_to_stderr
from jdp.cli.programs import check_experiment, is_program
from jdp.cli.verify_options import Options

if TYPE_CHECKING:
    from jdp.foresight.verify import Report

BROKEN = 1


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
    return BROKEN if report.kept is False else 0


def _verify(options: Options, overrides: dict[str, str]) -> "Report":
    """Put the experiment on the target's devices; from there on it is `jdp.verify`."""
    from jdp.experiment.file import load

    experiment = load(options.file, overrides)
    choose_target_platform([options.target], experiment.devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.assembly import Assembly
    from jdp.foresight.targets.this_machine import target_of
    from jdp.foresight.verify import verify

    target = target_of(options.target)
    assembly = Assembly.on_devices(experiment, list(target.devices))
    step, state, batch = assembly.train_step, assembly.abstract_state(), assembly.abstract_batch()
    with Progress() as progress:
        progress.compiling(0, 1, f"{experiment.strategy} for {target}")
        return verify(step, state, batch, target, cache=not options.no_cache)
