"""The command line: find the command, run it, and turn what goes wrong into a message and an exit code.

| exit code | meaning                                                                                             |
|-----------|-----------------------------------------------------------------------------------------------------|
| 0         | done                                                                                                |
| 1         | the answer is no: `verify`, `prove`, `doctor`                                                       |
| 2         | a user's mistake: `error: …` on stderr                                                              |
| 70        | a fault of the program: its traceback on stderr; or another process of the run exited: a line there |
| 75        | run again: stopped by SIGTERM, SIGHUP or SIGUSR1, after saving; a step did not end in time; or, in  |
|           | mid-run, a disk stayed full for minutes; or processes did not come                                  |
| 78        | the processes of the run do not match; each reports how: fix this before you run again              |
|           | or a device computed wrong results: leave its host out before you run again                         |
| 130       | stopped by Ctrl-C, after saving                                                                     |
| 141       | the reader of stdout has exited, as `head` does; `train` and `launch` go on without it              |

tyro parses a command's typed options; anything else that starts with two dashes, `--a.b value`, is an override of the
experiment file. Commands are imported when they run, and JAX late inside them, so that help and mistakes in
options answer at once. The help of a command is kept on disk: its imports take a quarter of a second of processor time.
"""

import contextlib
import errno
import importlib
import io
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import jdp
from jdp.base.disk_cache import Cache, default_folder
from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.cli.help import command_help, wrapped
from jdp.cli.options import UsageError
from jdp.cli.streams import lasting

USER_ERROR, SOFTWARE_ERROR, INTERRUPTED, READER_LEFT = 2, 70, 130, 141
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MOST_LINES, _LONGEST_LINE = 20, 1000
_NEEDED = ("jax", "jaxlib")
_CUDA = ("13", "12")
_PACKAGES = {
    **{name: name for name in (*_NEEDED, *(f"jax-cuda{cuda}-plugin" for cuda in _CUDA))},
    **{f"nvidia-cudnn-cu{cuda}": "cuDNN" for cuda in _CUDA},
    **{f"nvidia-nccl-cu{cuda}": "NCCL" for cuda in _CUDA},
}
"""Packages of which --version shows those that are installed, with their names there."""
COMMANDS = {
    "new": "Writes NAME.toml, a copy of an experiment that jdp ships, under its own name.",
    "train": "Runs an experiment.",
    "plan": "Reports what every device will hold, send and wait for, under every strategy, before you launch.",
    "verify": "Compiles a step, counts what it sends: exit 0 if it keeps the strategy's contract, or a baseline; or 1.",
    "prove": "Runs a few real steps under every strategy, and compares: exit 0 if all agree within rounding, else 1.",
    "launch": "Runs an experiment, or a program that calls jdp.initialize(), as several processes of one cluster.",
    "generate": "Continues prompts with a run's model, or with an export, and prints the text while it is written.",
    "report": "Writes one self-contained page of runs: curves, speed, where every byte lives, what happened.",
    "why": "Says why a run is slow, hung or dead, and which process caused it.",
    "doctor": (
        "Examines this machine, or all processes together, and reports each fault with the command that fixes it."
    ),
}
"""Each command, a module of this package, with the first line of its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code (see the table above); a failure in a cluster ends the process."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks, such as é in ASCII, is escaped
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    trains = given[:1] in (["train"], ["launch"])
    with lasting("stderr"), lasting("stdout") if trains else contextlib.nullcontext():
        return _in_words(given)


def _in_words(arguments: list[str]) -> int:
    """Run one command; turn an exception into a message and an exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # now, while an error can still be reported
        return _leave(code)
    except SystemExit as exiting:  # tyro after --help or an error; a run that chose its exit code
        if isinstance(exiting.code, str):
            print(exiting.code, file=sys.stderr)
        return _leave(1 if isinstance(exiting.code, str) else exiting.code or 0)
    except KeyboardInterrupt:
        return _leave(INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return _leave(READER_LEFT)
    except Exception as error:
        if _is_lost_peer(error):
            named = type(error).__name__ == "LostPeer"  # an error of JAX does not name the process
            said = error if named else "another process of this run exited; its message is above, or in its log"
            print(f"{_prefix()}{said}", file=sys.stderr)
            return _leave(SOFTWARE_ERROR, lost_peer=True)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            _drop_stdout()
            file = error.filename or "the output"
            print(f"{_prefix()}error: {file} cannot be written: {error.strerror}", file=sys.stderr)
            return _leave(USER_ERROR)
        is_mistake, replicas = isinstance(error, UserError), sys.modules.get("jdp.guard.replicas")
        is_device = replicas is not None and isinstance(error, replicas.CorruptState)  # a traceback would add nothing
        in_words = is_mistake or is_device or hasattr(error, "exit_code")
        message = f"error: {_printable(error)}" if in_words else traceback.format_exc()
        print(f"{_prefix()}{message}", file=sys.stderr)
        code = USER_ERROR if is_mistake else SOFTWARE_ERROR
        return _leave(getattr(error, "exit_code", code) if in_words else code)


def _open_closed_streams() -> None:
    """Open stdout and stderr on /dev/null where the caller closed them (`>&-`).

    Python has None there, and the next file would get the stream's number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_WRONLY)
            os.dup2(opened, number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _drop_stdout() -> None:
    """Discard what is still to be written to stdout, so that Python does not try again when it exits."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    if arguments[1:] in (["--help"], ["-h"]):
        return show_help(name)
    return importlib.import_module(f"jdp.cli.{name}").run(arguments[1:])


def _printable(error: Exception) -> str:
    """Return an error's message, which may repeat any text, for a terminal: escaped, long lines and lists cut."""

    def escaped(letter: str) -> str:
        return letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1]

    lines = str(error).split("\n")
    kept = ["".join(map(escaped, cut(line, _LONGEST_LINE))) for line in lines[:_MOST_LINES]]
    more = [f"  … and {len(lines) - _MOST_LINES:,} more lines"] if len(lines) > _MOST_LINES else []
    return "\n".join([*kept, *more])


