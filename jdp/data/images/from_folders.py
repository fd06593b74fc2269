"""Pictures in a directory: a folder for each class, as `DIR/cat/one.jpg`; the folder's name is the class.

1. List the class folders in sorted order; a directory of two sets (train, and one to evaluate on) is recognised first.
2. List the files of each, all the way down, in sorted order.
3. Read each file's content score, in threads: nothing is decoded yet.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from jdp.base.notices import notice
from jdp.base.user_path import check_regular
from jdp.data.held_out import ends_score
from jdp.data.images.decode import Pictures
from jdp.data.labels import labels_of
from jdp.data.sources.compressed import unreadable
from jdp.data.sources.files import walk

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
HELD_OUT_FOLDERS = ("val", "valid", "validation", "heldout", "test")


@dataclass(frozen=True, eq=False, kw_only=True)
class FilePictures(Pictures):
    """Pictures in files of their own."""

    files: tuple[str, ...]

    def name_of(self, index: int, /) -> str:
        return self.files[index]

    def content(self, index: int, /) -> bytes:
        return Path(self.files[index]).read_bytes()

    def score(self, index: int, /) -> float:
        def read(start: int, stop: int) -> bytes:
            opened.seek(start)
            return opened.read(stop - start)

        try:
            check_regular(self.files[index])
            with Path(self.files[index]).open("rb") as opened:
                return ends_score(opened.seek(0, os.SEEK_END), read)
        except OSError as error:
            raise ValueError(unreadable(error)) from error


def picture_files(directory: Path, *, classes: tuple[str, ...] | None = None) -> FilePictures:
    """Return the pictures of a directory of class folders."""
    folders = visible_folders(directory)
    if len(folders) < 2 and classes is None:
        raise ValueError(
            f"a directory of pictures must have a folder for each class, two or more; given {directory} with "
            f"{len(folders)} and {_pictures_in(directory)} pictures beside: put each class' pictures in its own folder"
        )
    files_by_class = {
        folder.name: sorted(inside + os.sep + name for inside, name in walk(folder) if not name.startswith("."))
        for folder in folders
    }
    if empty := [name for name, files in files_by_class.items() if not any(map(_is_picture, files))]:
        raise ValueError(
            f"every class folder must hold pictures ({', '.join(PICTURE_SUFFIXES)}); given none in "
            f"{directory / empty[0]}: add some, or remove the folder"
        )
    _report_oddities(directory, files_by_class)
    pairs = [(file, name) for name, files in files_by_class.items() for file in files if _is_picture(file)]
    labels = labels_of([name for _, name in pairs], str(directory), names=classes)
    pictures = FilePictures(name=str(directory), files=tuple(file for file, _ in pairs), labels=labels)
    _ = pictures.scores  # refuses files that cannot be read, before one is decoded: reading a pipe would never end
    return pictures


def two_sets(directory: Path) -> tuple[Path, Path] | None:
    """Return the folders to train on and to hold out, of a directory with "train" and some to evaluate on only.

    None: it has other folders too, or lacks one of the two.
    """
    names = {folder.name for folder in visible_folders(directory)}
    held_out = [name for name in HELD_OUT_FOLDERS if name in names]
    if not held_out or names - set(held_out) != {"train"}:
        return None
    unused = f", not reading {', '.join(held_out[1:])}" if held_out[1:] else ""
    notice(f"{directory}: training on the folder train, holding out {held_out[0]}{unused}")
    return directory / "train", directory / held_out[0]


def visible_folders(directory: Path) -> list[Path]:
    """Return the folders in a directory, sorted, without hidden ones. Raises ValueError if it cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise ValueError(unreadable(error)) from error


def _report_oddities(directory: Path, files_by_class: dict[str, list[str]]) -> None:
    if others := sum(not _is_picture(file) for files in files_by_class.values() for file in files):
        notice(f"{directory}: passing over {others} files that are no pictures ({', '.join(PICTURE_SUFFIXES)})")
    if beside := _pictures_in(directory):
        notice(f"{directory}: passing over {beside} pictures beside the class folders, which have no class")
    if deeper := sorted(
        name
        for name, files in files_by_class.items()
        if any(os.sep in file[len(str(directory / name)) + 1 :] for file in files)
    ):
        notice(f"{directory}: folders inside a class folder are read as that class, for example in {deeper[0]}")


def _pictures_in(directory: Path) -> int:
    return sum(_is_picture(path.name) and path.is_file() for path in directory.iterdir())


def _is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_SUFFIXES)
