"""Users' programs, FILE.py:FUNCTION or module.path:function, for the commands that read any step: verify and plan.

The function takes nothing, or the target's devices in an argument `devices`; it returns a jitted step and its
arguments. Exceptions are reported with the user's own lines, without those of libraries.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from jdp.base.errors import UserError
from jdp.base.machine import use_cpu_devices
from jdp.base.toml import brief, cut
from jdp.base.words import nearest
from jdp.cli.options import UsageError, choose_target_platform, flag_of
from jdp.experiment.schema.make import users_traceback

if TYPE_CHECKING:
    from jdp.foresight.memory import StepReport

_FUNCTION = re.compile(r"(?P<module>.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")
_DESCRIBED = (
    "Nothing runs on the devices of a target. Make abstract arrays (jax.eval_shape, jax.ShapeDtypeStruct) outside of "
    "jax.set_mesh; or remove the argument `devices`: jax.devices() then has as many virtual CPU devices."
)
_AS_SCRIPT = 'Put the code that a script runs, and its choice of devices, under if __name__ == "__main__".'
_SHAPES = "(jitted step, (argument, …))"
_MOST_CPUS = 16384  # largest target
_JDP = str(Path(__file__).parents[1])


def is_program(file: Path) -> bool:
    """Return True for FILE.py, FILE.py:FUNCTION or module.path:function, unless it is a file of another kind."""
    named = file.suffix == ".py" or re.search(r".:[^\W\d]\w*$", str(file)) is not None
    return named and not (file.suffix != ".py" and file.exists())


def check_only(options: Any, overrides: Mapping[str, str], taken: Sequence[str], rule: str) -> None:
    """Check that only the options `taken` are given. Raises UsageError with `rule`, {} replaced by another option."""
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    others = [*(flag_of(name) for name in given if name not in taken), *(f"--{key}" for key in overrides)]
    if others:
        raise UsageError(rule.replace("{}", others[0], 1))


def check_program(options: Any, overrides: Mapping[str, str], taken: Sequence[str]) -> None:
    known = ", ".join(flag_of(name) for name in taken if name != "file")
    rule = f"{{}} is for an experiment; given the program {options.file}: remove it. A program takes {known}"
    check_only(options, overrides, taken, rule)


def forecast_on(file: Path, target_name: str | None, *, cache: bool) -> tuple[Path, StepReport]:
    """Compile a program's step for a target (None: this machine's devices); return its root folder and the report."""
    import jax

    with _as_script(file):
        _choose_devices(target_name)

        from jdp.cli.terminal import Progress
        from jdp.core.step import Step
        from jdp.foresight.any_step.forecast import forecast
        from jdp.foresight.targets.relocate import answered_for
        from jdp.foresight.targets.resolve import target

        devices = None if target_name is None else target(target_name)  # first: reports a mistake at once
        function, root = load(str(file))
        name = str(file).rpartition(":")[2]
        given: dict[str, Any] = {}
        if _takes_devices(function, name):
            given["devices"] = list(jax.devices() if devices is None else devices.devices)
        failed = users_errors(f"{file} could not be called", _DESCRIBED if given else "")
        described = answered_for(None if devices is None else devices.devices[0])
        with described, failed:  # a function that makes a model's shapes may trace its fused attention
            returned = function(**given)
        step, arguments = _step_of(returned, name)
        step = step.jitted if isinstance(step, Step) else step
        with Progress() as progress, users_errors(f"the step of {file} could not be compiled"):
            progress.compiling(0, 1, f"{file} for {devices or 'this machine'}")
            return root, forecast(step, arguments, target=devices, cache=cache)


@contextlib.contextmanager
def _as_script(file: Path) -> Generator[None]:
    """Give a user's file a command line without options, and unfiltered tracebacks, which show whose code failed."""
    import jax

    argv, filtering = sys.argv, jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [str(file).rpartition(":")[0] or str(file)]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        sys.argv = argv
        jax.config.update("jax_traceback_filtering", filtering)


def _choose_devices(target: str | None) -> None:
    """Choose as many CPU devices as the target has; without a target, this machine's devices."""
    choose_target_platform([target])
    sizes = [] if target is None else target.rpartition(":")[2].split("x")
    count = math.prod(int(size) for size in sizes if size.isdecimal() and len(size) < 6)
    if sizes and 0 < count <= _MOST_CPUS:
        with contextlib.suppress(RuntimeError):  # jax has started: its devices stay
            use_cpu_devices(count)


def load(text: str) -> tuple[Callable[..., Any], Path]:
    """Import a program; return its function, and the folder of its repository, else its own."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise UserError(
            f"a program is FILE.py:FUNCTION or module.path:function, whose function returns a jitted step and its "
            f"arguments; given {brief(text)}: add :FUNCTION, after a file that ends in .py or a module"
        )
    module_name, name = found["module"], found["name"]
    with users_errors(f"{module_name} could not be imported", _AS_SCRIPT):
        if module_name.endswith(".py"):
            module = _import_file(Path(module_name))
        else:  # like `python -m`, from the working directory too
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        hint = nearest(name, own) or (f": it has {', '.join(own[:6])}" if own else ": it has no function")
        raise UserError(f"a program's function is one that its file has; given {name!r}, not in {module_name}{hint}")
    folder = Path(getattr(module, "__file__", None) or ".").resolve().parent
    return function, next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def _import_file(file: Path) -> ModuleType:
    """Import a file with its folder on the path, like `python FILE`, under its own name if that is free."""
    if not file.is_file():
        raise UserError(f"a program is a Python file that exists; given {brief(str(file))}: correct its path")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"_jdp_program_{id(file)}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _takes_devices(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes `devices`. Raises UserError if it needs another argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable and p.name != "devices"]
    if needed:
        raise UserError(
            f"a program's function is called with nothing, or with the target's devices as `devices`; given {name}, "
            f"which needs {', '.join(needed)}: give {needed[0]} a default, or name a function that calls {name}"
        )
    return any(p.name == "devices" for p in parameters)


def _step_of(returned: Any, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step and its arguments."""
    parts = list[Any](cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ())
    if len(parts) != 2 or not callable(parts[0]) or not isinstance(parts[1], tuple | list):
        shown = cut(f"({', '.join(type(each).__name__ for each in parts)})") if parts else type(returned).__name__
        fix = "return the step and a tuple of its arguments; for arguments by keyword, a lambda that calls the step"
        raise UserError(f"{name} must return {_SHAPES}; given {shown}: {fix}")
    return parts[0], tuple(parts[1])


@contextlib.contextmanager
def users_errors(what: str, of_library: str = "") -> Generator[None]:
    """Turn exceptions of a user's code, or of a library that it calls, into a `UserError` with the user's own lines.

    `of_library` is added to a library's exceptions. Exceptions of jdp's own code pass.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # If jdp's call of a user's function raises TypeError, the function does not take the argument.
        is_call = isinstance(error, TypeError) and "function(*" in (frames[-1].line or "")
        if frames[-1].filename.startswith(_JDP) and not is_call:
            raise
        of_frames = of_library if "-packages/" in frames[-1].filename else ""
        hint = _AS_SCRIPT if isinstance(error, SystemExit) else of_frames
        raise UserError("\n".join(filter(None, (f"{what}:", users_traceback(error), hint)))) from None
