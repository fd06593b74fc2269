"""`jdp prove`: check that an experiment learns the same on one device and on many, however the state is sharded."""

import json as as_json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.base.machine import choose_platform
from jdp.cli.options import UsageError, parse_with_overrides, stdout_to_stderr, words
from jdp.experiment.file import load

if TYPE_CHECKING:
    from jdp.prove.equivalence import Proof

DEVICES = 8
STEPS, QUICK_STEPS = 10, 2


@dataclass(frozen=True)
class Options:
    """Runs a few real steps under every strategy, and compares: exit 0 if all agree within rounding, else 1.

    The experiment runs unchanged (model, batches, precision, optimizer) on one device. Then it runs under every
    strategy, on one device and on all of them, with one microbatch per step and with several. One run is saved in the
    middle and resumed under another setting. The devices are virtual CPU devices (--devices N; default the
    experiment's, else 8). Losses, parameters and optimizer state are compared leaf by leaf and step by step. Each
    difference that rounding cannot explain is reported with its run, step, leaf and size.

    The experiment is not reduced. For a large one: --model.layers 2 --train.batch_size 16.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Experiment: a TOML file, or the name of a shipped one, such as quickstart."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps of each run. Default: 10; with --quick 2."""
    quick: bool = False
    """Make only one run: the experiment's own setting, saved and resumed under the setting that differs most. The
    result lists the omitted runs; LLVM's optimisations are off. The quickstart takes some 30 s of processor time."""
    only: Annotated[str | None, tyro.conf.arg(metavar="TEXTS")] = None
    """Make only the runs whose names contain one of these, separated by commas, such as zero3 or "8 devices"."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    options, overrides = parse_with_overrides(Options, "prove", arguments)
    if options.quick and options.only is not None:
        raise UsageError("--quick chooses the runs itself; given --only too: remove one of them")
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps must be 1 or more optimizer steps of each run; given {options.steps}: raise it")
    with stdout_to_stderr(options.json):
        proof = _prove(options, overrides)
    print(as_json.dumps(proof.to_json(), allow_nan=False) if options.json else proof)
    return int(not proof.equal)


def _prove(options: Options, overrides: dict[str, str]) -> "Proof":
    experiment = load(options.file, overrides)
    choose_platform(experiment.devices or DEVICES)

    from jdp.cli.terminal import Progress
    from jdp.experiment.plan import prove_experiment

    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    logging.getLogger("jdp").setLevel(logging.ERROR)  # the notices of dozens of plans are not about the proof
    only = () if options.only is None else tuple(words(options.only, "--only"))
    with Progress() as progress:
        return prove_experiment(experiment, steps=steps, quick=options.quick, only=only, progress=progress.running)
