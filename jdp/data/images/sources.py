"""Open the pictures of a source: one set to split, or two that are split already."""

import os
from dataclasses import dataclass
from pathlib import Path

from jdp.base.notices import notice
from jdp.data.images.decode import Pictures
from jdp.data.images.from_arrays import DIGITS, array_pictures, digits
from jdp.data.images.from_folders import HELD_OUT_FOLDERS, picture_files, two_sets
from jdp.data.images.from_tables import Columns, TablePictures, file_table_pictures, table_pictures
from jdp.data.images.from_tars import COMPRESSED_TARS, TAR, tar_pictures
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.compressed import unreadable
from jdp.data.sources.files import matching
from jdp.data.sources.hub import HF, hub_splits, main_split
from jdp.data.sources.in_bucket import local_path
from jdp.data.sources.optional_packages import optional
from jdp.data.sources.tables import ARROW_SUFFIXES

PathLike = str | os.PathLike[str]
Classes = tuple[str, ...] | None


@dataclass(frozen=True)
class PictureSets:
    """Pictures to train on (to be split, if there is no second set), those to hold out, and the channels they have."""

    train: Pictures
    heldout: Pictures | None = None
    channels: int = 3


def open_pictures(source: PathLike, columns: Columns, heldout: PathLike | None = None) -> PictureSets:
    """Return the pictures of a source, and those of `heldout`, which then must have the same classes."""
    sets = _open(source, columns, None)
    if heldout is None:
        return sets
    other = _open(heldout, columns, sets.train.labels.classes)
    if other.heldout is not None:
        raise ValueError(
            f"heldout must be one set of images; given {heldout}, which is two: name the one that is meant"
        )
    if sets.heldout is not None:
        notice(f"{source}: holding out {heldout}, not reading {sets.heldout.name}")
    return PictureSets(sets.train, other.train, sets.channels)


def _open(source: PathLike, columns: Columns, classes: Classes) -> PictureSets:
    if source == DIGITS:
        return PictureSets(digits(), channels=1)
    if str(source).startswith(HF):
        return _from_hub(str(source), columns, classes)
    path = local_path(source)
    if path.suffix == ".npz":
        return _from_arrays(path, classes)
    tables, tars = _files(path, ARROW_SUFFIXES), _files(path, (TAR, *COMPRESSED_TARS))
    if not tables and not tars and not path.is_dir():
        raise ValueError(
            f'images must be "{DIGITS}", a directory with a folder for each class, {" or ".join(ARROW_SUFFIXES)} '
            f'files, {TAR} files, "{HF}…" or an .npz file; given {source}, looked for at {path.absolute()}: fix the '
            "path"
        )
    optional("PIL", str(source))  # missing, it is reported now, not by a reading thread
    if tables and tars:
        raise ValueError(
            f"a directory must hold one kind of data; given {path} with {tables[0].name} and {tars[0].name}: name "
            f"those that are meant by a glob, as {path}/*{TAR}"
        )
    if tars:
        return PictureSets(tar_pictures(tars, str(source), columns, classes=classes))
    if tables:
        return PictureSets(file_table_pictures(tables, str(source), columns, classes=classes))
    if classes is None and (both := two_sets(path)):
        train = picture_files(both[0])
        return PictureSets(train, picture_files(both[1], classes=train.labels.classes))
    return PictureSets(picture_files(path, classes=classes))


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files with these suffixes that a path names: one, those of a glob, or those directly in a
    directory.
    """
    try:
        if path.is_dir():
            files = [file for file in path.iterdir() if not file.name.startswith(".")]
        elif path.is_file():
            files = [path]
        else:
            files = matching(path)
    except OSError as error:
        raise ValueError(unreadable(error, path)) from error
    return sorted(file for file in files if file.name.endswith(suffixes))


def _from_arrays(path: Path, classes: Classes) -> PictureSets:
    arrays, name = read_arrays(path)
    if missing := {"images", "labels"} - arrays.keys():
        raise ValueError(
            f"an .npz of images must have images and labels; given {', '.join(arrays)} in {name}: name the arrays so "
            f"(missing: {', '.join(sorted(missing))})"
        )
    pictures = array_pictures(arrays["images"], arrays["labels"], name, classes=classes)
    return PictureSets(pictures, channels=pictures.images.shape[3])


def _from_hub(source: str, columns: Columns, classes: Classes) -> PictureSets:
    """Read a Hugging Face data set: the split "train" and the first one to hold out; or the only split."""
    optional("PIL", source)
    splits = hub_splits(source)
    main = main_split(splits, source)
    names = [main, *[name for name in HELD_OUT_FOLDERS if name in splits and main == "train"][:1]]
    if unused := [name for name in splits if name not in names]:
        notice(f"{source}: not reading the splits {', '.join(unused)}")

    def pictures(name: str, classes: Classes) -> TablePictures:
        return table_pictures([splits[name]], (f"{source} ({name})",), source, columns, classes=classes)

    train = pictures(names[0], classes)
    return PictureSets(train, pictures(names[1], train.labels.classes) if names[1:] else None)
