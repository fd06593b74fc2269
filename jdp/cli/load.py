"""A user's program, FILE.py:FUNCTION or module.path:function: imported, and called for a jitted step and its arguments.

The function takes nothing, or the target's devices in an argument `devices`. Its exceptions are reported with the
user's own lines, without those of libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from jdp.base.errors import UserError
from jdp.base.toml import brief, cut
from jdp.base.words import nearest
from jdp.core.types import Device
from jdp.foresight.traffic.origin import is_own_line

_FUNCTION = re.compile(r"(?P<module>.+):(?P<name>[^\W\d]\w*)")
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/|/lib/python3\.\d+/|^<")
_DESCRIBED = (
    "Nothing runs on the devices of a target. Make abstract arrays (jax.eval_shape, jax.ShapeDtypeStruct) outside of "
    "jax.set_mesh; or remove the argument `devices`: jax.devices() then has as many virtual CPU devices."
)
_SHOWN = 4  # of the user's lines
_SHAPES = "(jitted step, (argument, …)), or (jitted step, (argument, …), {name: argument})"


class ProgramError(UserError):
    """A program that cannot be loaded, called or traced; the message has the user's own lines."""


@dataclass(frozen=True)
class Program:
    """A user's function that returns a jitted step and its arguments."""

    name: str  # as given: "my_train.py:make_step"
    root: Path  # source lines are relative to it: the program's repository, else its folder
    function: Callable[..., Any]

    def step(self, devices: Callable[[], Sequence[Device]]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Call the function, with the devices if it takes them; return the step and its positional arguments.

        Arguments by keyword are the last.
        """
        name = self.name.rpartition(":")[2]
        given = {"devices": list(devices())} if _takes_devices(self.function, name) else {}
        with users_errors(f"{self.name} could not be called", _DESCRIBED if given else ""):
            returned = self.function(**given)
        return _step_of(returned, name)


def load(text: str) -> Program:
    """Import a program and find its function."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ProgramError(
            f"a program is FILE.py:FUNCTION or module.path:function, whose function returns a jitted step and its "
            f"arguments; given {brief(text)}: add :FUNCTION"
        )
    module_name, name = found["module"], found["name"]
    with users_errors(f"{module_name} could not be imported"):
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        hint = nearest(name, own) or (f": it has {', '.join(own[:6])}" if own else ": it has no function")
        raise ProgramError(f"a program's function is one that its file has; given {name!r}, not in {module_name}{hint}")
    return Program(text, _root(Path(getattr(module, "__file__", None) or ".")), function)


def _import_file(file: Path) -> ModuleType:
    """Import a file with its folder on the path, like `python FILE`, under its own name if that is free."""
    if not file.is_file():
        raise ProgramError(f"a program is a Python file that exists; given {brief(str(file))}: correct its path")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"_jdp_program_{id(file)}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """Import a module like `python -m`, from the working directory too."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ProgramError(
            f"a program is FILE.py:FUNCTION or module.path:function; given {brief(name)} before the colon: name a file "
            "that ends in .py, or a module"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _takes_devices(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes `devices`. Raises ProgramError if it needs another argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable and p.name != "devices"]
    if needed:
        raise ProgramError(
            f"a program's function is called with nothing, or with the target's devices as `devices`; given {name}, "
            f"which needs {', '.join(needed)}: give {needed[0]} a default, or name a function that calls {name}"
        )
    return any(p.name == "devices" for p in parameters)


def _step_of(returned: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step and its positional arguments; keyword arguments come last."""
    parts = list[Any](cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ())
    if len(parts) not in (2, 3) or not callable(parts[0]) or not isinstance(parts[1], tuple | list):
        shown = cut(f"({', '.join(type(each).__name__ for each in parts)})") if parts else type(returned).__name__
        raise ProgramError(f"{name} must return {_SHAPES}; given {shown}: return the step and a tuple of its arguments")
    step, arguments, by_name = parts[0], tuple(parts[1]), parts[2] if len(parts) == 3 else {}
    if not isinstance(by_name, Mapping):
        raise ProgramError(f"{name} must return {_SHAPES}; given {type(by_name).__name__} third: make it a dictionary")
    if not by_name:
        return step, arguments
    return _with_keywords(step, len(arguments), [*by_name]), (*arguments, *by_name.values())


def _with_keywords(step: Callable[..., Any], count: int, names: Sequence[str]) -> Callable[..., Any]:
    """Return a step whose last positional arguments are passed on by keyword."""
    try:
        parameters = [*inspect.signature(step).parameters][:count]
    except (TypeError, ValueError):
        parameters = list[str]()
    first = parameters + [f"argument_{number}" for number in range(len(parameters), count)]

    def called(*arguments: Any) -> Any:
        return step(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(each, kind) for each in (*first, *names)])
    called.__name__ = getattr(step, "__name__", type(step).__name__)
    called.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return called


def _root(file: Path) -> Path:
    """Return a file's repository, else its folder."""
    folder = file.resolve().parent
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


@contextmanager
def users_errors(what: str, of_library: str = "") -> Generator[None]:
    """Turn exceptions of a user's code, or of a library that it calls, into a `ProgramError`.

    `of_library` is added to a library's exceptions. Exceptions of jdp's own code pass: a ValueError with its message,
    any other as a fault of jdp.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames, here = traceback.extract_tb(error.__traceback__), f"{Path.cwd()}/"
        # A TypeError in jdp's call of a user's function is the user's: the function may not take the argument.
        is_call = isinstance(error, TypeError) and "function(*" in (frames[-1].line or "")
        if _is_own(frames[-1]) and not is_call:
            raise
        own = [frame for frame in frames if not _INSTALLED.search(frame.filename) and not _is_own(frame)]
        lines = [
            f"  {frame.filename.removeprefix(here)}:{frame.lineno}, in {frame.name}: {frame.line}"
            for frame in own[-_SHOWN:]
        ]
        hint = [of_library] if of_library and own and own[-1] is not frames[-1] else []
        said = "\n".join(cut(line, 400) for line in str(error).strip().splitlines()[:6]) or "(no message)"
        if isinstance(error, SystemExit):
            said = f'{error.code}; what a script runs belongs under if __name__ == "__main__"'
        message = "\n".join([f"{what}: {type(error).__name__}: {said}", *lines, *hint])
    else:
        return
    raise ProgramError(message)


def _is_own(frame: traceback.FrameSummary) -> bool:
    return is_own_line(f"{frame.filename}:")
