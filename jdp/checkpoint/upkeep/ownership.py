"""Ownership of the entries in a directory of checkpoints: jdp's or not.

A directory that jdp writes has a marker file. A step is written to `.saving-STEP` and renamed to STEP when it is
complete; before deletion it is renamed to `.deleted-STEP`. So a numbered folder is always complete, and nothing else is
deleted. Links are never followed for deletion.

A step whose files have changed since the save is renamed to `damaged-STEP`, and an earlier step takes its place. Steps
that a run abandons by `go_back`, damaged or not, are moved to `abandoned-1`, `abandoned-2`, …
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from jdp.base.notices import warn
from jdp.checkpoint.errors import CheckpointError, write_error
from jdp.checkpoint.format.checksums import COMMITTED
from jdp.checkpoint.format.stored import is_checkpoint

MARKER = ".jdp-checkpoints"
"""The file that marks a directory as jdp's."""
SAVING, DELETED, ABANDONED, DAMAGED = ".saving-", ".deleted-", "abandoned-", "damaged-"
_STEP = re.compile(r"0|[1-9][0-9]*")
_STEP_OR_DAMAGED = re.compile(rf"({_STEP.pattern})|{DAMAGED}({_STEP.pattern})(-[0-9]+)?")
_LEFTOVER = re.compile(rf"({re.escape(SAVING)}|{re.escape(DELETED)})({_STEP.pattern})")


def numbered_steps(directory: Path) -> list[int]:
    """Return the numbers that name entries of a directory, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _STEP.fullmatch(path.name))


def committed_steps(directory: Path) -> list[int]:
    """Return the steps with complete checkpoints, or links to them, oldest first."""
    return [step for step in numbered_steps(directory) if is_checkpoint(directory / str(step))]


def is_marked(directory: Path) -> bool:
    """Return True if jdp has written to a directory."""
    return (directory / MARKER).is_file()


def make_directory(directory: Path) -> None:
    """Make a directory of checkpoints. In an existing directory, numbered entries must be checkpoints."""
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


def mark(directory: Path) -> None:
    """Mark a directory as jdp's; delete folders that killed runs left half-written or half-deleted."""
    (directory / MARKER).touch()
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


def names_after(directory: Path, step: int) -> list[str]:
    """Return the names of the folders of later steps, also damaged ones, in order."""
    found = filter(None, (_STEP_OR_DAMAGED.fullmatch(path.name) for path in directory.iterdir()))
    later = sorted((number, match[0]) for match in found if (number := int(match[1] or match[2])) > step)
    return [name for _, name in later]


def set_aside(directory: Path, names: Sequence[str]) -> Path:
    """Move these folders into a new folder `abandoned-N`, and return it."""
    number = 1
    while (aside := directory / f"{ABANDONED}{number}").exists() or aside.is_symlink():
        number += 1
    aside.mkdir()
    for name in names:
        folder = directory / name
        if folder.is_symlink():  # a relative link would break there
            (aside / name).symlink_to(folder.resolve())
            folder.unlink()
        else:
            folder.rename(aside / name)
    return aside


def set_damaged_aside(directory: Path, step: int) -> str:
    """Rename the folder of a damaged step to `damaged-STEP`, and return its new name."""
    folder, name, number = directory / str(step), f"{DAMAGED}{step}", 1
    while os.path.lexists(directory / name):
        number += 1
        name = f"{DAMAGED}{step}-{number}"
    folder.rename(directory / name)
    return name
