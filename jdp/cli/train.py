"""`jdp train`: run an experiment."""

import json as as_json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jdp.base.machine import choose_platform, keep_memory, starts_cpus_alone
from jdp.base.notices import in_few_lines
from jdp.cli.options import parse_with_overrides, stdout_to_stderr
from jdp.experiment.file import check_for_devices, load, to_toml
from jdp.experiment.schema.make import folder_of


@dataclass(frozen=True)
class Options:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the resolved experiment, metrics.jsonl, TensorBoard events, checkpoints, events/ (a log of
    each process), and at the end summary.json. The same command resumes from the last checkpoint. Ctrl-C saves, then
    exits.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. For example, --devices 8
    runs on eight virtual CPU devices. The value "none" clears a key that may be none.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Experiment: a TOML file, or the name of a shipped one, such as quickstart."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder of the runs; each run has a folder with its name."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace process 0's steps FIRST to LAST, both included, into RUN_DIR/NAME/profile."""
    fresh_memory: bool = False
    """On CPUs: return memory to the system between steps. By default the process keeps it, on huge pages: a small
    model's step takes a quarter less time, and the process stays at its peak memory. JDP_FRESH_MEMORY=1 does the
    same."""
    no_cache: bool = False
    """Compile again instead of reading the cache ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    verbose: bool = False
    """Print all notices at the start: jdp's choices and their reasons. By default they take three lines at most."""
    json: bool = False
    """Print one JSON object on stdout at the end, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Validate and run; with --json, process 0 prints only the summary on stdout. Raises Stopped."""
    options, overrides = parse_with_overrides(Options, "train", arguments)
    from jdp.run.signals import Stopped

    stopped: Stopped | None = None
    with stdout_to_stderr(options.json), in_few_lines(not options.verbose):
        try:
            summary = _train(options, overrides)
        except Stopped as request:
            stopped, summary = request, request.summary
    if options.json:
        import jax

        from jdp.run.metrics import json_safe

        if jax.process_index() == 0:
            print(as_json.dumps(json_safe(summary), allow_nan=False), flush=True)
    if stopped is not None:
        raise stopped
    return 0


def _train(options: Options, overrides: dict[str, str]) -> dict[str, Any]:
    from jdp.run.outputs import profiled_steps

    experiment = load(options.file, overrides)
    steps = profiled_steps(options.profile, experiment.train.steps)
    choose_platform(experiment.devices)
    kept = None if options.fresh_memory or not starts_cpus_alone() else keep_memory()

    import jax

    from jdp.core.cluster.agreement import check_device_counts, check_experiment
    from jdp.core.cluster.initialize import initialize
    from jdp.core.compiling.persistent_cache import keep_programs
    from jdp.guard.deadline import set_xla_timeout
    from jdp.run import loop  # takes a second, in which JAX would swallow a signal

    seconds = 2 * experiment.guard.first_deadline_seconds if experiment.devices is None else 0
    limit = set_xla_timeout(os.environ, seconds)
    initialize()
    check_experiment(to_toml(experiment), plugin=folder_of(experiment.plugin))
    check_device_counts()
    check_for_devices(experiment, jax.device_count())
    if not options.no_cache:
        keep_programs()
    settings = [line for line in (kept, limit) if line is not None]
    return loop.run(experiment, root=options.run_dir, quiet=options.json, profile=steps, settings=settings)
