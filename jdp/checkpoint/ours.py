"""What in a directory of checkpoints is ours: only that is ever moved or deleted.

A finished step is ours by what is in it. One that is being written, or deleted, has a mark beside it, made before and
gone after: `.unfinished-STEP`. So what a killed process left half-written or half-deleted is told from a folder that
somebody else put there. A link is never followed to delete.

Steps of a line that a run has left (it went back to an earlier one) are set aside in `abandoned-1`, `abandoned-2`, …,
each of which can be restored from as any directory of checkpoints; nothing deletes them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jdp.checkpoint import content
from jdp.checkpoint.errors import CheckpointError

MARK, ABANDONED = ".unfinished-", "abandoned-"
_STEP = re.compile(r"0|[1-9][0-9]*")
_PARTS = frozenset(("state", "leaves", "record", "metrics", "_CHECKPOINT_METADATA", content.COMMITTED))
"""What Orbax writes into the folder of a step."""


def steps_of(directory: Path) -> list[int]:
    """The steps whose checkpoints were written to their end, oldest first; also those that a link leads to."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in _numbered(directory) if content.is_checkpoint(path))


def check_no_strangers(directory: Path) -> None:
    """Raises CheckpointError if there is an entry named by a number that jdp did not write."""
    for path in directory.iterdir():
        if not (path.name.isascii() and path.name.isdecimal()):
            continue
        known = _STEP.fullmatch(path.name) and (content.is_checkpoint(path) or _may_be_unfinished(path))
        if not known:
            raise CheckpointError(
                f"A directory of checkpoints has nothing but these under numbers, as steps come and go there; "
                f"{directory} has {path.name}, which is none. Choose another directory, such as "
                f"{directory / 'checkpoints'}, or rename {path.name}."
            )


def may_delete(directory: Path, step: int) -> bool:
    """Whether this is the folder of a finished checkpoint of ours, and no link to one."""
    folder = directory / str(step)
    return content.is_checkpoint(folder) and not folder.is_symlink()


def mark(directory: Path, step: int) -> None:
    """Note that we are about to write, or to delete, a step."""
    (directory / f"{MARK}{step}").touch()


def unmark(directory: Path, steps: Iterable[int]) -> None:
    """These are written, or deleted."""
    for step in steps:
        (directory / f"{MARK}{step}").unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what killed processes left half-written or half-deleted, and their marks."""
    for path in list(directory.glob(f"{MARK}*")):
        step = path.name.removeprefix(MARK)
        if _STEP.fullmatch(step):
            discard(directory, int(step))
    for folder in list(_numbered(directory)):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()  # killed before there was anything in it


def discard(directory: Path, step: int) -> None:
    """Delete what there is of a step that was not finished, if it bears our mark."""
    folder = directory / str(step)
    if not (directory / f"{MARK}{step}").is_file():
        return
    if not content.is_checkpoint(folder) and _may_be_unfinished(folder):
        shutil.rmtree(folder, ignore_errors=True)
    unmark(directory, [step])


def set_aside(directory: Path, steps: Sequence[int]) -> Path:
    """Move these steps' folders into a new folder `abandoned-N`, and return that."""
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


def clear(directory: Path) -> None:
    """Delete a directory that one save of ours was made in. Raises CheckpointError if there is anything else in it."""
    if not directory.exists() and not directory.is_symlink():
        return
    marks = {path for path in directory.glob(".*") if path.name.startswith(MARK)}
    ours = marks | {path for path in _numbered(directory) if not path.is_symlink() and _may_be_unfinished(path)}
    if directory.is_symlink() or set(directory.iterdir()) - ours:
        raise CheckpointError(
            f"{directory} is where a checkpoint is written before it is moved to its place, and holds something that "
            "is not jdp's. Move it away, or choose another path."
        )
    shutil.rmtree(directory, ignore_errors=True)


def _numbered(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if _STEP.fullmatch(path.name))


def _may_be_unfinished(folder: Path) -> bool:
    """Whether it is a folder with nothing in it but what Orbax writes, or nothing at all."""
    return folder.is_dir() and not folder.is_symlink() and {part.name for part in folder.iterdir()} <= _PARTS
