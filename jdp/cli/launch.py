"""`jdp launch`: several processes as one cluster, restarted after a failure."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.base.machine import visible_gpus
from jdp.base.user_path import user_path
from jdp.base.words import nearest
from jdp.cli import train
from jdp.cli.options import HELP, UsageError, parse, parse_with_overrides
from jdp.experiment.file import check_for_devices, load, shipped, shipped_file

if TYPE_CHECKING:
    from jdp.launch.processes import Nodes


@dataclass(frozen=True)
class Options:
    """Runs an experiment, or a program that calls jdp.initialize(), as several processes of one cluster.

    After -- comes one of

    FILE.toml [options and overrides of `jdp train`], or the name of an experiment that jdp ships.

    PROGRAM.py [its arguments], run by the Python that runs jdp.

    -m MODULE [its arguments], likewise.

    COMMAND [its arguments], such as python PROGRAM.py: any command on the PATH.

    Each line of output begins with the number of its process: [0] ... If a process fails, jdp launch ends the others,
    names the process that failed first, and exits with its exit code. It passes on Ctrl-C and SIGTERM.

    With --max-restarts it then restarts all processes, and an experiment resumes from its newest checkpoint. It does
    not restart after exit codes 1, 2 (a mistake), 78 (processes that do not match, wrong results) and 130 (Ctrl-C), nor
    a third time without a new checkpoint.

    On several machines, run the same command on each, with its own --node-rank: jdp launch -n 8 --nodes 4 --node-rank 1
    --coordinator node0:29500 -- FILE. The program calls jdp.initialize(), as jdp train does. If a process fails or a
    machine is lost, the processes of all machines end; each machine restarts its processes and waits up to five minutes
    for the others. Under Slurm, Kubernetes and mpirun, which start the processes themselves, do not use jdp launch.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=("-n",), metavar="N")]
    """Number of processes on this machine."""
    devices_per_process: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """GPUs per process (default: an equal share); without GPUs, virtual CPU devices (default: the experiment's
    `devices`, else one)."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the runs, as for `jdp train`."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of restarts after a failure; give all machines the same number."""
    nodes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of machines (default: this one alone)."""
    node_rank: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of this machine, from 0."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of node 0 with a free port, on which process 0 listens. Keep it in a private network."""
    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a log file per process, rank-00000.log; the previous attempt's is rank-00000.1.log (default: for an
    experiment RUN_DIR/NAME/logs, else none)."""
    json: bool = False
    """Print only process 0's stdout, one JSON object, on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:dashes], arguments[dashes + 1 :]
    if not command and HELP.isdisjoint(own):
        given = "nothing after --" if "--" in arguments else "no --"
        raise UsageError(f"an experiment or a program comes after --; given {given}: write jdp launch -n 2 -- FILE …")
    return _launch(parse(Options, "launch", own), command)


def _launch(options: Options, command: list[str]) -> int:
    """Check the command once, in this process, then start the processes."""
    from jdp.launch.events import EVENT_LOGS
    from jdp.launch.output import LOGS
    from jdp.launch.supervisor import launch as start

    for flag, number, least in (
        ("-n", options.processes, 1),
        ("--devices-per-process", options.devices_per_process, 1),
        ("--nodes", options.nodes, 1),
        ("--max-restarts", options.max_restarts, 0),
    ):
        if number is not None and number < least:
            raise UsageError(f"{flag} must be {least} or more; given {number}: raise it")
    nodes = _nodes(options)
    environment, log_dir, event_log = dict(os.environ), options.log_dir, None
    command = [str(user_path(command[0])) if command[0].startswith("~") else command[0], *command[1:]]
    started = _program(command)
    is_experiment = started is None
    if started is not None and options.run_dir is not None:
        raise UsageError("--run-dir is for experiments; given a program: give it its options after its name")
    if started is None:
        added = ["--json"] if options.json else []
        added += [f"--run-dir={options.run_dir}"] if options.run_dir is not None else []
        if options.devices_per_process is not None and not visible_gpus(environment):
            added += [f"--devices={options.devices_per_process}"]
        folder, is_virtual = _check_before_launch([*command, *added], options.processes * (nodes.count if nodes else 1))
        if is_virtual:
            environment["JAX_PLATFORMS"] = "cpu"
        log_dir, event_log = log_dir or folder / LOGS, folder / EVENT_LOGS / f"node-{options.node_rank or 0:05}.jsonl"
        started = [sys.executable, "-m", "jdp", "train", *command, *added]
    return start(
        started,
        options.processes,
        devices_per_process=options.devices_per_process,
        clean_stdout=options.json or "--json" in command,
        environment=environment,
        max_restarts=options.max_restarts,
        log_dir=log_dir,
        event_log=event_log,
        reports_progress=is_experiment,
        nodes=nodes,
    )


def _nodes(options: Options) -> "Nodes | None":
    """Return the machines of the run; None for this one alone."""
    from jdp.launch.processes import Nodes

    given = {"--node-rank": options.node_rank, "--coordinator": options.coordinator}
    if options.nodes in (None, 1):
        if named := [flag for flag, value in given.items() if value is not None]:
            raise UsageError(f"{named[0]} is for several machines; given --nodes 1: say how many with --nodes")
        return None
    if options.node_rank is None or options.coordinator is None:
        missing = " and ".join(flag for flag, value in given.items() if value is None)
        raise UsageError(
            f"several machines need --node-rank and --coordinator; given --nodes {options.nodes} without {missing}: "
            f"write --nodes {options.nodes} --node-rank 0 --coordinator HOST:PORT, and on each its own number"
        )
    return Nodes(options.nodes, options.node_rank, options.coordinator)


def _program(command: list[str]) -> list[str] | None:
    """Return the command line of a program; None for an experiment, whose options may come before its file.

    Raises UsageError once, instead of in every process, if there is no such program.
    """
    word, here = command[0], Path.cwd()
    if word == "-m":
        module = "".join(command[1:2])
        top = module.partition(".")[0]
        if not top.isidentifier() or not (PathFinder.find_spec(top, [str(here)]) or importlib.util.find_spec(top)):
            given = f"{module!r}: fix its name, or install it" if module else "none: write -m PACKAGE"
            raise UsageError(f"-m needs a module of {here} or of {sys.executable}; given {given}")
        return [sys.executable, *command]
    if word.startswith("-") or word.endswith(".toml"):
        return None
    if word.endswith(".py"):
        if not Path(word).is_file():
            raise UsageError(f"there is no program {word}, seen from {here}: fix its path")
        return [sys.executable, *command]
    if Path(word).is_file() and not os.access(word, os.X_OK):
        return None
    if shutil.which(word) is not None:
        return command
    if shipped_file(Path(word)) is None:
        kinds = "an experiment FILE.toml or the name of one that jdp ships, a PROGRAM.py, -m MODULE, or a command"
        fix = nearest(word, shipped(), cutoff=0.6) or ": fix its name"
        raise UsageError(f"after -- comes {kinds} on the PATH; there is no file and no command {word!r}{fix}")
    return None


def _check_before_launch(arguments: list[str], processes: int) -> tuple[Path, bool]:
    """Report a mistake once, not in every process; return the run's folder, and whether its CPU devices are virtual."""
    from jdp.run.outputs import profiled_steps

    options, overrides = parse_with_overrides(train.Options, "train", arguments)
    experiment = load(options.file, overrides)
    profiled_steps(options.profile, experiment.train.steps)
    if experiment.devices is not None:
        check_for_devices(experiment, processes * experiment.devices)
    return options.run_dir / experiment.name, experiment.devices is not None
