"""Checksums of every file of a checkpoint: changes on the disk since it was saved are found when it is read.

The folder of a checkpoint has `checksums.json`: the size and the XXH3 hash (128 bits) of each file, of the bytes just
written. The commit file, which comes last, has the hash of that table. So a flipped bit, a zeroed page, and a file that
is cut, missing or replaced are found. Files are checked and not arrays, so any mesh may read them. Errors in memory
before the write are not found, nor intended changes of file and table: the hash is no signature.

With several processes each hashes the arrays that it wrote, and process 0 the rest; each checks a share of the files.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

COMMITTED = "commit_success.txt"
"""The file that is written last; a folder without it is no checkpoint."""
TABLE = "checksums.json"
_PART = "checksums.process_"
_FORMAT, _HASH = 1, "xxh3_128"
_COMMIT = re.compile(rf"checksums {_HASH} ([0-9a-f]{{32}})\n")
_THREADS = 4
_READ = 1 << 20

Files = dict[str, tuple[int, str]]
"""Path in the folder, with "/" -> size in bytes, hash."""


def write_part(folder: Path, process: int) -> None:
    """Hash the arrays that a process wrote, and leave the result in the folder for `commit`."""
    state = folder / "state"
    own = [*_files(state / f"ocdbt.process_{process}"), *_files(state / "array_metadatas" / f"process_{process}")]
    (state / f"{_PART}{process}").write_text(json.dumps(_hash_all(folder, own)))


def commit(folder: Path) -> None:
    """Write the table of all files, with the parts of the other processes, and the commit file after it."""
    parts = sorted((folder / "state").glob(f"{_PART}*"))
    files: Files = {}
    for part in parts:
        files |= json.loads(part.read_text())
    rest = [file for file in _files(folder) if file not in parts and _name(folder, file) not in files]
    files |= _hash_all(folder, rest)
    content = {"format": _FORMAT, "hash": _HASH, "files": files}
    table = json.dumps(content, sort_keys=True, indent=0).encode()
    (folder / TABLE).write_bytes(table)
    for part in parts:
        part.unlink()
    fresh = folder / f"{COMMITTED}.new"
    fresh.write_text(f"checksums {_HASH} {xxhash.xxh3_128_hexdigest(table)}\n")
    fresh.rename(folder / COMMITTED)


def verify(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, *, process: int = 0, processes: int = 1
) -> str:
    """Compare the files of a checkpoint with their checksums; return the first fault, "" if there is none.

    A fault names its file, such as "state/d/01 is missing".
    """
    try:
        committed = (folder / COMMITTED).read_bytes().decode(errors="replace")
    except OSError as error:
        return _unread(COMMITTED, error)
    digest = _COMMIT.fullmatch(committed)
    if digest is None:
        return f"{COMMITTED} has changed"
    try:
        table = (folder / TABLE).read_bytes()
    except OSError as error:
        return _unread(TABLE, error)
    if xxhash.xxh3_128_hexdigest(table) != digest[1]:
        return f"{TABLE} has changed"
    files = _parsed(table)
    if files is None:
        return f"{TABLE} is not a table of checksums, format {_FORMAT}"
    names = sorted(filter(wanted, files), key=lambda name: (-files[name][0], name))[process::processes]
    with ThreadPoolExecutor(_THREADS) as pool:  # the first damaged file ends it
        return next(filter(None, pool.map(lambda name: _problem(folder, name, *files[name]), names)), "")


def is_part(folder: Path) -> bool:
    """Return True if files are missing of a committed checkpoint, such as one that is being deleted."""
    try:
        files = _parsed((folder / TABLE).read_bytes())
    except OSError:
        return (folder / COMMITTED).is_file()
    return files is not None and not all((folder / name).exists() for name in files)


def _problem(folder: Path, name: str, size: int, digest: str) -> str:
    """Return the fault of a file; "" if it has none."""
    file = folder / name
    try:
        if not file.resolve().is_relative_to(folder.resolve()):
            return f"{name} leads out of the checkpoint"
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a file"
        if found.st_size != size:
            return f"{name} has {found.st_size:,} bytes of {size:,}"
        return "" if _hashed(file) == (size, digest) else f"{name} has changed"
    except OSError as error:
        return _unread(name, error)


def _unread(name: str, error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"{name} {'is missing' if missing else f'cannot be read ({error.strerror})'}"


def _parsed(table: bytes) -> Files | None:
    """Return the files of a table; None if it is not one."""
    try:
        content: Any = json.loads(table)
        if (content["format"], content["hash"]) != (_FORMAT, _HASH):
            return None
        files = {
            str(PurePosixPath(name)): (int(size), str(digest)) for name, (size, digest) in content["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return files if not any(PurePosixPath(name).is_absolute() or "\0" in name for name in files) else None


def _hash_all(folder: Path, files: list[Path]) -> Files:
    return {_name(folder, file): _hashed(file) for file in files}


def _hashed(file: Path) -> tuple[int, str]:
    """Return the size and the hash of a file."""
    hasher, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_READ)), 0
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
    return size, hasher.hexdigest()


def _files(path: Path) -> list[Path]:
    """Return all files below a folder, in order; of a file, itself."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()
