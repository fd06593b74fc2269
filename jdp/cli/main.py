"""The command line: finds the command and runs it; what a command does is in `jdp.commands`.

tyro reads a command's typed options; `--a.b value`, anything else that starts with two dashes, is an override of the
experiment file. Exit codes: 0 done; 1 the answer is no (`verify`, `prove`); 2 a user's mistake, with `error: ...` on
stderr; 70 a fault of the program, with its traceback, or of another process, with a line; 130 stopped by Ctrl-C; what
else a command exits with by itself (75: preempted, try again).

JAX is imported late, inside the commands, so that help and mistakes in options answer at once.
"""

import contextlib
import errno
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jdp
from jdp.cli import launch, plan, prove, train, verify
from jdp.cli.options import UsageError
from jdp.core.hints import nearest
from jdp.core.toml import cut

USER_ERROR, SOFTWARE_ERROR, INTERRUPTED, READER_LEFT = 2, 70, 130, 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MOST_LINES, _LONGEST_LINE = 20, 1000
COMMANDS = {"train": train, "plan": plan, "verify": verify, "prove": prove, "launch": launch}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. In a cluster, a failure ends the process here instead (see `_leave`)."""
    _open_closed_streams()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where what goes wrong can be said
        return _leave(code)
    except SystemExit as left:  # tyro after --help or an error; a run that chose its exit code
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return _leave(1 if isinstance(left.code, str) else left.code or 0)
    except KeyboardInterrupt:
        return _leave(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        _drop_stdout()
        return _leave(READER_LEFT)
    except Exception as error:
        if _is_lost_peer(error):
            print(f"{_who()}another process of this run left; its message is above, or in its log", file=sys.stderr)
            return _leave(SOFTWARE_ERROR, lost_peer=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _drop_stdout()
            what = f"{error.filename} cannot be written" if error.filename else "the output cannot be written"
            print(f"{_who()}error: {what}: {error.strerror}", file=sys.stderr)
            return _leave(USER_ERROR)
        mistake = _is_users_mistake(error)
        print(f"{_who()}error: {_said(error)}" if mistake else f"{_who()}{traceback.format_exc()}", file=sys.stderr)
        return _leave(USER_ERROR if mistake else SOFTWARE_ERROR)


def _open_closed_streams() -> None:
    """Where the caller closed stdout or stderr (`>&-`), write to nothing: Python has None there, and the next file that
    is opened would take its number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_WRONLY)
            os.dup2(opened, number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _drop_stdout() -> None:
    """What is still to be written to stdout cannot be: Python must not try again when it exits."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
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
    return COMMANDS[name].run(arguments[1:])


def _said(error: Exception) -> str:
    """An error's message as a terminal may show it: what it repeats of a file or a name can hold anything."""
    lines = str(error).split("\n")
    shown = ["".join(map(_shown, cut(line, _LONGEST_LINE))) for line in lines[:_MOST_LINES]]
    rest = [f"  … and {len(lines) - _MOST_LINES:,} more lines"] if len(lines) > _MOST_LINES else []
    return "\n".join([*shown, *rest])


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1]


def _is_users_mistake(error: Exception) -> bool:
    """Whether jdp itself raised this ValueError: its house rule is `ValueError` for users, `assert` for its own faults.

    One that Python or another library raised, even below jdp, is a fault of the program and keeps its traceback.
    """
    if not isinstance(error, ValueError):
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    in_jdp = Path(innermost.filename).is_relative_to(Path(jdp.__file__).parent)
    return in_jdp and (innermost.line or "").startswith("raise ")


def _is_lost_peer(error: Exception) -> bool:
    """Whether JAX, in a cluster, says that it was another process that ended: its reason is there, not here."""
    distributed = sys.modules.get("jdp.core.distributed")
    return distributed is not None and distributed.is_lost_peer(error)


def _leave(code: int, *, lost_peer: bool = False) -> int:
    """After a failure in a cluster, end the process at once; else hand the code on."""
    if code and (distributed := sys.modules.get("jdp.core.distributed")):
        distributed.leave_after_failure(code, lost_peer=lost_peer)
    return code


def _who() -> str:
    """Which process of the cluster speaks; empty outside of one."""
    distributed = sys.modules.get("jdp.core.distributed")
    joined = distributed.joined_as() if distributed else None
    return f"process {joined[0]} of {joined[1]}: " if joined else ""


def _help() -> str:
    lines = ["usage: jdp COMMAND …", "", "Data-parallel training on JAX sharding.", ""]
    lines += [f"  {name:<8} {(command.Options.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "jdp COMMAND --help says more; jdp --version says which version this is."])


def _versions() -> str:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return f"jdp {version('jdp')} (jax {version('jax')}, Python {platform.python_version()})"
