"""The entries of a directory of checkpoints: which are jdp's, which to keep, and which are damaged.

A directory that jdp writes has a marker file. A step is written to `.saving-STEP` and renamed to STEP when it is
complete; before deletion it is renamed to `.deleted-STEP`. So a numbered folder is always complete, and nothing else is
deleted. Links are never followed for deletion.

A step whose files have changed since the save is renamed to `damaged-STEP`, and the newest complete step is read
instead. A step requested by its number is never replaced by another. If none is complete, nothing is moved, and an
error lets the user decide. Steps that a run abandons by `go_back`, damaged or not, are moved to `abandoned-1`,
`abandoned-2`, …
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import jax

from jdp.base.errors import UserError, public
from jdp.base.formatting import finite_or_none
from jdp.base.notices import warn
from jdp.base.user_path import user_path
from jdp.base.words import is_integer
from jdp.checkpoint.content import Source
from jdp.checkpoint.errors import HOURS, CheckpointError, DamagedError, write_error
from jdp.checkpoint.stored import COMMITTED, Stored, is_checkpoint, verify
from jdp.core.cluster.barrier import from_every_process, from_first_process, meet

MARKER = ".jdp-checkpoints"
"""The file that marks a directory as jdp's."""
SAVING, DELETED, ABANDONED, DAMAGED = ".saving-", ".deleted-", "abandoned-", "damaged-"
_STEP = re.compile(r"0|[1-9][0-9]*")
_STEP_OR_DAMAGED = re.compile(rf"({_STEP.pattern})|{DAMAGED}({_STEP.pattern})(-[0-9]+)?")
RUN_FOLDER = "checkpoints"
"""The folder of checkpoints in a run's folder."""
_T = TypeVar("_T")
_LEFTOVER = re.compile(rf"({re.escape(SAVING)}|{re.escape(DELETED)})({_STEP.pattern})")


def numbered_steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _STEP.fullmatch(path.name))


def committed_steps(directory: Path) -> list[int]:
    """Return the steps with complete checkpoints, or links to them, oldest first."""
    return [step for step in numbered_steps(directory) if is_checkpoint(directory / str(step))]


def is_marked(directory: Path) -> bool:
    return (directory / MARKER).is_file()


def make_directory(directory: Path) -> None:
    """Make a directory of checkpoints. In an existing directory, numbered entries must be checkpoints."""
    if {*"*?[\\"} & {*str(directory)}:
        raise CheckpointError(
            f"{directory} is a pattern to Orbax, which would write checkpoints that cannot be read: choose a path "
            "without *, ?, [ and backslashes."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"{directory} cannot be made a directory of checkpoints", error) from error
    for name in sorted(path.name for path in directory.iterdir() if path.name.isascii() and path.name.isdecimal()):
        if _STEP.fullmatch(name) and is_checkpoint(directory / name):
            continue
        if not is_marked(directory):
            raise CheckpointError(
                f"{directory} contains {name}, which is not a checkpoint. jdp deletes numbered folders here: choose an "
                f"empty folder, such as {directory / 'checkpoints'}."
            )
        warn(f"{directory}: {name} has no {COMMITTED} and is ignored")


def claim(directory: Path) -> BinaryIO:
    """Return the marker file, locked until `release`. Raises CheckpointError if another process saves."""
    marker = (directory / MARKER).open("ab")
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # network file systems may raise the second
        marker.close()
        raise CheckpointError(
            "one process at a time saves in a directory, and another is saving there; end that run, or choose another "
            "directory"
        ) from None
    except OSError:  # a file system without locks
        pass
    return marker


def release(marker: BinaryIO) -> None:
    """Unlock the marker file: after a fork, closing it is not enough."""
    with suppress(OSError), marker:
        fcntl.flock(marker, fcntl.LOCK_UN)


