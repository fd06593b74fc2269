"""Programs of users, FILE.py:FUNCTION, for the commands that read any step: `jdp verify` and `jdp plan`."""

import contextlib
import math
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdp.cli.options import UsageError, choose_target_platform, flag_of

if TYPE_CHECKING:
    from jdp.cli.load import Program
    from jdp.foresight.step_report import StepReport


def is_program(file: Path) -> bool:
    """Return True for FILE.py, FILE.py:FUNCTION or module.path:function, unless it is a file of another kind."""
    named = file.suffix == ".py" or re.search(r".:[^\W\d]\w*$", str(file)) is not None
    return named and not (file.suffix != ".py" and file.exists())


def check_only(options: Any, overrides: Mapping[str, str], taken: Sequence[str], rule: str) -> None:
    """Check that nothing is given but the options `taken`. Raises UsageError: the rule, with another option as {}."""
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    others = [*(flag_of(name) for name in given if name not in taken), *(f"--{key}" for key in overrides)]
    if others:
        raise UsageError(rule.replace("{}", others[0], 1))


def check_program(options: Any, overrides: Mapping[str, str], taken: Sequence[str]) -> None:
    """Check that a program is given no option of an experiment. Raises UsageError."""
    known = ", ".join(flag_of(name) for name in taken if name != "file")
    rule = f"{{}} is for an experiment; given the program {options.file}: remove it. A program takes {known}"
    check_only(options, overrides, taken, rule)


def forecast_on(file: Path, target_name: str | None, *, cache: bool) -> "tuple[Program, StepReport]":
    """Load a program, and compile its step for a target; None: for this machine's devices.

    A program that does not take the target's devices finds as many virtual CPU devices.
    """
    import jax

    from jdp.cli.load import load, users_errors

    with _as_script(file):
        _choose_devices(target_name)

        from jdp.cli.terminal import Progress
        from jdp.core.step import Step
        from jdp.foresight.any_step.forecast import forecast
        from jdp.foresight.targets.relocate import answered_for, cudnn_of
        from jdp.foresight.targets.resolve import target

        devices = None if target_name is None else target(target_name)  # first: a mistake there answers at once
        program = load(str(file))
        described = (None, None) if devices is None else (devices.devices[0], cudnn_of(devices))
        with answered_for(*described):  # a function that makes shapes of a model may trace its fused attention
            step, arguments = program.step(lambda: jax.devices() if devices is None else devices.devices)
        step = step.jitted if isinstance(step, Step) else step
        with Progress() as progress, users_errors(f"the step of {file} could not be compiled"):
            progress.compiling(0, 1, f"{file} for {devices or 'this machine'}")
            return program, forecast(step, arguments, target=devices, cache=cache)


@contextlib.contextmanager
def _as_script(file: Path) -> Generator[None]:
    """Show a user's file the command line of a script without options, and keep jax's own lines in tracebacks.

    By these it is known who raised what: the user's code, a library, or jdp.
    """
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
    """Choose CPU devices, as many as the target has; without a target, what this machine has."""
    choose_target_platform([target])
    sizes = [] if target is None else target.rpartition(":")[2].split("x")
    count = math.prod(int(size) for size in sizes if size.isdecimal() and len(size) < 6)
    if sizes and 0 < count <= _MOST_CPUS:
        from jdp.base.machine import use_cpu_devices

        with contextlib.suppress(RuntimeError):  # jax has started: its devices stay
            use_cpu_devices(count)


_MOST_CPUS = 16384  # as many as a target may have
