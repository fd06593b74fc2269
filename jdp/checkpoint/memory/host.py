"""A run's files in a host's memory, which outlive its processes: below /dev/shm/jdp-UID, or below $JDP_MEMORY_DIR.

Each run has its own folder there, named by the path of its checkpoints and a random number beside them. So a run that
was removed and started again finds nothing of the old one. Each process holds a lock there while it lives: a second
run is refused. A later run removes unused folders.

A generation is one process' parts of one step: a file, and an index with checksums; renaming the index commits them.
Each visit of a process writes into two slots in turn, so one generation is always complete. Rewriting a file keeps its
memory and its mapping, because a new page costs more than copying one.
"""

import base64
import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jdp.base.formatting import format_bytes
from jdp.base.machine import available_memory
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.stored import parse_table, write_table

VARIABLE = "JDP_MEMORY_DIR"
"""The environment variable for a file system in memory other than /dev/shm."""
RUN_ID = ".memory"
"""The file beside a run's checkpoints with the random number in the names of its folders in memory."""
FILES = "*.[01]"
"""Pattern of the files of parts."""
_LOCK, _INDEX = ".lock", ".json"
_UNUSED_DAYS = 3.0
_NAME = re.compile(r"[0-9a-f]{16}")
_FORMAT = 2
_ALIGNED = 64
Key = tuple[int, str]
"""The step of a generation and the visit that wrote it: parts of two visits never mix."""


def home() -> Path:
    """Return this user's folder in memory, made with mode 0700. Raises CheckpointError."""
    root = Path(os.environ.get(VARIABLE) or "/dev/shm")
    folder = root / f"jdp-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _unusable(root, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"Copies in memory must be closed to other users; {folder} does not belong to this user with mode 0700. "
            f"Remove it, or set {VARIABLE} to another folder."
        )
    return folder


def token() -> str:
    """Return a text shared by exactly the processes that see the same folder. Raises CheckpointError."""
    found = home().stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()} {found.st_dev} {found.st_ino}"


def folder_of(directory: Path) -> str:
    """Return the name of a run's folders in memory, which depends on the path of its checkpoints; "" before a save."""
    try:
        run_id = (directory / RUN_ID).read_bytes()
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(run_id + bytes(directory.resolve()))


class RunFolder:
    """A run's folder in memory, for one process while this object lives."""

    def __init__(self, name: str, checkpoints: str, process: int) -> None:
        self.path = home() / name
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock = self.path / f"{process}{_LOCK}"
            self._handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for other in filter(lambda path: _NAME.fullmatch(path.name), self.path.parent.iterdir()):
                with contextlib.suppress(OSError):  # a folder that no run has used for three days is removed
                    days = (time.time() - other.stat().st_mtime) / 86400
                    if days > _UNUSED_DAYS and not any(map(_is_held, other.glob(f"*{_LOCK}"))):
                        shutil.rmtree(other, ignore_errors=True)
        except BlockingIOError:
            os.close(self._handle)
            raise CheckpointError(
                f"Copies in memory allow one run at a time; {self.path}, for {checkpoints}, is in use. "
                "Wait for that run, or open the directory without keep_in_memory."
            ) from None
        except OSError as error:
            raise _unusable(self.path, error) from error

    def problem_with(self, size: int) -> str:
        """Return why `size` bytes do not fit in place of the copies that are here; "" if they fit."""
        found = os.statvfs(self.path)
        free = min(found.f_bavail * found.f_frsize, available_memory() or math.inf)
        free += sum(file.stat().st_size for file in self.path.glob(FILES))
        if size <= free:
            return ""
        return (
            f"keep_in_memory holds two copies of this host's part of the state; they need {format_bytes(size)}, "
            f"and {self.path.parent.parent} has {format_bytes(free)}. Make it larger (mount -o remount,size=…), "
            f"set {VARIABLE}, shard over more hosts, or leave out keep_in_memory"
        )

    def close(self, *, remove: bool = False) -> None:
        """Release the lock; the folder stays for the next start unless it is to be removed."""
        if self._handle >= 0:  # a second call must not close another file's descriptor
            os.close(self._handle)
            self._handle = -1
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)


def _unusable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"keep_in_memory needs a folder in this host's memory; {folder} cannot be written: {error.strerror}. Make "
        f"room, set {VARIABLE} to another folder, or leave out keep_in_memory."
    )


def _is_held(lock: Path) -> bool:
    with lock.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# Generations.


@dataclass(frozen=True)
class Part:
    """A part of an array in a file of this host."""

    file: Path
    offset: int
    size: int
    digest: str

    def content(self) -> np.ndarray | None:
        """Return its bytes, mapped; None if they have changed."""
        try:
            found = np.memmap(self.file, np.uint8, "r", self.offset, (self.size,))
        except (OSError, ValueError):  # missing, or shorter
            return None
        return found if xxhash.xxh3_64_hexdigest(found.data) == self.digest else None


@dataclass(frozen=True)
class Index:
    key: Key
    head: Mapping[str, Any]  # the entries that all processes share
    parts: Mapping[int, Part]  # by number


class Slot:
    """A reusable file for one process' parts; `step` is the step that it holds, -1 for none."""

    def __init__(self, folder: Path, visit: str, process: int, number: int) -> None:
        self.file, self.step = folder / f"{visit}-{process}.{number}", -1
        self._mapped = np.empty(0, np.uint8)

    def open(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Discard the generation in the slot; return memory for parts of these sizes. Raises OSError."""
        self.discard()
        self.file.parent.mkdir(mode=0o700, exist_ok=True)  # something may have removed it in mid-run
        offsets = _offsets(sizes)
        if sizes and (self._mapped.size != offsets[-1] or not self.file.exists()):
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(handle, offsets[-1])
                os.posix_fallocate(handle, 0, offsets[-1])  # a missing page would kill the process later
            finally:
                os.close(handle)
            self._mapped = np.memmap(self.file, np.uint8, "r+")
        return [self._mapped[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]

    def commit(self, head: Mapping[str, Any], numbers: Iterable[int], parts: Sequence[np.ndarray]) -> None:
        """Write the index of these parts; `head` has the entries that all processes share."""
        rows = [
            [number, offset, part.size, xxhash.xxh3_64_hexdigest(part.data)]
            for number, offset, part in zip(numbers, _offsets([part.size for part in parts]), parts, strict=False)
        ]
        write_table(_index_of(self.file), {"format": _FORMAT, **head, "parts": rows})

    def discard(self) -> None:
        """Delete the index; the memory stays for the next generation."""
        self.step = -1
        _index_of(self.file).unlink(missing_ok=True)


def indexes(folder: Path) -> dict[Path, Index]:
    """Return the committed, undamaged generations of all processes in a folder: file of parts -> index."""
    found = dict[Path, Index]()
    for index in sorted(folder.glob(f"*{_INDEX}")):
        file = index.with_suffix("")
        with contextlib.suppress(OSError):  # another process has removed it
            fields = parse_table(index.read_bytes())
            if fields is not None and fields["format"] == _FORMAT:
                parts = {number: Part(file, *place) for number, *place in fields.pop("parts")}
                found[file] = Index(tuple(fields["key"]), fields, parts)
    return found


def remove(file: Path) -> None:
    _index_of(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def packed(value: Any) -> str:
    """Return a JSON value as a short text, for other processes."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def _index_of(file: Path) -> Path:
    return file.with_name(f"{file.name}{_INDEX}")


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, then the total size."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
