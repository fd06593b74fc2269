"""Pictures in a directory: a folder for each class, as `DIR/cat/one.jpg`; the folder's name is the class.

1. The class folders, in sorted order; a directory of two, train and one to evaluate on, is told apart first.
2. The files of each, all the way down, in sorted order.
3. Each file's content score, read by threads: nothing is decoded here.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.core.notices import notice
from jdp.core.user_path import check_regular
from jdp.data.held_out import ends_score
from jdp.data.labels import Labels, labels_of

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
HELD_OUT_FOLDERS = ("val", "valid", "validation", "heldout", "test")
_READERS = 16  # threads: a disk answers many questions at once


@dataclass(frozen=True, eq=False)
class FilePictures:
    """See `jdp.data.images.decode.Pictures`."""

    name: str
    files: tuple[str, ...]
    labels: Labels
    scores: NDArray[np.float64]
    most: float = 255.0

    def where(self, index: int, /) -> str:
        return self.files[index]

    def content(self, index: int, /) -> bytes:
        return Path(self.files[index]).read_bytes()


def picture_files(directory: Path, *, classes: tuple[str, ...] | None = None) -> FilePictures:
    """The pictures of a directory of class folders.

    Args:
      directory: its folders are the classes, whatever is in them: files below them at any depth. Hidden files and
        folders are passed over, and so are files that are no pictures, which is said.
      classes: the names there may be, as numbered elsewhere; by default the folders found.

    Raises:
      ValueError: no class folders, fewer than two, one without a picture, one that is not in `classes`, or something
        unreadable.
    """
    folders = visible_folders(directory)
    if len(folders) < 2 and classes is None:
        raise ValueError(
            f"a directory of pictures must have a folder for each class, two or more, got {directory} with "
            f"{len(folders)} and {_pictures_in(directory)} pictures beside: put each class' pictures in its own folder"
        )
    found = {folder.name: sorted(_walk(folder)) for folder in folders}
    if empty := [name for name, files in found.items() if not any(map(_is_picture, files))]:
        raise ValueError(
            f"every class folder must hold pictures ({', '.join(PICTURE_SUFFIXES)}), got none in "
            f"{directory / empty[0]}: add some, or remove the folder"
        )
    _say_what_is_odd(directory, found)
    pairs = [(file, name) for name, files in found.items() for file in files if _is_picture(file)]
    labels = labels_of([name for _, name in pairs], str(directory), names=classes)
    files = tuple(file for file, _ in pairs)
    with ThreadPoolExecutor(_READERS) as readers:
        scores = np.fromiter(readers.map(_score, files), np.float64, len(files))
    return FilePictures(str(directory), files, labels, scores)


def two_sets(directory: Path) -> tuple[Path, Path] | None:
    """(to train on, to hold out) of a directory whose only folders are "train" and one or more to evaluate on."""
    names = {folder.name for folder in visible_folders(directory)}
    held_out = [name for name in HELD_OUT_FOLDERS if name in names]
    if not held_out or names - set(held_out) != {"train"}:
        return None
    unused = f", not reading {', '.join(held_out[1:])}" if held_out[1:] else ""
    notice(f"{directory}: training on the folder train, holding out {held_out[0]}{unused}")
    return directory / "train", directory / held_out[0]


def visible_folders(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise _unreadable(error) from error


def _walk(folder: Path) -> Iterator[str]:
    """Names, not `Path`s, which take ten times the memory; there may be millions."""
    for inside, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (inside + os.sep + name for name in names if not name.startswith("."))


def _say_what_is_odd(directory: Path, found: dict[str, list[str]]) -> None:
    if others := sum(not _is_picture(file) for files in found.values() for file in files):
        notice(f"{directory}: passing over {others} files that are no pictures ({', '.join(PICTURE_SUFFIXES)})")
    if beside := _pictures_in(directory):
        notice(f"{directory}: passing over {beside} pictures beside the class folders, which have no class")
    if deeper := sorted(
        name for name, files in found.items() if any(os.sep in f[len(str(directory / name)) + 1 :] for f in files)
    ):
        notice(f"{directory}: folders inside a class folder are read as that class, for example in {deeper[0]}")


def _pictures_in(directory: Path) -> int:
    return sum(_is_picture(path.name) and path.is_file() for path in directory.iterdir())


def _is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_SUFFIXES)


def _score(file: str) -> float:
    try:
        check_regular(file)
        with Path(file).open("rb") as opened:
            return ends_score(opened.seek(0, os.SEEK_END), lambda start, stop: _read(opened, start, stop))
    except OSError as error:
        raise _unreadable(error) from error


def _read(opened: BinaryIO, start: int, stop: int) -> bytes:
    opened.seek(start)
    return opened.read(stop - start)


def _refuse(error: OSError) -> None:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> ValueError:
    return ValueError(
        f"all pictures must be readable, got {error.filename}, {error.strerror}: mend its permissions, or leave it out"
    )
