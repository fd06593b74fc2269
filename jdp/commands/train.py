"""`jdp train`: run an experiment."""

import contextlib
import json as as_json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jdp.commands.options import parse_with_overrides, stdout_to_stderr


@dataclass(frozen=True)
class Options:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the experiment as resolved, metrics.jsonl, TensorBoard events, checkpoints. Run again, it
    resumes from the last checkpoint. Ctrl-C saves before it leaves.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. So --devices 8 computes
    on eight virtual CPU devices. The value "none" clears a key that may be empty. The keys are listed below.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML)."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder that holds the runs, each in a folder of its name."""
    json: bool = False
    """Print one JSON object on stdout at the end (none when stopped early), and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Validate and run; with --json, the summary is all there is on stdout."""
    options, overrides = parse_with_overrides(Options, "train", arguments)
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        summary = _train(options, overrides)
    if options.json and summary:
        print(as_json.dumps(summary, allow_nan=False))
    return 0


def _train(options: Options, overrides: dict[str, str]) -> dict[str, Any] | None:
    """Validate, pick the platform, join the cluster, check against the devices, run; the summary, on process 0."""
    from jdp.experiment import check_for_devices, load
    from jdp.machine import choose_platform

    experiment = load(options.file, overrides)
    choose_platform(experiment.devices)

    import jax

    from jdp import distributed

    distributed.initialize()
    check_for_devices(experiment, jax.device_count())

    from jdp import train as loop
    from jdp.metrics import json_safe

    summary = loop.run(experiment, root=options.run_dir, quiet=options.json)
    return json_safe(summary) if jax.process_index() == 0 else None