def _is_lost_peer(error: Exception) -> bool:
    """Return True if this error, in a cluster, is about another process that exited or did not connect."""
    distributed = sys.modules.get("jdp.core.cluster.initialize")
    return distributed is not None and distributed.is_lost_peer(error)


def _leave(code: int, *, lost_peer: bool = False) -> int:
    """Return the code; after a failure in a cluster, end the process with it at once."""
    if code and (distributed := sys.modules.get("jdp.core.cluster.initialize")):
        distributed.leave_after_failure(code, lost_peer=lost_peer)
    return code


def _prefix() -> str:
    """Return the prefix of this process' messages in a cluster, "process 0 of 2: "; "" outside a cluster."""
    distributed = sys.modules.get("jdp.core.cluster.initialize")
    joined = distributed.joined_as() if distributed else None
    return f"process {joined[0]} of {joined[1]}: " if joined else ""


def _help() -> str:
    lines = ["usage: jdp COMMAND …", "", "Data-parallel training on JAX sharding.", ""]
    lines += [wrapped(line, f"  {name:<9} ", " " * 12) for name, line in COMMANDS.items()]
    more = "jdp COMMAND --help shows more; jdp --version shows versions, those of JAX and of CUDA's libraries too."
    return "\n".join([*lines, "", wrapped(more)])


def _versions() -> str:
    """Return a line for each version that an error report needs, by what pip recorded: no JAX is imported."""
    import importlib.metadata

    lines = [f"jdp {jdp.__version__}", f"Python {platform.python_version()}"]
    for package, name in _PACKAGES.items():
        try:
            lines.append(f"{name} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            if package in _NEEDED:
                lines.append(f"{name} not installed")
    return "\n".join(lines)


def show_help(name: str) -> int:
    """Print a command's help: the kept one if jdp's files and the terminal are the same, else a new one."""
    cache = Cache(default_folder() / "help", limit_bytes=2**20, names=r"[0-9a-f]{64}\.txt", contents="")
    key = Cache.key(name, sys.version, repr(shutil.get_terminal_size()), *_stamps()) + ".txt"
    text = cache.load(key, lambda file: file.read().decode())
    if text is None:
        text = f"{command_help(name, importlib.import_module(f'jdp.cli.{name}').Options)}\n"
        cache.store(key, lambda file: file.write(text.encode()))
    sys.stdout.write(text)
    return 0


def _stamps() -> Iterator[str]:
    """Yield each file of jdp with its size and time: the help depends on them."""
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found = path.stat()
        yield f"{path} {found.st_size} {found.st_mtime_ns}"
