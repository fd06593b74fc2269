"""`jdp train`: run an experiment, or with --sweep several."""

import contextlib
import json as as_json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jdp.commands import sweep
from jdp.commands.options import parse_with_overrides, stdout_to_stderr


@dataclass(frozen=True)
class Options:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the experiment as resolved, metrics.jsonl, TensorBoard events, checkpoints, and at the end
    summary.json. Run again, it resumes from the last checkpoint. Ctrl-C saves before it leaves.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. So --devices 8 computes
    on eight virtual CPU devices. The value "none" clears a key that may be empty. The keys are listed below.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML)."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder that holds the runs, each in a folder of its name."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace the steps from FIRST to LAST, both included, into RUN_DIR/NAME/profile (process 0's)."""
    sweep: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUES")] = ()
    """Run once for each value, one after another: KEY=A,B,C, or whole numbers FIRST:LAST or FIRST:LAST:STEP, both ends
    included. Given several times: for every combination. Each run is called NAME-KEY=VALUE; finished ones are skipped
    when the sweep is run again, one that failed is tried again, and the best is shown at the end (exit code 1 if any
    failed)."""
    json: bool = False
    """Print one JSON object on stdout at the end, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Validate and run; with --json, the summary is all there is on stdout."""
    options, overrides = parse_with_overrides(Options, "train", arguments)
    if options.sweep:
        return sweep.run(options, overrides)
    from jdp.signals import Stopped

    left: Stopped | None = None
    summary: dict[str, Any] | None = None
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        try:
            summary = _train(options, overrides)
        except Stopped as stopped:
            left, summary = stopped, _said(stopped.summary)
    if options.json and summary:
        print(as_json.dumps(summary, allow_nan=False), flush=True)
    if left is not None:
        raise left
    return 0


def _train(options: Options, overrides: dict[str, str]) -> dict[str, Any] | None:
    """Validate, pick the platform, join the cluster, check against the devices, run; the summary, on process 0."""
    from jdp.experiment import check_for_devices, load
    from jdp.machine import choose_platform
    from jdp.profiling import profiled_steps

    experiment = load(options.file, overrides)
    steps = profiled_steps(options.profile, experiment.train.steps)
    choose_platform(experiment.devices)

    import jax

    from jdp import distributed

    distributed.initialize()
    check_for_devices(experiment, jax.device_count())

    from jdp import train as loop

    return _said(loop.run(experiment, root=options.run_dir, quiet=options.json, profile=steps))


def _said(summary: dict[str, Any]) -> dict[str, Any] | None:
    """What is printed, by process 0 only."""
    import jax

    from jdp.metrics import json_safe

    return json_safe(summary) if jax.process_index() == 0 else None
