"""`jdp manifest`: the job of an experiment for a cluster's scheduler."""

import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jdp.base.shorten import brief
from jdp.cli.options import UsageError, check_writable, flag_of, parse_with_overrides, write_file

if TYPE_CHECKING:
    from jdp.experiment.schema.experiment import Experiment

MOST = 100_000  # nodes, or devices on one
ONLY = {"slurm": ("time", "sbatch", "run_dir"), "kubernetes": ("image", "claim", "queue", "namespace")}
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # a DNS label that begins with a letter
_NAME = rf"{_LABEL}(\.{_LABEL})*"


@dataclass(frozen=True)
class Options:
    """Writes the job of an experiment that sbatch or kubectl takes: a batch script, or Kubernetes' JobSet.

    The job has one process a node, with all of its GPUs. If it is preempted or loses a node, it is queued again and
    goes on from its last checkpoint. A mistake in the experiment ends it. An experiment with `devices` computes on that
    many virtual CPU devices a node, and asks for no GPUs.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3. The keys are listed below.
    """

    scheduler: Annotated[
        tyro.conf.Positional[Literal["slurm", "kubernetes"]], tyro.conf.arg(metavar="slurm|kubernetes")
    ]
    """The scheduler that starts the job."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML), or the name of one that jdp ships, such as quickstart."""
    nodes: Annotated[int, tyro.conf.arg(metavar="N")]
    """Number of nodes."""
    per_node: Annotated[int, tyro.conf.arg(metavar="N")]
    """GPUs of each node; for an experiment with `devices`, that number."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = None
    """Write to a file instead of stdout."""
    max_restarts: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How often a job starts again after a process died (default: 3 for Slurm, where preemption does not count; 10 for
    Kubernetes, where it does)."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Slurm: folder that holds the runs, on a file system that all nodes share (default: runs)."""
    time: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Slurm: time limit, such as 24:00:00 or 2-00:00:00 (default: the partition's). A longer run is queued again."""
    sbatch: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION=VALUE")] = ()
    """Slurm: an option of sbatch, such as partition=gpu or account=physics; may be given several times."""
    image: Annotated[str | None, tyro.conf.arg(metavar="IMAGE")] = None
    """Kubernetes: container image with jdp in it."""
    claim: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Kubernetes: persistent volume claim (ReadWriteMany) for the runs. Without one they end with their pods."""
    queue: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Kubernetes: Kueue's local queue. The job begins suspended, and starts when there is room for all of its pods."""
    namespace: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Kubernetes: namespace (default: kubectl's)."""


def run(arguments: list[str]) -> int:
    """Check the experiment for the nodes, and write the job."""
    options, overrides = parse_with_overrides(Options, "manifest", arguments)
    _check(options)
    check_writable(options.output)
    experiment = _experiment(options, overrides)
    gpus = options.per_node if experiment.devices is None else 0
    text = (_slurm if options.scheduler == "slurm" else _kubernetes)(options, overrides, experiment, gpus)
    if options.output is None:
        print(text, end="")
    else:
        write_file(options.output, text, private=options.scheduler == "kubernetes")  # it has a secret
        program = "sbatch" if options.scheduler == "slurm" else "kubectl apply -f"
        print(f"wrote {options.output}; submit it with: {program} {options.output}", file=sys.stderr)
    return 0


def _check(options: Options) -> None:
    """Check the options against each other."""
    for name in ("nodes", "per_node"):
        if not 1 <= getattr(options, name) <= MOST:
            raise UsageError(f"{flag_of(name)} must be from 1 to {MOST:,}; given {getattr(options, name)}: change it")
    if options.max_restarts is not None and not 0 <= options.max_restarts <= MOST:
        raise UsageError(f"--max-restarts must be from 0 to {MOST:,}; given {options.max_restarts}: change it")
    for scheduler, names in ONLY.items():
        given = [flag_of(name) for name in names if getattr(options, name) not in (None, ())]
        if scheduler != options.scheduler and given:
            raise UsageError(f"{given[0]} is for jdp manifest {scheduler}; given {options.scheduler}: remove it")


def _experiment(options: Options, overrides: dict[str, str]) -> "Experiment":
    """Load the experiment and check that it fits the nodes."""
    from jdp.experiment.file import ExperimentError, check_for_devices, load

    experiment = load(options.file, overrides)
    count = options.nodes * options.per_node
    if experiment.devices not in (None, options.per_node):
        raise UsageError(
            f"--per-node must be the experiment's devices, its virtual CPU devices in each process; given "
            f"{options.per_node} and devices = {experiment.devices}: make them equal, or --devices none for GPUs"
        )
    try:
        check_for_devices(experiment, count)
    except ExperimentError as error:
        raise UsageError(f"{options.nodes} nodes × {options.per_node} devices = {count}: {error}") from None
    return experiment


def _slurm(options: Options, overrides: dict[str, str], experiment: "Experiment", gpus: int) -> str:
    """Return the batch script."""
    from jdp.experiment.shipped import shipped_file
    from jdp.launch.slurm import SIGNAL_SECONDS, SlurmJob, batch_script

    for directive in options.sbatch:
        if directive.partition("=")[0] == "nodes":
            raise UsageError(f"the experiment is checked for --nodes; given --sbatch {directive}: write it as --nodes")
        if not re.fullmatch(r"[a-z][-a-z0-9]*(=[^\s\"'\\#]+)?", directive):
            raise UsageError(
                f"--sbatch takes one option of sbatch as OPTION=VALUE, without dashes, spaces and quotes; given "
                f"{brief(directive)}: write --sbatch partition=gpu"
            )
    if options.time is not None and not re.fullmatch(r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}", options.time):
        raise UsageError(
            f"--time is minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS; given {brief(options.time)}: "
            "write --time 24:00:00"
        )
    if options.time is not None and 0 < _limit_seconds(options.time) <= SIGNAL_SECONDS:  # 0: no limit
        raise UsageError(
            f"--time must be longer than the {SIGNAL_SECONDS} seconds before its end, when tasks save and leave; "
            f"given {brief(options.time)}: raise it"
        )
    runs = options.run_dir or Path("runs")
    file = options.file if shipped_file(options.file) else options.file.absolute()  # a name stays one
    command = [sys.executable, "-m", "jdp", "train", str(file), f"--run-dir={runs.absolute()}"]
    more: dict[str, Any] = {} if options.max_restarts is None else {"max_restarts": options.max_restarts}
    job = SlurmJob(
        name=experiment.name,
        command=[*command, *(f"--{key}={text}" for key, text in overrides.items())],
        folder=str(Path.cwd()),
        nodes=options.nodes,
        gpus_per_node=gpus,
        time=options.time,
        directives=options.sbatch,
        **more,
    )
    return batch_script(job)


def _limit_seconds(time: str) -> int:
    """Return the seconds of a time limit as Slurm reads it: 10 and 10:00 are minutes, 1-10 and 1-10:00 have hours."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    hours, minutes, seconds = [*numbers, 0, 0][:3] if dash or len(numbers) == 3 else [0, *numbers, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _kubernetes(options: Options, overrides: dict[str, str], experiment: "Experiment", gpus: int) -> str:
    """Return the manifest, with the experiment as resolved, overrides included."""
    from jdp.experiment.file import to_toml
    from jdp.launch.kubernetes import LONGEST_NAME, KubernetesJob, manifest
    from jdp.launch.secret import new_secret

    del overrides
    if options.image is None:
        raise UsageError("jdp manifest kubernetes needs an image with jdp in it; given none: --image REGISTRY/NAME:TAG")
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9._/:@]*", options.image):
        raise UsageError(f"--image is REGISTRY/NAME:TAG; given {brief(options.image)}: name a container image")
    for flag in ("claim", "queue", "namespace"):
        if (given := getattr(options, flag)) is not None and not re.fullmatch(_NAME, given):
            raise UsageError(f"--{flag} is a name of Kubernetes: a-z, 0-9, - and .; given {brief(given)}: fix it")
    name = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")
    if not re.fullmatch(_LABEL, name) or len(name) > LONGEST_NAME:
        raise UsageError(
            f"a JobSet's name begins with a letter and has at most {LONGEST_NAME} characters; given the experiment's, "
            f"{brief(experiment.name)}: choose another with --name"
        )
    resolved = to_toml(experiment)
    _check_paths(tomllib.loads(resolved), options.file.parent.absolute())
    if options.claim is None:
        print("without --claim the runs end with their pods, and a restart begins anew", file=sys.stderr)
    more: dict[str, Any] = {} if options.max_restarts is None else {"max_restarts": options.max_restarts}
    job = KubernetesJob(
        name=name,
        image=options.image,
        experiment=resolved,
        arguments=() if experiment.plugin is None else (f"--plugin={experiment.plugin}",),
        nodes=options.nodes,
        gpus_per_node=gpus,
        secret=new_secret(),
        claim=options.claim,
        keeps_in_memory=experiment.guard.keep_in_memory > 0,
        namespace=options.namespace,
        queue=options.queue,
        **more,
    )
    return manifest(job)


def _check_paths(table: Any, folder: Path, key: str = "") -> None:
    """Check that no value is a path beside the experiment file, which the pods do not have."""
    if isinstance(table, dict):
        for name, value in table.items():
            _check_paths(value, folder, f"{key}.{name}" if key else str(name))
    elif isinstance(table, list):
        for value in table:
            _check_paths(value, folder, key)
    elif isinstance(table, str) and table.removeprefix("hf-stream:").removeprefix("hf:").startswith(
        f"{folder}{os.sep}"
    ):
        raise UsageError(
            f"{key} must be a path in the pods; given {brief(table)}, on this machine: put it into the image or on a "
            f"volume, and give --{key} its path there"
        )
