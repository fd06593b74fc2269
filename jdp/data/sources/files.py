"""Find the files of text in a source: sorted by path on every process, each file once.

Text is in .txt, .md, .rst and .py files. `datasets` reads files of rows: an error names the source to write.
"""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jdp.base.errors import UserError
from jdp.base.hub_source import BUILDERS, COMPRESSED, HF, builder_of
from jdp.base.notices import notice
from jdp.base.user_path import check_regular, user_path

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Not the library's own text: packages installed beside it, and its tests, which some distributions leave out.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

PathLike = str | os.PathLike[str]


def text_files(entries: Sequence[PathLike]) -> list[Path]:
    """Return the files of "stdlib", files, globs (`**` descends) and directories (at any depth).

    Hidden files below a directory are ignored. Raises ValueError for a file that is not text.
    """
    unique: dict[Path, Path] = {}
    for path in sorted(path for entry in entries for path in _files(entry)):
        unique.setdefault(path.resolve(), path)  # through any links
    return list(unique.values())


def read_file(path: Path) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise UserError(unreadable(error, path)) from error


def unreadable(error: OSError, path: Path | None = None) -> str:
    return (
        f"all of the data must be readable; given {path or error.filename}, {error.strerror or error}: "
        "fix its permissions, or leave it out"
    )


def read_by_datasets(path: Path, file: str | os.PathLike[str] | None = None) -> str:
    """Return the end of an error: how to write a path that jdp does not read itself; `file` is one of its files."""
    builder = builder_of(Path(file or path).name)
    if builder is not None:
        return f'write "{HF}{builder}:{path}", which `datasets` reads'
    some = ", ".join(f'"{HF}{name}:{path}"' for name in BUILDERS)
    packed = " (decompress it first)" if Path(file or path).name.endswith(COMPRESSED) else ""
    return f"convert it{packed}, or write {some}: `datasets` reads these"


def _files(entry: PathLike) -> list[Path]:
    if entry == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [Path(folder, name) for folder, name in walk(root, leave_out=_NOT_STDLIB) if name.endswith(".py")]
    path = user_path(entry)
    if path.is_dir():
        return _directory_files(path)
    if path.is_file():
        return _checked(path, [path])
    if glob.has_magic(str(path)):
        # Existing folders may have brackets and stars in their names. `Path.glob` takes no absolute pattern, and its
        # meaning of a last `**` varies between versions of Python.
        folder = next((parent for parent in path.parents if parent.exists()), Path())
        pattern = Path(glob.escape(str(folder)), path.relative_to(folder))
        files = [Path(file) for file in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207
        if files := [file for file in files if file.is_file()]:
            return _checked(path, files)
        raise UserError(f"a glob must match at least one file; {path} matches none: fix it")
    raise UserError(
        f"source must be a file, a glob or a directory that exists; given {entry}, looked for at {path.absolute()}: "
        f'fix the path, or use "{STDLIB}" for Python\'s own source text'
    )


def _checked(path: Path, files: list[Path]) -> list[Path]:
    """Return the files. Raises ValueError for one that is not text."""
    if others := [file for file in files if not file.name.endswith(TEXT_SUFFIXES)]:
        given = f"{path}" if files == [path] else f"{path}, which leads to {others[0]}"
        raise UserError(
            f"files of text end with {', '.join(TEXT_SUFFIXES)}; given {given}: {read_by_datasets(path, others[0])}"
        )
    return files


def _directory_files(directory: Path) -> list[Path]:
    every = [Path(folder, name) for folder, name in walk(directory) if not name.startswith(".")]
    files = [file for file in every if file.name.endswith(TEXT_SUFFIXES)]
    rows = [file for file in every if builder_of(file.name) not in (None, "imagefolder") and file.suffix != ".json"]
    kinds, others = ", ".join(TEXT_SUFFIXES), len(every) - len(files)
    if rows and files:
        raise UserError(
            f"a directory must hold one kind of data; given {directory} with {len(files)} files such as "
            f"{files[0].name} and {len(rows)} such as {rows[0].name}: {read_by_datasets(directory, rows[0])}, or name "
            f"the text by a glob, as {directory}/**/*{files[0].suffix}"
        )
    if not files:
        example = f" such as {every[0].name}" if every else ""
        fix = read_by_datasets(directory, (rows or every)[0]) if every else "add some"
        given = f"{directory} with {others} other files{example}"
        raise UserError(f"a directory of text must hold {kinds} files; given {given}: {fix}")
    if others:
        notice(f"{directory}: reading {len(files)} files ({kinds}), ignoring {others} others")
    return files


def walk(directory: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield every file as (folder, name): there may be millions, and a `Path` takes ten times the memory.

    Hidden directories, and directories in `leave_out`, are skipped. Raises ValueError if a directory cannot be read.
    """
    for folder, folders, names in os.walk(directory, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        yield from ((folder, name) for name in names)


def _refuse(error: OSError) -> None:
    raise UserError(unreadable(error)) from error
