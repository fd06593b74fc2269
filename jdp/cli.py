"""The command line: thin, one function a command.

`main` finds the command; tyro reads its typed options; `--a.b value`, anything else that starts with two dashes, is an
override of the experiment file. Exit codes: 0 done; 2 a user's mistake, with `error: ...` on stderr; 70 a fault of the
program, with its traceback; 130 stopped by Ctrl-C; what else a command exits with by itself (75: preempted, try again).

JAX is imported late, inside the commands, so that help and mistakes in options answer at once.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jdp.wording import nearest

USER_ERROR, SOFTWARE_ERROR, INTERRUPTED, READER_LEFT = 2, 70, 130, 141


class UsageError(ValueError):
    """The command line itself is wrong."""


@dataclass(frozen=True)
class TrainOptions:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the experiment as resolved, metrics.jsonl, TensorBoard events, checkpoints. Run again, it
    resumes from the last checkpoint. Ctrl-C saves before it leaves.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. So --devices 8 computes
    on eight virtual CPU devices. The value "none" clears a key that may be empty. The keys are listed below.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML)."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder that holds the runs, each in a folder of its name."""
    json: bool = False
    """Print one JSON object on stdout at the end (none when stopped early), and everything else on stderr."""


@dataclass(frozen=True)
class LaunchOptions:
    """Runs an experiment, or a Python program that calls jdp.initialize(), as several processes on this machine.

    jdp launch -n 2 -- FILE [options and overrides of `jdp train`], or jdp launch -n 2 -- PROGRAM.py [its arguments].

    Each line of output bears the number of its process: [0] ... When a process fails, the others are ended, and which
    one failed first, and how, is said last; the exit code is that process's. Ctrl-C and SIGTERM are passed on.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. In a cluster, a failure ends the process here instead (see `_leave`)."""
    try:
        return _leave(_run(list(sys.argv[1:] if arguments is None else arguments)))
    except SystemExit as left:  # tyro after --help or an error; a run that chose its exit code
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return _leave(1 if isinstance(left.code, str) else left.code or 0)
    except KeyboardInterrupt:
        return _leave(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _leave(READER_LEFT)
    except Exception as error:
        mistake = _is_users_mistake(error)
        print(f"{_who()}error: {error}" if mistake else f"{_who()}{traceback.format_exc()}", file=sys.stderr)
        return _leave(USER_ERROR if mistake else SOFTWARE_ERROR)


def train(options: TrainOptions, overrides: dict[str, str]) -> int:
    """`jdp train`: validate and run; with --json, the summary is all there is on stdout."""
    with _stdout_to_stderr() if options.json else contextlib.nullcontext():
        summary = _train(options, overrides)
    if options.json and summary:
        print(json.dumps(summary, allow_nan=False))
    return 0


def _train(options: TrainOptions, overrides: dict[str, str]) -> dict[str, Any] | None:
    """Validate, pick the platform, join the cluster, check against the devices, run; the summary, on process 0."""
    from jdp.experiment import check_for_devices, load
    from jdp.machine import choose_platform

    experiment = load(options.file, overrides)
    choose_platform(experiment.devices)

    import jax

    from jdp import distributed

    distributed.initialize()
    check_for_devices(experiment, jax.device_count())

    from jdp import train as loop
    from jdp.metrics import json_safe

    summary = loop.run(experiment, root=options.run_dir, quiet=options.json)
    return json_safe(summary) if jax.process_index() == 0 else None


def launch(options: LaunchOptions, command: list[str]) -> int:
    """`jdp launch`: check what can be checked once, here, then start the processes."""
    from jdp.launch.local import launch as start
    from jdp.machine import visible_gpus

    if options.processes < 1:
        raise UsageError(f"jdp launch starts 1 or more processes; got -n {options.processes}")
    environment = dict(os.environ)
    if command[0].endswith(".py"):
        if options.run_dir is not None:
            raise UsageError("--run-dir is for experiments: give a program its options after it")
        whole = [sys.executable, *command]
    else:
        added = ["--json"] if options.json else []
        added += [f"--run-dir={options.run_dir}"] if options.run_dir is not None else []
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


def _check_before_launch(arguments: list[str], processes: int) -> bool:
    """Say a mistake in the experiment once, instead of in every process; whether it asks for virtual CPU devices."""
    from jdp.experiment import check_for_devices, load

    options, overrides = _parse_train(arguments)
    experiment = load(options.file, overrides)
    if experiment.devices is not None:
        check_for_devices(experiment, processes * experiment.devices)
    return experiment.devices is not None


@dataclass(frozen=True)
class Command:
    """A command: its options, which `--help` shows, and what runs it with all arguments after its name."""

    options: type[Any]
    run: Callable[[list[str]], int]


def _run_train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        return _train_help()
    return train(*_parse_train(arguments))


def _run_launch(arguments: list[str]) -> int:
    own, dashes, command = _cut(arguments, "--")
    if not command and not {"-h", "--help"} & set(own):
        given = "nothing comes after --" if dashes else "there is no --"
        raise UsageError(f"what to launch stands after --, but {given}: write jdp launch -n 2 -- FILE …")
    return launch(_parse(LaunchOptions, "launch", own), command)


COMMANDS = {"train": Command(TrainOptions, _run_train), "launch": Command(LaunchOptions, _run_launch)}


def _run(arguments: list[str]) -> int:
    """Find the command and run it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else USER_ERROR
    if arguments[0] in ("-V", "--version"):
        print(_versions())
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise UsageError(f"jdp has no command {name!r}{hint}")
    return COMMANDS[name].run(arguments[1:])


def _parse(options: type[Any], name: str, arguments: list[str]) -> Any:
    """Read typed options; tyro says what is wrong and exits with 2."""
    return tyro.cli(options, prog=f"jdp {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def _parse_train(arguments: list[str]) -> tuple[TrainOptions, dict[str, str]]:
    """The options of `jdp train` itself, and the overrides."""
    own, overrides = split_overrides(arguments, _flags(TrainOptions))
    return _parse(TrainOptions, "train", own), overrides


def split_overrides(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Part `--a.b value` and `--a.b=value` from a command's own arguments.

    Args:
        arguments: as on the command line.
        own: the command's own flags, such as "--run-dir".

    Returns:
        The own arguments in their order, and dotted key -> text. A value may start with a dash (`--mesh.data -1`).

    Raises:
        UsageError: an override has no value or is given twice, or a flag looks like one of `own` misspelt.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag.replace("_", "-") in own:
            rest.append(word)
            continue
        key = flag.removeprefix("--")
        if hint := nearest(flag, own, cutoff=0.8):
            raise UsageError(f"there is no option {flag}{hint}")
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise UsageError(f"{flag} needs a value: {flag} VALUE, or {flag}=VALUE")
        if key in overrides:
            raise UsageError(f"{flag} is given twice: {overrides[key]} and {value}")
        overrides[key] = value
    return rest, overrides


def _flags(options: type[Any]) -> list[str]:
    return ["--help", *(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))]


def _cut(words: list[str], at: str) -> tuple[list[str], bool, list[str]]:
    """The words before the first `at`, whether there is one, and the words after it."""
    where = words.index(at) if at in words else len(words)
    return words[:where], at in words, words[where + 1 :]


@contextlib.contextmanager
def _stdout_to_stderr() -> Generator[None]:
    """Send to stderr what anyone writes to stdout: also what C++ writes there, as Gloo does when it connects."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _is_users_mistake(error: Exception) -> bool:
    """Whether jdp itself raised this ValueError: its house rule is `ValueError` for users, `assert` for its own faults.

    One that Python or another library raised, even below jdp, is a fault of the program and keeps its traceback.
    """
    if not isinstance(error, ValueError):
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    in_jdp = Path(innermost.filename).is_relative_to(Path(__file__).parent)
    return in_jdp and (innermost.line or "").startswith("raise ")


def _leave(code: int) -> int:
    """After a failure in a cluster, end the process at once; else hand the code on."""
    if code and (distributed := sys.modules.get("jdp.distributed")):
        distributed.leave_after_failure(code)
    return code


def _who() -> str:
    """Which process of the cluster speaks; empty outside of one."""
    distributed = sys.modules.get("jdp.distributed")
    joined = distributed.joined_as() if distributed else None
    return f"process {joined[0]} of {joined[1]}: " if joined else ""


def _help() -> str:
    lines = ["usage: jdp COMMAND …", "", "Data-parallel training on JAX sharding.", ""]
    lines += [f"  {name:<8} {(command.options.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "jdp COMMAND --help says more; jdp --version says which version this is."])


def _train_help() -> int:
    """tyro's help of the options, then every key of an experiment."""
    from jdp.experiment import describe

    with contextlib.suppress(SystemExit):
        _parse(TrainOptions, "train", ["--help"])
    width = min(shutil.get_terminal_size().columns, 120)
    for heading, keys in describe():
        print(f"\n{heading}")
        for key in keys:
            default = key.default if key.default in ("required", "by size") else f"default {key.default}"
            print(f"  --{key.name}  {key.type}  ({default})")
            print(textwrap.fill(key.description, width, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return 0


def _versions() -> str:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return f"jdp {version('jdp')} (jax {version('jax')}, Python {platform.python_version()})"
