"""The error that a user's mistake raises, and short tracebacks for public functions.

An exception of the user's own function, such as a loss, passes through some ten functions of jdp. Its traceback keeps
only the first, the public function. The traceback of a `UserError` ends in the user's line. A fault of jdp keeps all
frames, and `JAX_TRACEBACK_FILTERING=off` keeps JAX's too.
"""

import os
import sysconfig
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, TypeVar


class UserError(ValueError):
    """A mistake of the user: the message names the rule, the value given, and the fix.

    The command line prints the message and exits with code 2. Any other exception is a fault of the program: it prints
    its traceback and exits with code 70.
    """


Function = TypeVar("Function", bound=Callable[..., Any])

_JDP = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def public(check: Callable[..., None] | None = None) -> Callable[[Function], Function]:
    """Decorate a public function: shorten the tracebacks of its exceptions.

    After an exception, and only then, `check` is called with the same arguments. If one of them is at fault, it raises
    a UserError, which replaces the exception.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def called(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except Exception as error:
                import jax

                inner = None if error.__traceback__ is None else error.__traceback__.tb_next
                if inner is not None and check is not None:
                    try:
                        check(*arguments, **keywords)
                    except UserError as mistake:
                        raise mistake from None
                if jax.config.jax_traceback_filtering != "off":  # pyright: ignore[reportAttributeAccessIssue]
                    error.__traceback__ = shortened(inner, isinstance(error, UserError))
                raise

        return called  # pyright: ignore[reportReturnType]

    return decorate


def shortened(first: TracebackType | None, at_end: bool) -> TracebackType | None:
    """Reduce each row of jdp's frames that leads to a frame of the user to its first; drop those `at_end`."""
    row: list[TracebackType] = []  # since the user's last frame: jdp's first frame, then those of libraries it calls
    frame = first
    while frame is not None:
        if is_users(frame.tb_frame):
            for above, below in pairwise([*row, frame]):
                above.tb_next = below
            row = []
        elif _is_jdps(frame.tb_frame) != bool(row):
            row.append(frame)
        frame = frame.tb_next
    if at_end and row:
        if row[0] is first:
            return None
        row[0].tb_next = None
    return first


def _is_jdps(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_JDP)


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is neither jdp's, nor Python's, nor an installed package's."""
    name = frame.f_code.co_filename
    if name == "<string>":  # `python -c`, or code that a dataclass generated
        return frame.f_globals.get("__name__") == "__main__"
    if name.startswith("<"):  # notebooks and doctests; Python's own modules
        return not name.startswith("<frozen")
    return not _is_jdps(frame) and not name.startswith(_PYTHON) and not any(part in name for part in _INSTALLED)


def is_of_users(error: BaseException) -> bool:
    """Return whether the user's code raised an error, or called the library that raised it."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if _is_jdps(frame) or is_users(frame)]
    return bool(frames) and is_users(frames[-1])
