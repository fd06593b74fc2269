"""`--sweep` of `jdp train` and `jdp launch`: several runs of one experiment, one after another.

Each run is a separate process, `jdp train` (or `jdp launch`) with the run's values and name. Its memory and its crash
do not affect the next run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jdp.cli.options import UsageError, stdout_to_stderr
from jdp.cli.train_options import Options

if TYPE_CHECKING:
    from jdp.run.sweep.grid import Member
    from jdp.run.sweep.walk import Result

TRAIN = (sys.executable, "-m", "jdp", "train")
_COUNT = "from jdp.base.machine import choose_platform as c; c(); import jax; print(jax.device_count())"


def run(options: Options, overrides: Mapping[str, str], command: Sequence[str] = TRAIN, *, processes: int = 1) -> int:
    """Validate every run, then run them, and show the results."""
    from jdp.run.outputs.profiler import profiled_steps
    from jdp.run.sweep.grid import check, members

    if command == TRAIN:
        _check_alone()
    sweep = members(options.file, options.sweep, overrides)
    for member in sweep:
        profiled_steps(options.profile, member.experiment.train.steps)
    counted = command == TRAIN and not all(member.experiment.devices for member in sweep)
    devices = _device_count() if counted else None
    check(sweep, options.run_dir, processes=processes, devices=devices)
    with stdout_to_stderr(options.json):
        results = _run_all(sweep, options, overrides, command)
    _show(sweep[0].base, results, as_json=options.json)
    stopped = [result.exit_code for result in results if result.status == "stopped"]
    return stopped[0] or 0 if stopped else int(any(result.status == "failed" for result in results))


def _check_alone() -> None:
    """Raise UsageError in a process of a cluster: the runs would need processes that cannot be started from here."""
    from jdp.core.cluster.schedulers import find_cluster

    cluster = find_cluster(os.environ)
    if cluster is not None and cluster.num_processes != 1:
        raise UsageError(
            "--sweep starts a process for each run, and a cluster's processes are started from outside; given one of "
            f"{cluster.num_processes or 'several'} processes: submit a job for each value, or run jdp launch -n N -- "
            "FILE --sweep … in one process"
        )


def _run_all(
    sweep: Sequence["Member"], options: Options, overrides: Mapping[str, str], command: Sequence[str]
) -> Sequence["Result"]:
    """Run the members that are not done, and record the results after each."""
    from jdp.run.sweep.children import Children
    from jdp.run.sweep.results import record
    from jdp.run.sweep.walk import walk

    own = [] if options.profile is None else [f"--profile={options.profile}"]
    own += ["--fresh-memory"] if options.fresh_memory else []
    own += ["--no-cache"] if options.no_cache else []

    def command_of(member: "Member") -> list[str]:
        changed = {**overrides, **member.values, "name": member.name}
        keys = [f"--{key}={text}" for key, text in changed.items()]
        return [*command, str(options.file), f"--run-dir={options.run_dir}", *own, *keys]

    def say(text: str) -> None:
        print(text, flush=True)

    results: Sequence[Result] = ()
    with Children(command_of, quiet=options.json) as children:
        for results in walk(sweep, options.run_dir, children.start, say=say):
            record(sweep[0].base, results, options.run_dir)
    return results


def _show(name: str, results: Sequence["Result"], *, as_json: bool) -> None:
    """Print the table, best first, or the one object."""
    from jdp.cli.terminal import show_table
    from jdp.run.sweep.results import as_json as to_json
    from jdp.run.sweep.results import failures, table

    report = to_json(name, results)
    if as_json:
        print(json.dumps(report, allow_nan=False), flush=True)
        return
    print()
    headers, rows = table(results)
    show_table(f"Sweep of {name}, by {report['metric']}", headers, rows, marked=None if report["best"] is None else 0)
    for line in failures(results):
        print(f"failed: {line}")


def _device_count() -> int | None:
    """Count the devices in a separate process: this one must not hold devices that the runs need."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None
