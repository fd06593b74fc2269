"""From what a user names to documents: bytes, one for each file, in an order every process agrees on.

1. The files: Python's own standard library, files, globs, directories. Sorted by path; a file named twice is read once.
2. Their contents, whole. Bytes are the tokens, so nothing is decoded and no encoding can be wrong.

Another kind of source (JSONL, parquet, a hub) is one more function that returns a `Corpus`.
"""

import glob
import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdp.notices import notice

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
STDLIB = "stdlib"
# What is not the library's own text: packages installed beside it, and its tests, which some distributions leave out.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """Documents and where they are from. Empty documents are none: they hold nothing to learn."""

    name: str
    documents: tuple[bytes, ...]


def read_corpus(source: PathLike | Sequence[PathLike], *, suffixes: Sequence[str] = TEXT_SUFFIXES) -> Corpus:
    """Reads all of a source into memory.

    Args:
      source: "stdlib", or a file, a glob (`**` goes down), a directory (all the way down), or a sequence of these. A
        file of your own by the name stdlib is "./stdlib".
      suffixes: which files of a directory are text; files named one by one, or by a glob, are read whatever they are
        called. Hidden files and directories below a directory are passed over.

    Raises:
      ValueError: nothing there, something unreadable, or nothing but empty files.
    """
    entries = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not entries:
        raise ValueError('source must name some text, got an empty list: give "stdlib", a file, a glob or a directory')
    suffixes = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    if not suffixes or not all(suffix.startswith(".") for suffix in suffixes):
        raise ValueError(f'suffixes must each begin with a dot, got {list(suffixes)}: give for example (".txt",)')
    files = _once(path for entry in entries for path in _files(entry, suffixes))
    documents = tuple(document for document in map(_read, files) if document)
    name = _name(entries)
    if not documents:
        raise ValueError(f"text must not be empty, got {name}: {len(files)} empty file(s); give some text")
    return Corpus(name, documents)


def _name(entries: Sequence[PathLike]) -> str:
    first = f"stdlib (Python {platform.python_version()})" if entries[0] == STDLIB else str(entries[0])
    return first if len(entries) == 1 else f"{first} and {len(entries) - 1} more"


def _once(paths: Iterable[Path]) -> list[Path]:
    """In sorted order, each file once, whatever links lead to it."""
    unique: dict[Path, Path] = {}
    for path in sorted(paths):
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _files(entry: PathLike, suffixes: tuple[str, ...]) -> list[Path]:
    if entry == STDLIB:
        return _stdlib_files()
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _directory_files(path, suffixes)
    if glob.has_magic(str(path)):
        return _glob_files(str(path))
    raise ValueError(
        f"source must be a file, a glob or a directory that exists, got {entry}, looked for at {path.absolute()}: "
        f'mend the path, or give "{STDLIB}" for Python\'s own source text'
    )


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files, _ = _walk(root, (".py",), leave_out=_NOT_STDLIB)
    if not files:
        raise ValueError(
            f'source "{STDLIB}" needs Python\'s own source files, found none under {root}: give text files of your own'
        )
    return files


def _directory_files(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files, others = _walk(directory, suffixes)
    kinds = ", ".join(suffixes)
    if not files:
        raise ValueError(
            f"a directory must hold text files ({kinds}), got {directory} with {others} other file(s): "
            "give other suffixes, or name the files by a glob"
        )
    if others:
        notice(f"{directory}: reading {len(files)} files ({kinds}), passing over {others} others")
    return files


def _glob_files(pattern: str) -> list[Path]:
    # `Path.glob` takes no absolute pattern, and reads a last `**` differently from one Python to the next.
    files = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]  # noqa: PTH207
    if not files:
        raise ValueError(f"a glob must match at least one file, got {pattern}, which matches none: mend it")
    return files


def _walk(
    directory: Path, suffixes: tuple[str, ...], *, leave_out: frozenset[str] = frozenset()
) -> tuple[list[Path], int]:
    """The files with one of these suffixes, and the number of others; hidden directories are not entered."""
    files: list[Path] = []
    others = 0
    for folder, folders, names in os.walk(directory, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        text = [name for name in names if not name.startswith(".") and name.endswith(suffixes)]
        files += [Path(folder, name) for name in text]
        others += len(names) - len(text)
    return files, others


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error


def _refuse(error: OSError) -> None:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> ValueError:
    return ValueError(
        f"all of the text must be readable, got {error.filename}, {error.strerror}: "
        "mend its permissions, or leave it out"
    )
