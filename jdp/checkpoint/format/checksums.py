"""Checksums of every file of a checkpoint, which detect changes on disk when the checkpoint is read.

`checksums.json` has the size and the XXH3 hash (128 bits) of each other file; its first line is the hash of that table.
Files are checked, not arrays, so any mesh may read them. Errors in memory before the write, and intended changes of
file and table, are not detected: the hash is not a signature. With several processes each hashes the arrays that it
wrote, and process 0 the rest; each checks a share of the files.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

COMMITTED = "checksums.json"
"""The file that is written last; a folder without it is not a checkpoint."""
_FORMAT = 1
_THREADS = 4
_READ = 1 << 20

Files = dict[str, tuple[int, str]]
"""Path in the folder, with "/" -> (size in bytes, hash)."""


def write(file: Path, content: bytes) -> None:
    """Write a file, and return when its bytes are on disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Return when the names in a folder are on disk, if the file system can tell."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_table(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object after a line with its hash; the file appears complete or not at all."""
    text = json.dumps(content).encode()
    fresh = file.with_name(f"{file.name}.new")
    write(fresh, xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
    fresh.replace(file)


def parse_table(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object from `write_table`; None if it has changed."""
    digest, _, text = content.partition(b"\n")
    return json.loads(text) if xxhash.xxh3_128_hexdigest(text).encode() == digest else None


def hash_share(folder: Path, process: int, processes: int) -> Files:
    """Return the checksums of the arrays that a process wrote; for process 0, also of all other files."""
    written_by = [f"state/ocdbt.process_{number}/" for number in range(processes)]
    own, others = written_by.pop(process), tuple(written_by)
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.is_symlink()
    }
    files.pop(COMMITTED, None)
    return {
        name: _hashed(file)
        for name, file in files.items()
        if name.startswith(own) or (process == 0 and not name.startswith(others))
    }


def commit(folder: Path, files: Files) -> None:
    """Write the table of all files, and return when it is on disk."""
    write_table(folder / COMMITTED, {"format": _FORMAT, "files": files})
    sync(folder)


def verify(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, *, process: int = 0, processes: int = 1
) -> str:
    """Compare the files of a checkpoint with their checksums; return the first fault, or "".

    A fault names its file, such as "state/d/01 is missing".
    """
    try:
        table = parse_table((folder / COMMITTED).read_bytes())
    except OSError as error:
        return _unread(COMMITTED, error)
    if table is None:
        return f"{COMMITTED} has changed"
    if table["format"] != _FORMAT:
        return f"{COMMITTED} is not a table of checksums, format {_FORMAT}"
    files: dict[str, tuple[int, str]] = table["files"]
    names = sorted(filter(wanted, files), key=lambda name: (-files[name][0], name))[process::processes]
    with ThreadPoolExecutor(_THREADS) as pool:  # the first damaged file ends it
        return next(filter(None, pool.map(lambda name: _problem(folder, name, *files[name]), names)), "")


def _problem(folder: Path, name: str, size: int, digest: str) -> str:
    try:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            return f"{name} leads out of the checkpoint"
        found = (folder / name).lstat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait
            return f"{name} is not a file"
        if found.st_size != size:
            return f"{name} has {found.st_size:,} bytes of {size:,}"
        return "" if _hashed(folder / name) == (size, digest) else f"{name} has changed"
    except OSError as error:
        return _unread(name, error)


def _unread(name: str, error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"{name} {'is missing' if missing else f'cannot be read ({error.strerror})'}"


def _hashed(file: Path) -> tuple[int, str]:
    hasher, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_READ)), 0
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
    return size, hasher.hexdigest()
