"""`jdp launch`: several processes as one cluster, started again when they fail."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.cli import sweep, train_options
from jdp.cli.options import UsageError, parse, parse_with_overrides

if TYPE_CHECKING:
    from jdp.experiment.schema.experiment import Experiment
    from jdp.launch.rendezvous import Nodes


@dataclass(frozen=True)
class Options:
    """Runs an experiment, or a program that calls jdp.initialize(), as several processes of one cluster.

    After -- comes one of

    FILE.toml [options and overrides of `jdp train`], or the name of an experiment that jdp ships.

    PROGRAM.py [its arguments], run by the Python that runs jdp.

    -m MODULE [its arguments], likewise.

    COMMAND [its arguments], such as python PROGRAM.py: anything on the PATH.

    Each line of output begins with the number of its process: [0] ... When a process fails, the others are ended. The
    last lines then name the process that failed first, and the exit code is that process's. Ctrl-C and SIGTERM are
    passed on. With --sweep among the options of `jdp train`, its runs are launched one after another.

    With --max-restarts all are then started again, and an experiment resumes from its newest checkpoint. Not after exit
    codes 1, 2 (a mistake), 78 (processes that do not match) and 130 (Ctrl-C), and not a third time without a new
    checkpoint.

    On several machines, run the same command on each, with its own --node-rank: jdp launch -n 8 --nodes 4 --node-rank 1
    --coordinator node0:29500 -- FILE. Under Slurm: srun --ntasks-per-node=1 jdp launch -n 8 -- FILE. When a process
    fails or a machine is lost, all of them stop, and start again together. Give all of them the same secret, in
    JDP_SECRET or in a file that JDP_SECRET_FILE names: whoever reaches the coordinator's port can else end the job.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=("-n",), metavar="N")]
    """Number of processes on this machine."""
    devices_per_process: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """GPUs of each process (default: an equal part), or, without GPUs, virtual CPU devices (default: the experiment's
    `devices`, else one)."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder that holds the runs, as for `jdp train`."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """How often all processes are started again after one has failed; node 0's counts."""
    nodes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of machines (default: one; in a Slurm step with one task on each of several machines, these)."""
    node_rank: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of this machine, from 0."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of node 0 and a port there that is free. The processes themselves use other ports, new at each start."""
    min_nodes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of machines with which to go on when others stay away (default: all). The global batch and the order of
    samples stay the same; an experiment uses as many as its mesh and batch allow. Node 0's counts."""
    rejoin_seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 300.0
    """How long to wait for machines, at the start and after a failure."""
    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a log file for each process, rank-00000.log; that of the attempt before is rank-00000.1.log (default:
    for an experiment RUN_DIR/NAME/logs, else none)."""
    json: bool = False
    """Stdout is that of process 0, one JSON object; everything else goes to stderr."""


def run(arguments: list[str]) -> int:
    """Split the command's own options from the program, and launch it."""
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:dashes], arguments[dashes + 1 :]
    if not command and not {"-h", "--help"} & set(own):
        given = "nothing after --" if "--" in arguments else "no --"
        raise UsageError(f"what to launch comes after --; given {given}: write jdp launch -n 2 -- FILE …")
    return _launch(parse(Options, "launch", own), command)


def _launch(options: Options, command: list[str]) -> int:
    """Check what can be checked once, in this process, then start the processes."""
    from jdp.base.machine import visible_gpus
    from jdp.launch.output import LOGS
    from jdp.launch.supervisor import launch as start

    if options.processes < 1:
        raise UsageError(f"-n must be 1 or more processes; given {options.processes}: raise it")
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts must be 0 or more; given {options.max_restarts}: 0 starts nothing again")
    nodes, fits = _nodes(_under_slurm(options, os.environ)), None
    count = 1 if nodes is None else nodes.count
    environment, log_dir = dict(os.environ), options.log_dir
    command = [_expand_home(command[0]), *command[1:]]
    started = _program(command)
    is_experiment = started is None
    if started is not None:
        if options.run_dir is not None:
            raise UsageError("--run-dir is for experiments; given a program: give it its options after its name")
        _check_exists(started)
    else:
        added = ["--json"] if options.json else []
        added += [f"--run-dir={_expand_home(str(options.run_dir))}"] if options.run_dir is not None else []
        given, overrides = _train_options([*command, *added])
        if given.sweep and nodes is not None:
            raise UsageError("--sweep runs on one machine; given --nodes: start a job for each value, with --name")
        if given.sweep:
            return sweep.run(given, overrides, _one_of_a_sweep(options), processes=options.processes)
        if options.devices_per_process is not None and not visible_gpus(environment):
            added += [f"--devices={options.devices_per_process}"]
        experiment = _check_before_launch([*command, *added], options.processes * count)
        fits = partial(_fits, experiment, options, len(visible_gpus(environment)))
        if experiment.devices is not None:
            environment["JAX_PLATFORMS"] = "cpu"
        log_dir = log_dir or given.run_dir / experiment.name / LOGS
        started = [sys.executable, "-m", "jdp", "train", *command, *added]
    return start(
        started,
        options.processes,
        devices_per_process=options.devices_per_process,
        clean_stdout=options.json or "--json" in command,
        environment=environment,
        max_restarts=options.max_restarts,
        log_dir=log_dir,
        reports_progress=is_experiment,
        nodes=nodes,
        facts={"-n": str(options.processes), "--nodes": str(count), "what is launched": " ".join(command)},
        fits=fits or (lambda processes: True),
    )


