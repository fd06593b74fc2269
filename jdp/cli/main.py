"""The command line: find the command, run it, and turn an error into a message and an exit code.

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
experiment file. Commands are imported when they run, and JAX late inside them, so help and errors appear at once.

If a terminal is closed, the reader of a pipe exits, or the disk of a log file is full, a write to stdout or stderr
fails anywhere in the program: in a progress bar, a notice, a library. The stream then catches the error, continues on
/dev/null, and the program goes on (`lasting`).
"""

import contextlib
import errno
import importlib
import io
import os
import platform
import select
import sys
import traceback
from collections.abc import Generator, Sequence
from typing import Any

import jdp
from jdp.base.errors import UserError, is_of_users
from jdp.base.formatting import escaped
from jdp.base.signals import INTERRUPTED
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.cli.options import HELP, UsageError, wrapped

USER_ERROR, SOFTWARE_ERROR, READER_LEFT = 2, 70, 141
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MOST_LINES, _LONGEST_LINE = 20, 1000
_STREAMS = {1: "stdout", 2: "stderr"}
_NEEDED = ("jax", "jaxlib")
_CUDA = ("13", "12")
_PACKAGES = {
    **{name: name for name in (*_NEEDED, *(f"jax-cuda{cuda}-plugin" for cuda in _CUDA))},
    **{f"nvidia-cudnn-cu{cuda}": "cuDNN" for cuda in _CUDA},
    **{f"nvidia-nccl-cu{cuda}": "NCCL" for cuda in _CUDA},
}
"""Packages whose versions --version shows if they are installed -> their names there."""
COMMANDS = {
    "new": "Writes NAME.toml, a copy of an experiment that jdp ships, under its own name.",
    "train": "Runs an experiment.",
    "plan": "Predicts each device's memory, traffic and step time under every strategy, before you launch.",
    "verify": "Compiles a step and checks its communication: exit 0 if it matches the strategy or a baseline, else 1.",
    "prove": "Runs a few real steps under every strategy, and compares: exit 0 if all agree within rounding, else 1.",
    "launch": "Runs an experiment, or a program that calls jdp.initialize(), as several processes of one cluster.",
    "generate": "Continues prompts with a run's model, or with an export, and prints the text while it is drawn.",
    "report": "Writes one self-contained page on runs: curves, speed, memory, events.",
    "why": "Explains why a run is slow, hung or dead, and which process caused it.",
    "doctor": (
        "Examines this machine, or all processes together, and reports each fault with the command that fixes it."
    ),
}
"""Each command, a module of this package, with the first line of its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code (see the table above); a failure in a cluster ends the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the encoding lacks, such as é in ASCII
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    trains = given[:1] in (["train"], ["launch"]) and HELP.isdisjoint(given[1:2])
    with lasting("stderr"), lasting("stdout") if trains else contextlib.nullcontext():
        return _in_words(given)


def _in_words(arguments: list[str]) -> int:
    """Run one command; turn an exception into a message and an exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # now, while an error can still be reported
        return _leave(code)
    except SystemExit as exiting:  # after --help; a run that chose its exit code
        if isinstance(exiting.code, str):
            print(exiting.code, file=sys.stderr)
        return _leave(1 if isinstance(exiting.code, str) else exiting.code or 0)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        return _leave(INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return _leave(READER_LEFT)
    except Exception as error:
        message, code, cluster = traceback.format_exc(), SOFTWARE_ERROR, _cluster()
        lost_peer = cluster is not None and cluster.is_lost_peer(error)  # another process exited or did not connect
        if lost_peer:
            named = type(error).__name__ == "LostPeer"  # JAX's error does not name the process
            message = f"{error}" if named else "another process of this run exited; its message is above, or in its log"
        elif isinstance(error, OSError) and error.errno in _DISK_FULL:
            _drop_stdout()
            file = error.filename or "the output"
            message, code = f"error: {file} cannot be written: {error.strerror}", USER_ERROR
        elif isinstance(error, UserError) or hasattr(error, "exit_code"):
            lines = [cut(line, _LONGEST_LINE) for line in str(error).split("\n")]  # it may repeat any text
            more = [f"  … and {len(lines) - _MOST_LINES:,} more lines"] if len(lines) > _MOST_LINES else []
            message = escaped("\n".join([f"error: {lines[0]}", *lines[1:_MOST_LINES], *more]))
            code = getattr(error, "exit_code", USER_ERROR)
        elif is_of_users(error):
            from jdp.experiment.schema.make import users_traceback

            message = escaped(f"error: your code raised an exception:\n{users_traceback(error)}")
        joined = cluster.joined_as() if cluster else None
        prefix = f"process {joined[0]} of {joined[1]}: " if joined else ""
        print(f"{prefix}{message}", file=sys.stderr)
        return _leave(code, lost_peer=lost_peer)


def _drop_stdout() -> None:
    """Discard the rest of stdout, so that Python does not try to write it at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in HELP:
        lines = ["usage: jdp COMMAND …", "", "Data-parallel training on JAX sharding.", ""]
        lines += [wrapped(line, f"  {name:<9} ", " " * 12) for name, line in COMMANDS.items()]
        more = "jdp COMMAND --help shows more; jdp --version shows versions, also of JAX and CUDA's libraries."
        print("\n".join([*lines, "", wrapped(more)]), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else USER_ERROR
    if arguments[0] in ("-V", "--version"):
        print(_versions())
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        hint = nearest(name, [*COMMANDS, "--help", "--version"], cutoff=0.6) or f"; it has {', '.join(COMMANDS)}"
        raise UsageError(f"jdp has no command {name!r}{hint}")
    return importlib.import_module(f"jdp.cli.{name}").run(arguments[1:])


def _cluster() -> Any:
    """Return the module that joins clusters; None if it is not imported, so that this process is in none."""
    return sys.modules.get("jdp.core.cluster.initialize")


def _leave(code: int, *, lost_peer: bool = False) -> int:
    """Return the code; after a failure in a cluster, end the process with it at once."""
    if code and (cluster := _cluster()):
        cluster.leave_after_failure(code, lost_peer=lost_peer)
    return code


def _versions() -> str:
    """Return a line for each version that an error report needs, from pip's records: JAX is not imported."""
    import importlib.metadata

    lines = [f"jdp {jdp.__version__}", f"Python {platform.python_version()}"]
    for package, name in _PACKAGES.items():
        try:
            lines.append(f"{name} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            if package in _NEEDED:
                lines.append(f"{name} not installed")
    return "\n".join(lines)


class _Lasting(io.FileIO):
    """The file of a stream; after the first failed write it is /dev/null."""

    def write(self, data: Any, /) -> int:
        """Write all of `data`; on a non-blocking stream, wait for its reader."""
        left = memoryview(data).cast("B")
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
                name = _STREAMS[self.fileno()]
                words = f"jdp: {name} cannot be written ({error.strerror}): the run goes on without it\n"
                with contextlib.suppress(OSError):
                    os.write(2, words.encode())
                break
            if written is None:
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)


@contextlib.contextmanager
def lasting(name: str) -> Generator[None]:
    """Make writes to "stdout" or "stderr" never fail while in `with`; a notebook's streams are not changed."""
    stream: Any = getattr(sys, name)
    try:
        known = _STREAMS.get(stream.fileno()) == name
    except (OSError, AttributeError):  # a stream in memory
        known = False
    if not known:
        yield
        return
    stream.flush()
    file = _Lasting(stream.fileno(), "w", closefd=False)
    buffered = file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file)  # as with `python -u`
    same = {what: getattr(stream, what) for what in ("encoding", "errors", "line_buffering", "write_through")}
    lasts = io.TextIOWrapper(buffered, **same)  # pyright: ignore[reportArgumentType]
    setattr(sys, name, lasts)
    try:
        yield
    finally:
        lasts.flush()
        setattr(sys, name, stream)