def remove_leftovers(directory: Path) -> None:
    """Delete folders that killed runs left half-written or half-deleted. The directory must be claimed."""
    for path in list(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            remove(path)


def remove(folder: Path) -> None:
    """Delete a folder, with retries for two seconds: Orbax' threads may still write to it after a failure."""
    for _ in range(20):
        if folder.is_symlink() or not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1 * folder.exists())


def delete(directory: Path, step: int) -> None:
    """Delete a complete checkpoint, but not a link or anything else."""
    folder, doomed = directory / str(step), directory / f"{DELETED}{step}"
    if is_checkpoint(folder) and not folder.is_symlink():
        remove(doomed)
        folder.rename(doomed)
        remove(doomed)


def abandon(directory: Path, step: int) -> None:
    """Move the folders of later steps, also damaged ones, into a new folder `abandoned-N`, and report it."""
    found = filter(None, (_STEP_OR_DAMAGED.fullmatch(path.name) for path in directory.iterdir()))
    later = sorted((number, match[0]) for match in found if (number := int(match[1] or match[2])) > step)
    if not later:
        return
    names = [name for _, name in later]
    aside = next(filter(_is_free, (directory / f"{ABANDONED}{number}" for number in count(1))))
    aside.mkdir()
    for name in names:
        folder = directory / name
        if folder.is_symlink():  # a relative link would break there
            (aside / name).symlink_to(folder.resolve())
            folder.unlink()
        else:
            folder.rename(aside / name)
    warn(
        f"{directory}: checkpoint{'s' * (len(names) > 1)} {', '.join(names)} set aside in {aside.name}; restore from "
        "that folder, or delete it"
    )


def set_damaged_aside(directory: Path, step: int) -> str:
    """Rename the folder of a damaged step, and return its new name."""
    names = chain([f"{DAMAGED}{step}"], (f"{DAMAGED}{step}-{number}" for number in count(2)))
    aside = next(filter(_is_free, (directory / name for name in names)))
    (directory / str(step)).rename(aside)
    return aside.name


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path)


# Which checkpoints to keep.

Metrics = Mapping[int, Mapping[str, float | None] | None]
"""Step -> its metrics, None if they cannot be read; a metric is None if it was not finite."""


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept while any of these rules keeps it; see `jdp.Checkpoints`."""

    keep: int | None
    keep_every: int | None
    best: str | None
    mode: str

    def __post_init__(self) -> None:
        for name, steps in (("keep", self.keep), ("keep_every", self.keep_every)):
            if steps is not None and (not is_integer(steps) or steps < 1):
                raise UserError(f"{name} is a positive number of steps or None; given {steps!r}. Give 1 or more.")
        if self.mode not in ("min", "max"):
            raise UserError(
                f'mode is "min" or "max"; given {self.mode!r}. Use "min" for a loss, "max" for an accuracy.'
            )
        if self.mode == "max" and self.best is None:
            raise UserError('mode says how the metric `best` is compared; given "max" without it. Add best="accuracy".')

    def best_step(self, metrics: Metrics) -> int | None:
        """Return the best step by the metric, the newest of equals; None if none has a finite value."""
        sign = -1.0 if self.mode == "min" else 1.0
        values = {step: (numbers or {}).get(self.best or "") for step, numbers in metrics.items()}
        scores = [(sign * value, step) for step, value in values.items() if value is not None]
        return max(scores)[1] if scores else None

    def kept(self, metrics: Metrics) -> set[int]:
        steps = sorted(metrics)
        kept = {*steps} if self.keep is None else {*steps[-self.keep :]}
        kept |= {step for step in steps if self.keep_every is not None and step % self.keep_every == 0}
        if self.best is not None:
            kept |= {step for step, numbers in metrics.items() if numbers is None}  # may be the best
        best = self.best_step(metrics)
        return kept if best is None else kept | {best}

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Return metrics for JSON; a metric that is not finite becomes None and counts as not measured."""
        numbers: dict[str, float | None] = {}
        for name, value in metrics.items():
            try:
                numbers[name] = finite_or_none(float(value))
            except (TypeError, ValueError):
                raise UserError(
                    f"A metric is one number; {name!r} is {value!r}. Leave it out if it was not measured."
                ) from None
        if numbers and self.best is not None and self.best not in numbers:
            raise UserError(
                f"The best checkpoint is chosen by {self.best!r}; given only the metrics {list(numbers)}. Pass it too."
            )
        return numbers

    def chosen(
        self, directory: Path, steps: Sequence[int], step: int | Literal["best"] | None, best: int | None
    ) -> tuple[Path, str]:
        """Return the folder of a step, "best" or the newest (None), and the fix if it is damaged."""
        if step == "best" and self.best is None:
            raise CheckpointError('step="best" needs a metric: Checkpoints(directory, best="eval_loss").')
        number = best if step == "best" else max(steps, default=None) if step is None else step
        existing = ", ".join(map(str, steps)) or "none"
        if step == "best" and number is None:
            raise CheckpointError(
                f"No checkpoint in {directory} was saved with a finite {self.best!r}; there are: {existing}."
            )
        if number not in steps:
            which = "" if number is None else f" {number}"
            raise CheckpointError(f"There is no checkpoint{which} in {directory}; there are: {existing}.")
        fix = "This directory has no other checkpoint: remove that folder to start afresh"
        if others := ", ".join(str(other) for other in steps if other != number):
            fix = f"Restore another, with step=... (there are: {others}), or remove that folder"
        return directory / str(number), fix