def _under_slurm(options: Options, environment: Mapping[str, str]) -> Options:
    """Fill in the machines of a Slurm step that has one task on each, if the options name none."""
    count = environment.get("SLURM_STEP_NUM_NODES", "1")
    if options.nodes is not None or count == "1" or environment.get("SLURM_STEP_NUM_TASKS") != count:
        return options
    from jdp.core.cluster.schedulers import slurm_coordinator

    coordinator = options.coordinator or slurm_coordinator(environment)
    return replace(options, nodes=int(count), node_rank=int(environment["SLURM_PROCID"]), coordinator=coordinator)


def _nodes(options: Options) -> "Nodes | None":
    """Return the machines of the run; None for this one alone."""
    from jdp.launch.rendezvous import Nodes

    given = {"--node-rank": options.node_rank, "--coordinator": options.coordinator, "--min-nodes": options.min_nodes}
    if options.nodes is not None and options.nodes < 1:
        raise UsageError(f"--nodes must be 1 or more machines; given {options.nodes}: leave it out for this one alone")
    if options.nodes in (None, 1) and (named := [flag for flag, value in given.items() if value is not None]):
        raise UsageError(f"{named[0]} is for several machines; given --nodes 1: say how many with --nodes")
    if options.nodes is None or options.nodes == 1:
        return None
    if options.node_rank is None or options.coordinator is None:
        missing = " and ".join(flag for flag in ("--node-rank", "--coordinator") if given[flag] is None)
        raise UsageError(
            f"several machines need --node-rank and --coordinator; given --nodes {options.nodes} without {missing}: "
            f"write --nodes {options.nodes} --node-rank 0 --coordinator HOST:PORT, and on each its own number"
        )
    try:
        return Nodes(options.nodes, options.node_rank, options.coordinator, options.min_nodes, options.rejoin_seconds)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _fits(experiment: "Experiment", options: Options, gpus: int, processes: int) -> bool:
    """Return True if the experiment's mesh and batch fit so many processes, as far as that is known here."""
    from jdp.experiment.file import ExperimentError, check_for_devices

    each = experiment.devices or options.devices_per_process or gpus // options.processes
    if not each:
        return True
    try:
        check_for_devices(experiment, processes * each)
    except ExperimentError:
        return False
    return True


def _one_of_a_sweep(options: Options) -> list[str]:
    """Return what starts one run of a sweep, a cluster of its own."""
    if options.log_dir is not None:
        raise UsageError("the runs of a sweep have a folder of logs each, RUN_DIR/NAME/logs: leave --log-dir out")
    count = options.devices_per_process
    more = [] if count is None else [f"--devices-per-process={count}"]
    more += [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    return [sys.executable, "-m", "jdp", "launch", f"-n={options.processes}", *more, "--"]


def _program(command: list[str]) -> list[str] | None:
    """Return the command line of a program; None for an experiment, whose options may come before its file."""
    word = command[0]
    if word == "-m":
        return [sys.executable, *command]
    if word.startswith("-") or word.endswith(".toml"):
        return None
    if word.endswith(".py"):
        return [sys.executable, *command]
    if Path(word).is_file() and not os.access(word, os.X_OK):
        return None
    return None if shutil.which(word) is None and _is_shipped(word) else command


def _is_shipped(word: str) -> bool:
    from jdp.experiment.shipped import shipped_file

    return shipped_file(Path(word)) is not None


def _check_exists(command: list[str]) -> None:
    """Raise UsageError once, instead of in every process, if there is no such program."""
    program, *arguments = command
    if program != sys.executable:
        if shutil.which(program) is None:
            kinds = "an experiment FILE.toml or the name of one that jdp ships, a PROGRAM.py, -m MODULE, or a command"
            raise UsageError(
                f"after -- comes {kinds} on the PATH; there is no file and no command {program!r}: fix its name"
            )
    elif arguments[:1] == ["-m"]:
        if not arguments[1:] or arguments[1].startswith("-"):
            raise UsageError("-m needs a module; given none: write jdp launch -n 2 -- -m PACKAGE [its arguments]")
        module = arguments[1]
        top = module.partition(".")[0]
        if not top.isidentifier() or not (
            PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
        ):
            raise UsageError(
                f"there is no module {module!r}, neither in {Path.cwd()} nor installed for {program}: fix its name, or "
                "install it"
            )
    elif arguments and arguments[0].endswith(".py") and not Path(arguments[0]).is_file():
        raise UsageError(f"there is no program {arguments[0]}, seen from {Path.cwd()}: fix its path")


def _expand_home(word: str) -> str:
    """Return a path with ~ resolved, as by a shell."""
    try:
        return str(Path(word).expanduser()) if word.startswith("~") else word
    except RuntimeError:
        raise UsageError(f"there is no home folder {Path(word).parts[0]}, in {word}: write the folder") from None


def _train_options(arguments: list[str]) -> tuple[train_options.Options, dict[str, str]]:
    return parse_with_overrides(train_options.Options, "train", arguments)


def _check_before_launch(arguments: list[str], processes: int) -> "Experiment":
    """Report a mistake in the experiment once, instead of in every process; return the experiment."""
    from jdp.experiment.file import check_for_devices, load
    from jdp.run.outputs.profiler import profiled_steps

    options, overrides = _train_options(arguments)
    experiment = load(options.file, overrides)
    profiled_steps(options.profile, experiment.train.steps)
    if experiment.devices is not None:
        check_for_devices(experiment, processes * experiment.devices)
    return experiment
