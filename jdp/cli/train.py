"""`jdp train`: run an experiment."""

import json as as_json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jdp.base.notices import in_few_lines
from jdp.cli.options import parse_with_overrides, stdout_to_stderr


@dataclass(frozen=True)
class Options:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the experiment as resolved, metrics.jsonl, TensorBoard events, checkpoints, flight/ (what
    each process did), and at the end summary.json. Run again, it resumes from the last checkpoint. Ctrl-C saves before
    it leaves.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. So --devices 8 computes
    on eight virtual CPU devices. The value "none" clears a key that may be none.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML), or the name of one that jdp ships, such as quickstart."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder that holds the runs, each in a folder of its name."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace the steps from FIRST to LAST, both included, into RUN_DIR/NAME/profile (process 0's)."""
    fresh_memory: bool = False
    """On CPUs: give memory back to the system between steps, as other programs do. It is kept, on huge pages, without:
    a small model's step takes a quarter less, and the process stays at the most memory that it ever used.
    JDP_FRESH_MEMORY=1 does the same."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    verbose: bool = False
    """Print all notices of the start: choices that jdp made, and why. Without, they take three lines at most."""
    json: bool = False
    """Print one JSON object on stdout at the end, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    """Validate and run; with --json, stdout has only the summary, printed by process 0. Raises Stopped."""
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

        from jdp.run.outputs.metrics import json_safe

        if jax.process_index() == 0:
            print(as_json.dumps(json_safe(summary), allow_nan=False), flush=True)
    if stopped is not None:
        raise stopped
    return 0


def _train(options: Options, overrides: dict[str, str]) -> dict[str, Any]:
    """Validate, choose the platform, join the cluster, check the number of devices, run; return the summary."""
    from jdp.base.cpu_allocator import keep_memory
    from jdp.base.machine import choose_platform, starts_cpus_alone
    from jdp.experiment.file import check_for_devices, load, to_toml
    from jdp.experiment.make import folder_of
    from jdp.run.outputs.profiler import profiled_steps

    experiment = load(options.file, overrides)
    steps = profiled_steps(options.profile, experiment.train.steps)
    choose_platform(experiment.devices)
    kept = None if options.fresh_memory or not starts_cpus_alone() else keep_memory()

    import jax

    from jdp.core.cluster import handshake
    from jdp.core.cluster.initialize import initialize
    from jdp.core.compiling.persistent_cache import keep_programs
    from jdp.guard.deadline import set_xla_timeout
    from jdp.run import loop  # takes a second, in which JAX would hear a signal and tell nobody

    seconds = 2 * experiment.guard.first_deadline_seconds if experiment.devices is None else 0
    limit = set_xla_timeout(os.environ, seconds)
    initialize()
    handshake.check_experiment(to_toml(experiment), plugin=folder_of(experiment.plugin))
    handshake.check_device_counts()
    check_for_devices(experiment, jax.device_count())
    if not options.no_cache:
        keep_programs()
    settings = [line for line in (kept, limit) if line is not None]
    return loop.run(experiment, root=options.run_dir, quiet=options.json, profile=steps, settings=settings)
