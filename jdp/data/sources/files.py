"""Find the files that a user names: sorted by path on every process, each file once."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdp.base.notices import notice
from jdp.data.sources.compressed import plain_name, unreadable
from jdp.data.sources.in_bucket import local_path

STDLIB = "stdlib"
# What is not the library's own text: packages installed beside it, and its tests, which some distributions leave out.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Kinds:
    """The files of a directory that are wanted, by how their names end, with or without .gz or .zst after it."""

    name: str  # of such files, for messages
    suffixes: tuple[str, ...]  # of the files wanted
    # suffixes of files that are data too: a directory that holds both is ambiguous, and refused
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.suffixes or not all(suffix.startswith(".") for suffix in self.suffixes):
            raise ValueError(
                f'suffixes must each begin with a dot; given {list(self.suffixes)}: give for example (".txt",)'
            )


def find_files(entries: Sequence[PathLike], kinds: Kinds) -> list[Path]:
    """Return the files that are named: "stdlib", files, globs (`**` goes down), directories (all the way down).

    Files named one by one, or by a glob, are taken whatever they are called. Hidden ones below a directory are passed
    over.
    """
    unique: dict[Path, Path] = {}
    for path in sorted(path for entry in entries for path in _files(entry, kinds)):
        unique.setdefault(path.resolve(), path)  # by whichever links
    return list(unique.values())


def _files(entry: PathLike, kinds: Kinds) -> list[Path]:
    if entry == STDLIB:
        return _stdlib_files()
    path = local_path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _directory_files(path, kinds)
    if glob.has_magic(str(path)):
        if files := [file for file in matching(path) if file.is_file()]:
            return files
        raise ValueError(f"a glob must match at least one file; given {path}, which matches none: fix it")
    raise ValueError(
        f"source must be a file, a glob or a directory that exists; given {entry}, looked for at {path.absolute()}: "
        f'fix the path, or give "{STDLIB}" for Python\'s own source text'
    )


def matching(pattern: Path) -> list[Path]:
    """Return the paths that a glob matches; brackets and stars in the names of folders that exist are these names."""
    folder = next((each for each in pattern.parents if each.exists()), Path())
    literal = Path(glob.escape(str(folder)), pattern.relative_to(folder))
    # `Path.glob` takes no absolute pattern, and reads a last `**` differently from one Python to the next.
    return [*map(Path, glob.glob(str(literal), recursive=True))]  # noqa: PTH207


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [Path(folder, name) for folder, name in walk(root, leave_out=_NOT_STDLIB) if name.endswith(".py")]
    if not files:
        raise ValueError(
            f'source "{STDLIB}" needs Python\'s own source files; given none under {root}: give text files of your own'
        )
    return files


def _directory_files(directory: Path, kinds: Kinds) -> list[Path]:
    every = [Path(folder, name) for folder, name in walk(directory)]
    files, rivals = _ending(every, kinds.suffixes), _ending(every, kinds.others)
    if files and rivals:
        raise ValueError(
            f"a directory must hold one kind of data; given {directory} with {len(files)} such as {files[0].name} and "
            f"{len(rivals)} such as {rivals[0].name}: name those that are meant by a glob, as "
            f"{directory}/**/*{rivals[0].suffix}"
        )
    shown = ", ".join(sorted({path.suffix for path in rivals}) or kinds.suffixes)
    files = files or rivals
    others = len(every) - len(files)
    if not files:
        raise ValueError(
            f"a directory must hold {kinds.name} files ({shown}); given {directory} with {others} other file(s): "
            "give other suffixes, or name the files by a glob"
        )
    if others:
        notice(f"{directory}: reading {len(files)} files ({shown}), passing over {others} others")
    return files


def _ending(files: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    def is_wanted(name: str) -> bool:
        return not name.startswith(".") and (name.endswith(suffixes) or plain_name(name).endswith(suffixes))

    return [path for path in files if is_wanted(path.name)] if suffixes else []


def walk(directory: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield every file as (folder, name), as there may be millions, and a `Path` takes ten times the memory.

    Hidden directories, and those named in `leave_out`, are not entered. Raises ValueError if one cannot be read.
    """
    for folder, folders, names in os.walk(directory, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        yield from ((folder, name) for name in names)


def _refuse(error: OSError) -> None:
    raise ValueError(unreadable(error)) from error
