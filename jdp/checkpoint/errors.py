"""Errors of checkpoints in one sentence: the disk is full, a file is damaged; and retries of temporary failures.

Orbax and TensorStore raise long errors of many kinds (`OSError`, `ValueError`, plain `Exception`) and log each with a
traceback. They become the cause of a `CheckpointError` that names the failure, the reason and the fix.
"""

import errno
import logging
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import jax

from jdp.base.errors import UserError
from jdp.core.cluster.barrier import from_every_process

_T = TypeVar("_T")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_ORBAX = f"{os.sep}orbax{os.sep}"
_FIXES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        " Free space there, keep fewer checkpoints, or choose another directory.",
    ),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), " Choose a directory that this process may write to."),
}
_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.EREMOTEIO),
}
"""Error numbers of a full or temporarily failing disk, and of an unreachable network file system."""
HOURS = 4 * 3600.0
"""How long processes wait for each other while they read or write, because shares of a checkpoint may be large."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or read, or does not fit the target.

    >>> try:
    ...     state = jdp.restore("nothing", state)
    ... except jdp.CheckpointError as error:
    ...     print(error)
    /.../nothing does not exist. Pass ...
    """


class DamagedError(CheckpointError):
    """A checkpoint whose files have changed since the save; `problem` names the file, without the fix."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


def write_error(what: str, error: BaseException, note: str = "") -> CheckpointError:
    while isinstance(error, CheckpointError) and error.__cause__ is not None:
        error = error.__cause__
    number = _os_number(error)
    fix = "" if number is None else _FIXES.get(number, " Choose another directory.")
    return CheckpointError(f"{what}: {_reason(error)}{note}.{fix}")


def is_passing(error: BaseException | None) -> bool:
    """Return True for a temporary failure of a disk, or an error with such a cause."""
    while error is not None:
        if _os_number(error) in _PASSING:
            return True
        error = error.__cause__
    return False


def on_first_process(action: Callable[[], None], what: str = "what process 0 does with a checkpoint") -> None:
    """Run `action` on process 0; all processes wait for it, and raise a CheckpointError if it fails.

    Threads that may do this at the same time each need their own `what`.
    """
    error, problem = None, ""
    if jax.process_index() == 0:
        try:
            action()
        except (CheckpointError, OSError) as raised:
            error, problem = raised, str(raised) or type(raised).__name__
    if problem := from_every_process(what, problem, seconds=HOURS)[0]:
        raise CheckpointError(problem) from error


@contextmanager
def reading(what: str, fix: str) -> Generator[None]:
    """Turn any exception of the code inside, which reads files, into a DamagedError that names the damage.

    MemoryError passes through.
    """
    restore_logging = hush()
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        problem = f"a file is damaged or missing: {_reason(error)}"
        raise DamagedError(f"{what} cannot be read; {problem}. {fix}.", problem) from error
    finally:
        restore_logging()


def hush() -> Callable[[], None]:
    """Stop Orbax from printing tracebacks of errors that reach the caller as exceptions; return an undo function.

    Orbax logs the errors in each of its threads. If one of several reads or writes fails, it drops the others. Later,
    asyncio logs each that failed, and Python reports an "unraisable" exception for each of the rest. Only these reports
    are dropped permanently.
    """
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or _ORBAX not in record.pathname

    logger.addFilter(keep)
    logging.getLogger("asyncio").addFilter(_is_of_others)  # one function, which is added once
    if (hook := sys.unraisablehook) not in _hooks:

        def report(unraisable: Any) -> None:
            coroutine = getattr(unraisable.object, "cr_code", None)  # one that was never finished
            is_orbax = _has_orbax(unraisable.exc_traceback) or _ORBAX in getattr(coroutine, "co_filename", "")
            if not is_orbax and str(unraisable.exc_value) != "Event loop is closed":
                hook(unraisable)

        _hooks.append(report)
        sys.unraisablehook = report
    return lambda: logger.removeFilter(keep)


_hooks: list[Any] = []


def _has_orbax(trace: TracebackType | None) -> bool:
    return any(_ORBAX in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


def _is_of_others(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _has_orbax(record.exc_info[2]))


def _reason(error: BaseException) -> str:
    """Return the reason in one line: the system's, or the innermost of TensorStore."""
    number = _os_number(error)
    if number is not None:
        return os.strerror(number)
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # TensorStore nests the reasons, innermost last, and appends a description of the store in brackets.
    return lines[0].partition(" [tensorstore_spec")[0].rpartition(": ")[2].strip().rstrip(".")[:200]


def _os_number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    numbers = _OS_ERROR.findall(str(error))
    return int(numbers[-1]) if numbers else None


# Retries for temporary failures: a full disk, or storage that is unreachable.

PATIENCE_SECONDS = 240.0
"""How long to retry: less than the five minutes of a step's deadline."""
STOPPING_SECONDS = 10.0
"""How long to retry in a process that was asked to stop: schedulers kill it after half a minute."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_jitter = random.Random()  # processes that failed together retry at different times


def retried(
    action: Callable[[bool], _T],
    *,
    passes: Callable[[Exception], bool],
    say: Callable[[str], None],
    stops: Callable[[], bool] = lambda: False,
) -> _T:
    """Call `action`; retry after growing pauses while `passes` accepts its exception, then raise it.

    `action` gets True on a retry. The first failure and the final success are reported. `stops` returns True once the
    process was asked to stop.
    """
    began, tries = 0.0, 0
    while True:
        try:
            result = action(tries > 0)
        except Exception as error:
            now = time.monotonic()
            began = began if tries else now
            pause = min(_FIRST_PAUSE * 2**tries, _LONGEST_PAUSE) * _jitter.uniform(0.5, 1.0)
            if not passes(error) or now + pause - began > (STOPPING_SECONDS if stops() else PATIENCE_SECONDS):
                raise
            if not tries:
                say(f"{str(error).removesuffix('.')}; retrying for {PATIENCE_SECONDS:.0f} s")
            tries += 1
        else:
            if tries:
                say(f"it succeeded after {time.monotonic() - began:.1f} s, at try {tries + 1}")
            return result
        time.sleep(pause)
