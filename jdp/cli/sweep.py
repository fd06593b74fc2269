"""`--sweep`, of `jdp train` and of what `jdp launch` starts: several runs of one experiment, one after another.

A run is a process of its own, `jdp train` (or `jdp launch`) with the run's values and name: what it leaves in memory
and how it dies is no matter for the next. In a cluster that others have started (Slurm, Open MPI, Kubernetes, TPU pods)
processes cannot be had anew, so there all of them walk through the runs together, inside the processes that there are.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdp.cli.options import UsageError, stdout_to_stderr
from jdp.cli.train_options import Options

if TYPE_CHECKING:
    from jdp.run.sweep.grid import Member
    from jdp.run.sweep.walk import Ended, Result

TRAIN = (sys.executable, "-m", "jdp", "train")
_COUNT = "from jdp.core.machine import choose_platform as c; c(); import jax; print(jax.device_count())"


def run(options: Options, overrides: Mapping[str, str], command: Sequence[str] = TRAIN, *, processes: int = 1) -> int:
    """Validate every run, then run them, and show what came of it.

    Args:
        options: of `jdp train`.
        overrides: of the experiment's keys, for all runs.
        command: what starts a run, up to its FILE.
        processes: how many a run is made of.

    Returns:
        0; 1 when a run failed; 130 or 75 when a signal stopped the sweep.
    """
    from jdp.run.outputs.profiler import profiled_steps
    from jdp.run.sweep.grid import check, members

    found = members(options.file, options.sweep, overrides)
    for member in found:
        profiled_steps(options.profile, member.experiment.train.steps)
    together = command == TRAIN and _in_cluster()
    alone = command == TRAIN and not together
    devices = _device_count() if alone and not all(member.experiment.devices for member in found) else None
    check(found, options.run_dir, processes=processes, devices=devices)
    with stdout_to_stderr() if options.json else contextlib.nullcontext():
        results = _together(found, options) if together else _one_by_one(found, options, overrides, command)
    if not together or _is_process_0():
        _show(found[0].base, results, as_json=options.json)
    stopped = [result.exit_code for result in results if result.status == "stopped"]
    return stopped[0] or 0 if stopped else int(any(result.status == "failed" for result in results))


def _one_by_one(
    found: Sequence["Member"], options: Options, overrides: Mapping[str, str], command: Sequence[str]
) -> Sequence["Result"]:
    from jdp.run.sweep.children import Children

    profile = [] if options.profile is None else [f"--profile={options.profile}"]

    def whole(member: "Member") -> list[str]:
        changed = {**overrides, **member.values, "name": member.name}
        keys = [f"--{key}={text}" for key, text in changed.items()]
        return [*command, str(options.file), f"--run-dir={options.run_dir}", *profile, *keys]

    with Children(whole, quiet=options.json) as children:
        return _walk(found, options, children.start)


def _together(found: Sequence["Member"], options: Options) -> Sequence["Result"]:
    """Inside a cluster: every process does the same, and which runs are done already is what process 0 sees."""
    if len({member.experiment.devices for member in found}) > 1:
        raise UsageError("--sweep devices needs a process for each run: in a cluster that is running it cannot change")
    from jdp.core import distributed
    from jdp.core.machine import choose_platform

    choose_platform(found[0].experiment.devices)
    distributed.initialize()

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from jdp.run.sweep.grid import check
    from jdp.run.sweep.walk import summary_of

    check(found, options.run_dir, processes=jax.process_count(), devices=jax.device_count())
    done = np.array([summary_of(member, options.run_dir) is not None for member in found])
    done = multihost_utils.broadcast_one_to_all(done)
    return _walk(found, options, lambda member: _in_this_process(member, options), finished=[bool(x) for x in done])


def _in_this_process(member: "Member", options: Options) -> "Ended":
    """A failure that all processes share is noted; any other ends this process, and with it the cluster."""
    from jdp.run import loop
    from jdp.run.outputs.profiler import profiled_steps
    from jdp.run.signals import Stopped
    from jdp.run.sweep.walk import Ended

    steps = profiled_steps(options.profile, member.experiment.train.steps)
    try:
        loop.run(member.experiment, root=options.run_dir, quiet=options.json, profile=steps)
    except Stopped as left:
        return Ended(int(left.code or 0))
    except loop.Diverged as error:
        if _is_process_0():
            print(f"error: {error}", file=sys.stderr)
        return Ended(2, str(error))
    return Ended(0)


def _walk(found: Sequence["Member"], options: Options, start: Any, **more: Any) -> Sequence["Result"]:
    from jdp.run.sweep.results import record
    from jdp.run.sweep.walk import walk

    speaks = "finished" not in more or _is_process_0()
    results: Sequence[Result] = ()
    for results in walk(found, options.run_dir, start, say=_say if speaks else lambda _: None, **more):
        if speaks:
            record(found[0].base, results, options.run_dir)
    return results


def _say(text: str) -> None:
    print(text, flush=True)


def _show(name: str, results: Sequence["Result"], *, as_json: bool) -> None:
    """The table, best first, or the one object."""
    from jdp.cli.terminal import show_table
    from jdp.run.sweep.results import as_json as to_json
    from jdp.run.sweep.results import failures, table

    found = to_json(name, results)
    if as_json:
        print(json.dumps(found, allow_nan=False), flush=True)
        return
    print()
    headers, rows = table(results)
    show_table(f"Sweep of {name}, by {found['metric']}", headers, rows, marked=None if found["best"] is None else 0)
    for line in failures(results):
        print(f"failed: {line}")


def _in_cluster() -> bool:
    from jdp.core.distributed import find_cluster

    cluster = find_cluster(os.environ)
    return cluster is not None and cluster.num_processes != 1


def _is_process_0() -> bool:
    import jax

    return jax.process_index() == 0


def _device_count() -> int | None:
    """Asked of a process of its own: this one must not hold devices that the runs need."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None
