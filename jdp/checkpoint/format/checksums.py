"""Checksums of every file of a checkpoint: changes on the disk since it was saved are found when it is read.

The folder of a checkpoint has `checksums.json`: the size and the XXH3 hash (128 bits) of each file, of the bytes just
written. The commit file, which comes last, has the hash of that table. So a flipped bit, a zeroed page, and a file that
is cut, missing or replaced are found. Files are checked and not arrays, so any mesh may read them. Errors in memory
before the write are not found, nor intended changes of file and table: the hash is no signature.

With several processes each hashes the arrays that it wrote, and process 0 the rest; each checks a share of the files.
Large files also have hashes (64 bits) of their blocks, for processes that fetch parts of them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

COMMITTED = "commit_success.txt"
"""The file that is written last; a folder without it is no checkpoint."""
TABLE = "checksums.json"
_PART = "checksums.process_"
_FORMAT, _HASH = 1, "xxh3_128"
_COMMIT = re.compile(rf"checksums {_HASH} ([0-9a-f]{{32}})\n")
_WITHOUT = "Checkpoint commit was successful to "  # Orbax' own words: a version of jdp that made no checksums
_THREADS = 4
_LEAST_BLOCK, _MOST_BLOCKS = 1 << 16, 4096
_READ = 1 << 20

Files = dict[str, tuple[int, str]]
"""Path in the folder, with "/" -> size in bytes, hash."""


@dataclass(frozen=True)
class Blocks:
    """The hashes of a large file's blocks, 16 letters each."""

    file: int  # bytes
    block: int  # bytes; the last may have less
    hashes: str

    def of(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Return the numbers of the blocks of which these ranges (offset, size) have a part."""
        return sorted({i for at, size in ranges for i in range(at // self.block, -(-(at + size) // self.block))})

    def changed(self, file: Path, numbers: Sequence[int]) -> list[int]:
        """Return those of these blocks that a file lacks, or has with other bytes."""
        with file.open("rb", buffering=0) as stream:
            read = (os.pread(stream.fileno(), self.block, i * self.block) for i in numbers)
            return [
                i
                for i, content in zip(numbers, read, strict=True)
                if xxhash.xxh3_64_hexdigest(content) != self.hashes[16 * i : 16 * i + 16]
            ]


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        status: "whole": as it was written; "damaged"; "unverified": it was saved without checksums.
        problem: the first damaged file and its fault, such as "state/d/01 is missing"; else empty.
    """

    status: Literal["whole", "damaged", "unverified"]
    problem: str = ""


def write_part(folder: Path, process: int) -> None:
    """Hash the arrays that a process wrote, and leave the result in the folder for `commit`."""
    state = folder / "state"
    own = [*_files(state / f"ocdbt.process_{process}"), *_files(state / "array_metadatas" / f"process_{process}")]
    (state / f"{_PART}{process}").write_text(json.dumps(_hash_all(folder, own)))


def commit(folder: Path) -> None:
    """Write the table of all files, with the parts of the other processes, and the commit file after it."""
    parts = sorted((folder / "state").glob(f"{_PART}*"))
    hashed: dict[str, tuple[int, str, int, str]] = {}
    for part in parts:
        hashed |= json.loads(part.read_text())
    rest = [file for file in _files(folder) if file not in parts and _name(folder, file) not in hashed]
    hashed |= _hash_all(folder, rest)
    files: Files = {name: (size, digest) for name, (size, digest, _, _) in hashed.items()}
    blocks = {name: (block, hashes) for name, (_, _, block, hashes) in hashed.items() if hashes}
    content = {"format": _FORMAT, "hash": _HASH, "files": files, "blocks": blocks}
    table = json.dumps(content, sort_keys=True, indent=0).encode()
    (folder / TABLE).write_bytes(table)
    for part in parts:
        part.unlink()
    fresh = folder / f"{COMMITTED}.new"
    fresh.write_text(f"checksums {_HASH} {xxhash.xxh3_128_hexdigest(table)}\n")
    fresh.rename(folder / COMMITTED)


def verify(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, *, process: int = 0, processes: int = 1
) -> Verdict:
    """Compare the files of a checkpoint with their checksums."""
    try:
        committed = (folder / COMMITTED).read_bytes().decode(errors="replace")
    except OSError as error:
        return _damaged(COMMITTED, error)
    digest = _COMMIT.fullmatch(committed)
    if digest is None:
        if committed.startswith(_WITHOUT) and not (folder / TABLE).exists():
            return Verdict("unverified")
        return Verdict("damaged", f"{COMMITTED} has changed")
    try:
        table = (folder / TABLE).read_bytes()
    except OSError as error:
        return _damaged(TABLE, error)
    if xxhash.xxh3_128_hexdigest(table) != digest[1]:
        return Verdict("damaged", f"{TABLE} has changed")
    files = _parsed(table)
    if files is None:
        return Verdict("damaged", f"{TABLE} is not a table of checksums, format {_FORMAT}")
    names = sorted(filter(wanted, files), key=lambda name: (-files[name][0], name))[process::processes]
    with ThreadPoolExecutor(_THREADS) as pool:  # the first damaged file ends it
        problem = next(filter(None, pool.map(lambda name: _problem(folder, name, *files[name]), names)), "")
    return Verdict("damaged", problem) if problem else Verdict("whole")


def block_table(folder: Path) -> dict[str, Blocks]:
    """Return the blocks of the large files; {} if they have none, as an older version saved them, or are damaged."""
    try:
        table = (folder / TABLE).read_bytes()
        files, blocks = _parsed(table) or {}, json.loads(table).get("blocks", {})
        found = {name: Blocks(files[name][0], int(block), str(hashes)) for name, (block, hashes) in blocks.items()}
        is_whole = all(
            each.block > 0 and len(each.hashes) == 16 * -(-each.file // each.block) for each in found.values()
        )
        return found if is_whole else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def is_part(folder: Path) -> bool:
    """Return True if files are missing of a committed checkpoint, such as one that is being deleted."""
    try:
        files = _parsed((folder / TABLE).read_bytes())
    except OSError:
        return (folder / COMMITTED).is_file() and verify(folder, lambda name: False).status == "damaged"
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
        return "" if _hashed(file)[:2] == (size, digest) else f"{name} has changed"
    except OSError as error:
        return _damaged(name, error).problem


def _damaged(name: str, error: OSError) -> Verdict:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return Verdict("damaged", f"{name} {'is missing' if missing else f'cannot be read ({error.strerror})'}")


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


def _hash_all(folder: Path, files: list[Path]) -> dict[str, tuple[int, str, int, str]]:
    """Return the size and the hash of each file, and the size and the hashes of its blocks."""
    hashed: dict[str, tuple[int, str, int, str]] = {}
    for file in files:
        block, blocks = _block(file.stat().st_size), list[str]()
        size, digest = _hashed(file, block, blocks)
        hashed[_name(folder, file)] = (size, digest, block, "".join(blocks) if len(blocks) > 1 else "")
    return hashed


def _block(size: int) -> int:
    """Return the size of the blocks of a file: a power of two, so that there are not too many."""
    return max(_LEAST_BLOCK, 1 << (max(size - 1, 0) // _MOST_BLOCKS).bit_length())


def _hashed(file: Path, block: int = _READ, blocks: list[str] | None = None) -> tuple[int, str]:
    """Return the size and the hash of a file; append the hashes of its blocks."""
    hasher, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(block)), 0
    with file.open("rb", buffering=0) as stream:
        while count := _filled(stream, buffer):
            hasher.update(buffer[:count])
            size += count
            if blocks is not None:
                blocks.append(xxhash.xxh3_64_hexdigest(buffer[:count]))
    return size, hasher.hexdigest()


def _filled(stream: Any, buffer: memoryview) -> int:
    """Read until a buffer is full or the file ends; return the bytes read."""
    done = 0
    while done < len(buffer) and (count := stream.readinto(buffer[done:])):
        done += count
    return done


def _files(path: Path) -> list[Path]:
    """Return all files below a folder, in order; of a file, itself."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()
