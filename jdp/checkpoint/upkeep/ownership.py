"""Ownership of the entries of a directory of checkpoints: jdp's or foreign, this run's or an abandoned run's.

Only entries that jdp wrote are ever moved or deleted. A finished step is recognised by its content. A step that is
being written or deleted has a mark beside it, `.unfinished-STEP`, made before and removed after. It distinguishes a
step that a killed process left half-written or half-deleted from a foreign folder. A link is never followed to delete.

A step whose files have changed since it was saved is renamed to `damaged-STEP`, and an earlier one takes its place.

Steps that a run abandons are moved to `abandoned-1`, `abandoned-2`, …: `lineage` finds them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jdp.checkpoint.errors import CheckpointError, write_error
from jdp.checkpoint.format.checksums import COMMITTED, TABLE, is_part
from jdp.checkpoint.format.committing import METADATA
from jdp.checkpoint.format.stored import is_checkpoint

MARK, ABANDONED, DAMAGED = ".unfinished-", "abandoned-", "damaged-"
_STEP = re.compile(r"0|[1-9][0-9]*")
ENTRIES = frozenset(("state", "leaves", "record", "metrics", METADATA, TABLE, COMMITTED, f"{COMMITTED}.new"))
"""The files of Orbax and jdp in the folder of a step."""


def committed_steps(directory: Path) -> list[int]:
    """Return the steps with complete checkpoints, or links to these, oldest first.

    Those that are being deleted, or were when a process was killed, are left out.
    """
    if not directory.is_dir():
        return []
    complete = [int(path.name) for path in _numbered(directory) if is_checkpoint(path)]
    return sorted(step for step in complete if not (is_marked(directory, step) and is_part(directory / str(step))))


def make_directory(directory: Path) -> None:
    """Make a directory of checkpoints; in one that is there, check that jdp wrote all entries named by numbers."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"{directory} cannot be made a directory of checkpoints", error) from error
    for path in directory.iterdir():
        if not (path.name.isascii() and path.name.isdecimal()):
            continue
        known = _STEP.fullmatch(path.name) and (is_checkpoint(path) or _may_be_unfinished(path))
        if not known:
            raise CheckpointError(
                f"A directory of checkpoints has nothing but these under numbers, as steps come and go there; "
                f"{directory} has {path.name}, which is none. Choose another directory, such as "
                f"{directory / 'checkpoints'}, or rename {path.name}."
            )


def may_delete(directory: Path, step: int) -> bool:
    """Return True for the folder of a finished checkpoint; False for a link to one, or anything else."""
    folder = directory / str(step)
    return is_checkpoint(folder) and not folder.is_symlink()


def mark(directory: Path, step: int) -> None:
    """Record that this process is about to write, or to delete, a step."""
    (directory / f"{MARK}{step}").touch()


def unmark(directory: Path, steps: Iterable[int]) -> None:
    """Remove the marks of steps that have been written or deleted."""
    for step in steps:
        (directory / f"{MARK}{step}").unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete steps that killed processes left half-written or half-deleted, and their marks."""
    for path in list(directory.glob(f"{MARK}*")):
        step = path.name.removeprefix(MARK)
        if _STEP.fullmatch(step):
            discard_unfinished(directory, int(step))
    for folder in list(_numbered(directory)):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()  # killed before there was anything in it


def discard_unfinished(directory: Path, step: int) -> None:
    """Delete a step that was not finished, if it has jdp's mark.

    Threads of Orbax may still write to it after another one failed: then deleting is tried again. A step that stays
    keeps its mark.
    """
    folder = directory / str(step)
    if not is_marked(directory, step):
        return
    for _ in range(20):
        if (not is_checkpoint(folder) or is_part(folder)) and _may_be_unfinished(folder):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            unmark(directory, [step])
            return
        time.sleep(0.1)  # they may make it anew


def set_aside(directory: Path, steps: Sequence[int]) -> Path:
    """Move the folders of these steps into a new folder `abandoned-N`, and return that."""
    number = 1
    while (aside := directory / f"{ABANDONED}{number}").exists() or aside.is_symlink():
        number += 1
    aside.mkdir()
    for step in steps:
        folder = directory / str(step)
        if folder.is_symlink():  # a relative one would lead elsewhere from there
            (aside / str(step)).symlink_to(folder.resolve())
            folder.unlink()
        else:
            folder.rename(aside / str(step))
    return aside


def is_marked(directory: Path, step: int) -> bool:
    """Return True if a process is writing or deleting a step, or was when it was killed."""
    return (directory / f"{MARK}{step}").is_file()


def uncommitted_steps(directory: Path) -> list[int]:
    """Return the steps of jdp without a commit file that nobody is writing: the file was lost, or the mark was."""
    if not directory.is_dir():
        return []
    folders = [path for path in _numbered(directory) if not is_marked(directory, int(path.name))]
    begun = [path for path in folders if not is_checkpoint(path) and _may_be_unfinished(path)]
    return sorted(int(path.name) for path in begun if any(path.iterdir()))


def set_damaged_aside(directory: Path, step: int) -> str:
    """Rename the folder of a damaged step to `damaged-STEP`, and return its new name."""
    folder, name, number = directory / str(step), f"{DAMAGED}{step}", 1
    while os.path.lexists(directory / name):
        number += 1
        name = f"{DAMAGED}{step}-{number}"
    folder.rename(directory / name)
    return name


def remove_staging(directory: Path) -> None:
    """Delete the directory in which an earlier `jdp.save` wrote its checkpoint, if there is one."""
    if not directory.exists() and not directory.is_symlink():
        return
    marks = {path for path in directory.glob(".*") if path.name.startswith(MARK)}
    own = marks | {path for path in _numbered(directory) if not path.is_symlink() and _may_be_unfinished(path)}
    if directory.is_symlink() or set(directory.iterdir()) - own:
        raise CheckpointError(
            f"{directory} is where a checkpoint is written before it is moved to its place, and holds something that "
            "is not jdp's. Move it away, or choose another path."
        )
    shutil.rmtree(directory, ignore_errors=True)


def _numbered(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if _STEP.fullmatch(path.name))


def _may_be_unfinished(folder: Path) -> bool:
    """Return True for a folder with nothing in it but what Orbax writes, or nothing at all."""
    return folder.is_dir() and not folder.is_symlink() and {entry.name for entry in folder.iterdir()} <= ENTRIES
