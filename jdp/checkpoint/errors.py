"""What goes wrong with checkpoints, in one sentence: the disk is full, the folder cannot be written, a file is damaged.

Orbax and TensorStore raise errors of many kinds (`OSError`, `ValueError`, plain `Exception`), long and with the
system's error number inside, and log each with a traceback. Here they become a `CheckpointError` that says what failed,
why, and what to do; theirs stays as its cause.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_ORBAX = f"{os.sep}orbax{os.sep}"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or read, or that does not fit."""


def write_error(what: str, error: BaseException, note: str = "") -> CheckpointError:
    """`what` failed because of `error`: the reason, and the fix that goes with it."""
    number = _os_number(error)
    fix = ""
    if number in _FULL:
        fix = " Free space there, keep fewer checkpoints, or choose another directory."
    elif number in _CLOSED:
        fix = " Choose a directory that this process may write to."
    elif number is not None:
        fix = " Choose another directory."
    return CheckpointError(f"{what}: {_reason(error)}{note}.{fix}")


@contextmanager
def reading(what: str, fix: str) -> Generator[None]:
    """Whatever goes wrong inside while files are read means that `what` is damaged; `fix` is a sentence without its
    full stop. Running out of memory is left alone.
    """
    loud = hush()
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be read; a file is damaged or missing: {_reason(error)}. {fix}."
        ) from error
    finally:
        loud()


def hush() -> Callable[[], None]:
    """Keep Orbax from printing tracebacks of errors that reach the caller as exceptions; return what undoes it.

    It logs them in each of its threads. And when one of several reads or writes fails it leaves the others, of each of
    which Python then says that it found no one to raise to; those messages, and only those, are held back for good.
    """
    if sys.unraisablehook not in _hooks:
        _hooks.append(_without_orbax(sys.unraisablehook))
        sys.unraisablehook = _hooks[-1]
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or _ORBAX not in record.pathname

    logger.addFilter(keep)
    return lambda: logger.removeFilter(keep)


_hooks: list[Any] = []


def _without_orbax(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def filtered(unraisable: Any) -> None:
        if not _of_one_left(unraisable):
            hook(unraisable)

    return filtered


def _of_one_left(unraisable: Any) -> bool:
    if isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed":
        return True
    codes: list[Any] = [frame.f_code for frame, _ in traceback.walk_tb(unraisable.exc_traceback)]
    codes.append(getattr(unraisable.object, "cr_code", None))  # a coroutine that was never finished
    return any(_ORBAX in code.co_filename for code in codes if code is not None)


def _reason(error: BaseException) -> str:
    number = _os_number(error)
    if number is not None:
        return os.strerror(number)
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # TensorStore nests what went wrong, innermost last, and appends a description of the store in brackets.
    return lines[0].partition(" [tensorstore_spec")[0].rpartition(": ")[2].strip().rstrip(".")[:200]


def _os_number(error: BaseException) -> int | None:
    """The system's error number: of an OSError, or as TensorStore writes it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.findall(str(error))
    return int(found[-1]) if found else None
