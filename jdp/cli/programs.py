"""Programs of users, FILE.py:FUNCTION, for the commands that read any step: `jdp verify` and `jdp plan`."""

import contextlib
import math
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdp.cli.options import UsageError, choose_target_platform, flag_of

if TYPE_CHECKING:
    from jdp.foresight.any_step.forecast import StepForecast
    from jdp.foresight.any_step.load import Program


@dataclass(frozen=True)
class Forecasts:
    """A program's step on each target."""

    program: "Program"
    reports: tuple["StepForecast", ...]


def is_program(file: Path) -> bool:
    """Return True for FILE.py, FILE.py:FUNCTION or module.path:function, unless it is a file of another kind."""
    named = file.suffix == ".py" or re.search(r".:[^\W\d]\w*$", str(file)) is not None
    return named and not (file.suffix != ".py" and file.exists())


def check_only(options: Any, overrides: Mapping[str, str], taken: Sequence[str]) -> None:
    """Check that nothing is given that belongs to experiments. Raises UsageError."""
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    others = [*(flag_of(name) for name in given if name not in taken), *(f"--{key}" for key in overrides)]
    if others:
        raise UsageError(
            f"{others[0]} is for an experiment; given the program {options.file}: remove it. A program takes "
            f"{', '.join(flag_of(name) for name in taken if name != 'file')}"
        )


def check_experiment(options: Any, names: Sequence[str]) -> None:
    """Check that nothing is given that belongs to programs. Raises UsageError."""
    defaults = {each.name: each.default for each in fields(options)}
    given = [flag_of(name) for name in names if getattr(options, name) != defaults[name]]
    if given:
        raise UsageError(
            f"{given[0]} is for a program, FILE.py:FUNCTION; given the experiment {options.file}: remove it"
        )


def forecasts(file: Path, targets: Sequence[str | None], *, cache: bool) -> Forecasts:
    """Load a program, and compile its step for every target; None: for this machine's devices.

    A program that does not take the target's devices finds as many virtual CPU devices as the largest target has.
    """
    from jdp.foresight.any_step.load import load

    named = [target for target in targets if target is not None]
    with _as_script(file):
        _choose_devices(named)
        from jdp.cli.terminal import Progress
        from jdp.foresight.targets.resolve import target

        resolved = [target(each) for each in named]  # before the user's file is run: a mistake there answers at once
        program = load(str(file))
        with Progress() as progress:
            reports = list["StepForecast"]()
            for number, devices in enumerate(resolved or [None]):
                progress.compiling(number, len(targets), f"{program.name} for {devices or 'this machine'}")
                reports.append(_forecast(program, devices, cache=cache))
            progress.compiling(len(targets), len(targets), "")
    return Forecasts(program, tuple(reports))


def _forecast(program: "Program", devices: Any, *, cache: bool) -> "StepForecast":
    import jax

    from jdp.core.step import Step
    from jdp.foresight.any_step.forecast import forecast
    from jdp.foresight.any_step.load import users_errors

    step, arguments = program.step(lambda: jax.devices() if devices is None else devices.devices)
    if isinstance(step, Step):
        raise UsageError(
            f"a program's step is jitted by jax.jit, nnx.jit or eqx.filter_jit; given a jdp.Step by {program.name}: "
            "call jdp.verify(step, state, batch, target), or write an experiment"
        )
    with users_errors(f"the step of {program.name} could not be compiled"):
        return forecast(step, arguments, target=devices, cache=cache)


@contextlib.contextmanager
def _as_script(file: Path) -> Generator[None]:
    """Show a user's file the command line of a script without options."""
    before = sys.argv
    sys.argv = [str(file)]
    try:
        yield
    finally:
        sys.argv = before


def _choose_devices(targets: Sequence[str]) -> None:
    """Choose CPUs, as many as the largest target has devices; without a target, what this machine has."""
    choose_target_platform(targets or [None])
    shapes = [name.rpartition(":")[2].split("x") for name in targets]
    counts = [math.prod(map(int, shape)) for shape in shapes if all(size.isdecimal() for size in shape)]
    if counts and max(counts) <= _MOST_CPUS:
        import jax

        with contextlib.suppress(RuntimeError):  # jax has started: its devices stay
            jax.config.update("jax_num_cpu_devices", max(counts))


_MOST_CPUS = 16384  # as many as a target may have