# Damage.


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
        steps = numbered_steps if is_marked(directory) else committed_steps
        folders += [directory / str(step) for step in steps(directory)]
    found = map(_checked, sorted(folders, key=lambda folder: int(folder.name)))
    return [each for each in found if each.status == "whole" or each.folder.exists()]  # it may have been deleted


def _checked(folder: Path) -> Checked:
    problem = verify(folder)
    step = int(folder.name) if folder.name.isdecimal() else None
    return Checked(folder, step, "damaged" if problem else "whole", problem)


def read_newest(directory: Path, read: Callable[[Source], _T], *, aside: bool) -> tuple[int, _T]:
    """Read the newest complete checkpoint, the same on every process, and report damaged newer ones.

    Every process calls this. `aside` also renames damaged ones to `damaged-STEP`.
    """
    damaged: dict[int, str] = {}
    while True:
        left = [step for step in committed_steps(directory) if step not in damaged]
        step = from_first_process("which checkpoint is read", left[-1] if left else -1)
        if step < 0:
            break
        folder = directory / str(step)
        value, problem = None, ""
        try:
            value = read(Stored(folder, "There may be others in that directory: name one of them"))
        except DamagedError as error:
            if error.__cause__ is not None and not verify(folder):
                raise  # its bytes are unchanged: unreadable, but not damaged
            problem = error.problem
        problems = from_every_process("what was read of a checkpoint", problem, seconds=HOURS)
        problem = next(filter(None, problems), "")
        if not problem:
            _report(directory, damaged, step, aside)
            return step, value  # pyright: ignore[reportReturnType]
        damaged[step] = problem
    found = "; ".join(f"{step}: {problem}" for step, problem in damaged.items())
    raise CheckpointError(
        f"No checkpoint in {directory} is whole ({found or 'there are none'}). Replace one by a copy, or move them "
        "away to start afresh."
    )


def _report(directory: Path, damaged: Mapping[int, str], instead: int, aside: bool) -> None:
    for step, problem in sorted(damaged.items()) if jax.process_index() == 0 else ():
        done = ""
        try:
            if aside:
                done = f" and set aside as {set_damaged_aside(directory, step)}"
        except FileNotFoundError:
            continue  # another process has deleted or set it aside meanwhile
        except OSError as error:
            done = f" and cannot be set aside ({error.strerror})"
        warn(f"{directory}: checkpoint {step} is damaged ({problem}){done}; {instead} is read instead")
    if damaged and aside:
        meet("where process 0 sets damaged checkpoints aside")
