"""From what a user names to pictures: one set to part, or two that are parted already."""

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from jdp.core.notices import notice
from jdp.core.user_path import user_path
from jdp.data.images.decode import Pictures
from jdp.data.images.digits import DIGITS, digits
from jdp.data.images.from_arrays import array_pictures
from jdp.data.images.from_folders import HELD_OUT_FOLDERS, picture_files, two_sets
from jdp.data.images.from_tables import (
    TABLE_SUFFIXES,
    Columns,
    TablePictures,
    file_table_pictures,
    table_pictures,
)
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.hub import HF, hub_splits
from jdp.data.sources.optional_packages import optional

PathLike = str | os.PathLike[str]
Classes = tuple[str, ...] | None


@dataclass(frozen=True)
class Sets:
    """Pictures to train on (and to part, without a second set), those to hold out, and the channels they have."""

    train: Pictures
    heldout: Pictures | None = None
    channels: int = 3


def open_pictures(source: PathLike, columns: Columns, heldout: PathLike | None = None) -> Sets:
    """The pictures of a source, and those of `heldout`, which then must have the same classes.

    Raises:
      ValueError: a source that is not there, or is none of those that `jdp.data.images.samples.image_data` names.
    """
    sets = _open(source, columns, None)
    if heldout is None:
        return sets
    other = _open(heldout, columns, sets.train.labels.classes)
    if other.heldout is not None:
        raise ValueError(f"heldout must be one set of images, got {heldout}, which is two: name the one that is meant")
    if sets.heldout is not None:
        notice(f"{source}: holding out {heldout}, not reading {sets.heldout.name}")
    return Sets(sets.train, other.train, sets.channels)


def _open(source: PathLike, columns: Columns, classes: Classes) -> Sets:
    if source == DIGITS:
        return Sets(digits(), channels=1)
    if str(source).startswith(HF):
        return _from_hub(str(source), columns, classes)
    path = user_path(source)
    if path.suffix == ".npz":
        return _from_arrays(path, classes)
    if tables := _table_files(path):
        _need_pillow(str(source))
        return Sets(file_table_pictures(tables, str(source), columns, classes=classes))
    if not path.is_dir():
        raise ValueError(
            f'images must be "{DIGITS}", a directory with a folder for each class, {" or ".join(TABLE_SUFFIXES)} '
            f'files, "{HF}…" or an .npz file, got {source}, looked for at {path.absolute()}: mend the path'
        )
    _need_pillow(str(source))
    if classes is None and (both := two_sets(path)):
        train = picture_files(both[0])
        return Sets(train, picture_files(both[1], classes=train.labels.classes))
    return Sets(picture_files(path, classes=classes))


def _table_files(path: Path) -> list[Path]:
    """The tables that a path names: one, those a glob matches, or those right in a directory."""
    if path.is_dir():
        return sorted(
            file for file in path.iterdir() if file.suffix in TABLE_SUFFIXES and not file.name.startswith(".")
        )
    if path.suffix in TABLE_SUFFIXES and path.is_file():
        return [path]
    matched = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - Path.glob takes no absolute one
    return [file for file in matched if file.suffix in TABLE_SUFFIXES]


def _need_pillow(source: str) -> None:
    optional("PIL", source)  # said now, not by a reading thread


def _from_arrays(path: Path, classes: Classes) -> Sets:
    arrays, name = read_arrays(path)
    if missing := {"images", "labels"} - arrays.keys():
        raise ValueError(
            f"an .npz of images must have images and labels, got {', '.join(arrays)} in {name}: name the arrays so "
            f"(missing: {', '.join(sorted(missing))})"
        )
    pictures = array_pictures(arrays["images"], arrays["labels"], name, classes=classes)
    return Sets(pictures, channels=pictures.images.shape[3])


def _from_hub(source: str, columns: Columns, classes: Classes) -> Sets:
    """Hugging Face data sets: the split "train", and the first there is to hold out; or the only split."""
    _need_pillow(source)
    splits = hub_splits(source)
    held_out = [name for name in HELD_OUT_FOLDERS if name in splits]
    names = ["train", *held_out[:1]] if "train" in splits else list(splits)
    if "train" not in splits and len(splits) > 1:
        raise ValueError(
            f"a data set must have the split train, or one only, got {', '.join(splits)} in {source}: "
            f"name the one that is meant, as {source}:{next(iter(splits))}"
        )
    if unused := [name for name in splits if name not in names]:
        notice(f"{source}: not reading the splits {', '.join(unused)}")

    def pictures(name: str, classes: Classes) -> TablePictures:
        return table_pictures([splits[name]], (f"{source} ({name})",), source, columns, classes=classes)

    train = pictures(names[0], classes)
    return Sets(train, pictures(names[1], train.labels.classes) if names[1:] else None)
