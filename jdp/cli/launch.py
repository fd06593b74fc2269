"""`jdp launch`: several processes on this machine."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import tyro

from jdp.cli import sweep, train_options
from jdp.cli.options import UsageError, cut, parse, parse_with_overrides


@dataclass(frozen=True)
class Options:
    """Runs an experiment, or a Python program that calls jdp.initialize(), as several processes on this machine.

    What stands after -- is one of

    FILE.toml [options and overrides of `jdp train`];
    PROGRAM.py [its arguments], run by the Python that runs jdp;
    -m MODULE [its arguments], likewise;
    COMMAND [its arguments], such as python PROGRAM.py: anything on the PATH.

    Each line of output bears the number of its process: [0] ... When a process fails, the others are ended, and which
    one failed first, and how, is said last; the exit code is that process's. Ctrl-C and SIGTERM are passed on. With
    --sweep among the options of `jdp train`, each of its runs is launched so, one after another.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=("-n",), metavar="N")]
    """Number of processes."""
    devices_per_process: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """GPUs of each process (default: an equal part), or, without GPUs, virtual CPU devices (default: the experiment's
    `devices`, else one)."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder that holds the runs, as for `jdp train`."""
    json: bool = False
    """Stdout is that of process 0, one JSON object; everything else goes to stderr."""


def run(arguments: list[str]) -> int:
    own, dashes, command = cut(arguments, "--")
    if not command and not {"-h", "--help"} & set(own):
        given = "nothing comes after --" if dashes else "there is no --"
        raise UsageError(f"what to launch stands after --, but {given}: write jdp launch -n 2 -- FILE …")
    return _launch(parse(Options, "launch", own), command)


def _launch(options: Options, command: list[str]) -> int:
    """`jdp launch`: check what can be checked once, here, then start the processes."""
    from jdp.core.machine import visible_gpus
    from jdp.launch.local import launch as start

    if options.processes < 1:
        raise UsageError(f"jdp launch starts 1 or more processes; got -n {options.processes}")
    environment = dict(os.environ)
    command = [_at_home(command[0]), *command[1:]]
    if (whole := _program(command)) is not None:
        if options.run_dir is not None:
            raise UsageError("--run-dir is for experiments: give a program its options after it")
        _check_there(whole)
    else:
        added = ["--json"] if options.json else []
        added += [f"--run-dir={_at_home(str(options.run_dir))}"] if options.run_dir is not None else []
        given, overrides = parse_with_overrides(train_options.Options, "train", [*command, *added])
        if given.sweep:
            return sweep.run(given, overrides, _again(options), processes=options.processes)
        if options.devices_per_process is not None and not visible_gpus(environment):
            added += [f"--devices={options.devices_per_process}"]
        if _check_before_launch([*command, *added], options.processes):
            environment["JAX_PLATFORMS"] = "cpu"
        whole = [sys.executable, "-m", "jdp", "train", *command, *added]
    return start(
        whole,
        options.processes,
        devices_per_process=options.devices_per_process,
        clean_stdout=options.json or "--json" in command,
        environment=environment,
    )


def _program(command: list[str]) -> list[str] | None:
    """The whole command of a program; None for an experiment, whose options may come before its file."""
    word = command[0]
    if word == "-m":
        return [sys.executable, *command]
    if word.startswith("-") or word.endswith(".toml"):
        return None
    if word.endswith(".py"):
        return [sys.executable, *command]
    if Path(word).is_file() and not os.access(word, os.X_OK):
        return None
    return command


def _check_there(whole: list[str]) -> None:
    """Say once, instead of in every process, that there is no such program. Raises UsageError."""
    program, *rest = whole
    if program != sys.executable:
        if shutil.which(program) is None:
            kinds = "an experiment FILE.toml, a PROGRAM.py, -m MODULE, or a command on the PATH"
            raise UsageError(f"there is no file and no command {program!r}; after -- stands {kinds}")
    elif rest[:1] == ["-m"]:
        if not rest[1:] or rest[1].startswith("-"):
            raise UsageError("-m needs a module: jdp launch -n 2 -- -m PACKAGE [its arguments]")
        top = rest[1].partition(".")[0]
        if not top.isidentifier() or not (
            PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
        ):
            raise UsageError(f"there is no module {rest[1]!r}, neither in {Path.cwd()} nor installed for {program}")
    elif rest and rest[0].endswith(".py") and not Path(rest[0]).is_file():
        raise UsageError(f"there is no program {rest[0]}, seen from {Path.cwd()}")


def _at_home(word: str) -> str:
    """A path that starts with ~, as a shell would have it."""
    try:
        return str(Path(word).expanduser()) if word.startswith("~") else word
    except RuntimeError:
        raise UsageError(f"there is no home folder {Path(word).parts[0]}, in {word}") from None


def _again(options: Options) -> list[str]:
    """The command that launches one run of a sweep, up to its FILE: each is a cluster of its own."""
    devices = options.devices_per_process
    more = [] if devices is None else [f"--devices-per-process={devices}"]
    return [sys.executable, "-m", "jdp", "launch", f"-n={options.processes}", *more, "--"]


def _check_before_launch(arguments: list[str], processes: int) -> bool:
    """Say a mistake in the experiment once, instead of in every process; whether it asks for virtual CPU devices."""
    from jdp.experiment.file import check_for_devices, load
    from jdp.run.outputs.profiler import profiled_steps

    options, overrides = parse_with_overrides(train_options.Options, "train", arguments)
    experiment = load(options.file, overrides)
    profiled_steps(options.profile, experiment.train.steps)
    if experiment.devices is not None:
        check_for_devices(experiment, processes * experiment.devices)
    return experiment.devices is not None
