"""Damaged checkpoints: they are set aside, and the newest complete checkpoint is read instead.

A checkpoint requested by its step is never replaced by another. If none is complete, nothing is moved, and an error
lets the user decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import jax

from jdp.base.notices import warn
from jdp.base.public import public
from jdp.base.user_path import user_path
from jdp.checkpoint.errors import HOURS, CheckpointError, DamagedError
from jdp.checkpoint.format import checksums
from jdp.checkpoint.format.content import Source
from jdp.checkpoint.format.stored import Stored, is_checkpoint
from jdp.checkpoint.upkeep import ownership
from jdp.core.cluster.barrier import from_every_process, from_first_process, meet

RUN_FOLDER = "checkpoints"
"""The folder of checkpoints in a run's folder."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Checked:
    """The result of `check` for one checkpoint.

        >>> jdp.save("checkpoint", state)
        >>> jdp.checkpoint.check("checkpoint")
        [Checked(folder=...Path('/.../checkpoint'), step=None, status='whole', problem='')]

    Attributes:
        folder: the checkpoint's.
        step: its step; None if the folder's name is not a step.
        status: "whole" if no file has changed since the save, else "damaged".
        problem: the first damaged file and its fault; "" if whole.
    """

    folder: Path
    step: int | None
    status: Literal["whole", "damaged"]
    problem: str = ""


@public()
def check(path: str | Path) -> list[Checked]:
    """Compare every file of a checkpoint, or of all checkpoints in a directory, with its checksum. Changes nothing.

        >>> with jdp.Checkpoints("run") as checkpoints:
        ...     checkpoints.save(state)
        >>> [(found.step, found.status) for found in jdp.checkpoint.check("run")]
        [(0, 'whole')]

    It needs no devices and no other processes. Checkpoints that are being written or deleted are skipped.

    Args:
        path: the folder of a run, a directory of checkpoints, or one checkpoint.

    Returns:
        An entry for each checkpoint, oldest first.
    """
    path = user_path(path).absolute()
    if is_checkpoint(path):
        return [_checked(path)]
    folders: list[Path] = []
    for directory in (path, path / RUN_FOLDER):
        steps = ownership.numbered_steps if ownership.is_marked(directory) else ownership.committed_steps
        folders += [directory / str(step) for step in steps(directory)]
    found = map(_checked, sorted(folders, key=lambda folder: int(folder.name)))
    return [each for each in found if each.status == "whole" or each.folder.exists()]  # it may have been deleted


def _checked(folder: Path) -> Checked:
    problem = checksums.verify(folder)
    step = int(folder.name) if folder.name.isdecimal() else None
    return Checked(folder, step, "damaged" if problem else "whole", problem)


def read_newest(directory: Path, read: Callable[[Source], _T]) -> tuple[_T, int, dict[int, str]]:
    """Read the newest complete checkpoint, the same on every process. Every process calls this."""
    damaged: dict[int, str] = {}
    while True:
        left = [step for step in ownership.committed_steps(directory) if step not in damaged]
        step = from_first_process("which checkpoint is read", left[-1] if left else -1)
        if step < 0:
            break
        folder = directory / str(step)
        value, problem = None, ""
        try:
            value = read(Stored(folder, "There may be others in that directory: name one of them"))
        except DamagedError as error:
            if error.__cause__ is not None and not checksums.verify(folder):
                raise  # its bytes are unchanged: unreadable, but not damaged
            problem = error.problem
        problems = from_every_process("what was read of a checkpoint", problem, seconds=HOURS)
        problem = next(filter(None, problems), "")
        if not problem:
            return value, step, damaged  # pyright: ignore[reportReturnType]
        damaged[step] = problem
    found = "; ".join(f"{step}: {problem}" for step, problem in damaged.items())
    raise CheckpointError(
        f"No checkpoint in {directory} is whole ({found or 'there are none'}). Replace one by a copy, or move them "
        "away to start afresh."
    )


def report(directory: Path, damaged: Mapping[int, str], instead: int) -> None:
    """Report the damaged checkpoints that stay, and the one that is read instead."""
    for step, problem in sorted(damaged.items()):
        warn(f"{directory}: checkpoint {step} is damaged ({problem}); {instead} is read instead")


def set_aside(directory: Path, damaged: Mapping[int, str], instead: int) -> None:
    """Rename damaged checkpoints to `damaged-STEP` on process 0, and report each."""
    for step, problem in sorted(damaged.items()) if jax.process_index() == 0 else ():
        try:
            done = f"set aside as {ownership.set_damaged_aside(directory, step)}"
        except FileNotFoundError:
            continue  # another process has deleted or set it aside meanwhile
        except OSError as error:
            done = f"cannot be set aside ({error.strerror})"
        warn(f"{directory}: checkpoint {step} is damaged ({problem}) and {done}; {instead} is read instead")
    if damaged:
        meet("where process 0 sets damaged checkpoints aside")
