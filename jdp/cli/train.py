"""`jdp train`: run an experiment, or with --sweep several."""

import contextlib
import json as as_json
from typing import Any

from jdp.cli import sweep
from jdp.cli.options import parse_with_overrides, stdout_to_stderr
from jdp.cli.train_options import Options


def run(arguments: list[str]) -> int:
    """Validate and run; with --json, the summary is all there is on stdout."""
    options, overrides = parse_with_overrides(Options, "train", arguments)
    if options.sweep:
        return sweep.run(options, overrides)
    from jdp.run.signals import Stopped

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
    from jdp.core.machine import choose_platform
    from jdp.experiment.file import check_for_devices, load
    from jdp.run.outputs.profiler import profiled_steps

    experiment = load(options.file, overrides)
    steps = profiled_steps(options.profile, experiment.train.steps)
    choose_platform(experiment.devices)

    import jax

    from jdp.core import distributed

    distributed.initialize()
    check_for_devices(experiment, jax.device_count())

    from jdp.run import loop

    return _said(loop.run(experiment, root=options.run_dir, quiet=options.json, profile=steps))


def _said(summary: dict[str, Any]) -> dict[str, Any] | None:
    """What is printed, by process 0 only."""
    import jax

    from jdp.run.outputs.metrics import json_safe

    return json_safe(summary) if jax.process_index() == 0 else None
