"""A checkpoint in a folder: its arrays, which Orbax writes and reads, and a checksum of every file.

`state/` has the arrays. They are not compressed, because zstandard saves only 7% on trained float32 weights, and takes
three times the processor time of all other work in both directions. `checkpoint.json` has the table of their shapes and
dtypes, the versions that wrote them, the record and the metrics. `checksums.json` is written last: a folder without it
is not a checkpoint. It has the size and the XXH3 hash (128 bits) of each other file; its first line is the hash of that
table.

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash

from jdp.checkpoint.errors import HOURS, CheckpointError, DamagedError, reading
from jdp.core.cluster.barrier import from_every_process

ARRAYS = "state"
"""The folder of the arrays in a checkpoint."""
DESCRIPTION = "checkpoint.json"
COMMITTED = "checksums.json"
_FORMAT = 1
_THREADS = 4
_READ = 1 << 20
_LEAST_PART_BYTES = 2**20
"""Smallest part that one device sends of a replicated array."""
_PATIENCE_SECONDS = 24 * 3600
"""Orbax' limit for a save, by the wall clock: long enough for a machine that sleeps meanwhile."""

Files = dict[str, tuple[int, str]]
"""Path in the folder, with "/" -> (size in bytes, hash)."""


class Stored:
    """A checkpoint in a folder, as a `content.Source`; `fix` is the fix if it is damaged."""

    def __init__(self, folder: Path, fix: str) -> None:
        self.folder, self._fix = folder, fix
        self._description: dict[str, Any] = {}

    def table(self) -> dict[str, Any]:
        """Verify and read the description, which has the table of leaves."""
        self._verify(_is_description)
        with reading(str(self.folder), self._fix):
            self._description = json.loads((self.folder / DESCRIPTION).read_bytes())
        return self._description

    def record(self) -> dict[str, Any]:
        return self._description["record"]

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify the files of the arrays; read arrays onto these leaves, by path."""
        self._verify(lambda name: not _is_description(name))
        if not wanted:
            return {}
        onto = ocp.checkpoint_utils.construct_restore_args(wanted)
        with reading(str(self.folder), self._fix), ocp.Checkpointer(_handler(), **_options()) as reader:
            arguments = ocp.args.PyTreeRestore(wanted, restore_args=onto, partial_restore=True)
            return reader.restore(self.folder / ARRAYS, args=arguments)

    def _verify(self, wanted: Callable[[str], bool]) -> None:
        """Compare files with their checksums; each process reads a share of them, and all raise the same error."""
        own = verify(self.folder, wanted, process=jax.process_index(), processes=jax.process_count())
        for problem in filter(None, from_every_process("the checksums of a checkpoint", own, seconds=HOURS)):
            raise DamagedError(f"{self.folder} is damaged: {problem}. {self._fix}.", problem)


def is_checkpoint(folder: Path) -> bool:
    try:
        return (folder / COMMITTED).is_file() and (folder / ARRAYS).is_dir()
    except PermissionError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}. Give this user access to it.") from None


def read_metrics(folder: Path) -> dict[str, float | None] | None:
    """Return the metrics saved with the arrays; None if the file is damaged or is being deleted."""
    with suppress(OSError):
        if not verify(folder, _is_description):
            return json.loads((folder / DESCRIPTION).read_bytes())["metrics"]
    return None


def _is_description(name: str) -> bool:
    return name == DESCRIPTION


# Orbax.


def open_writer() -> ocp.AsyncCheckpointer:
    """Return the writer of arrays in the background; `save` first copies them from the devices."""
    patience = ocp.AsyncOptions(timeout_secs=_PATIENCE_SECONDS, create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(_handler(), async_options=patience, **_options())


def _options() -> dict[str, Any]:
    """Return options that make processes wait in JAX's coordination service, not on the devices."""
    count = jax.process_count()
    processes = set(range(count)) if count > 1 else None
    return {"multiprocessing_options": ocp.options.MultiprocessingOptions(active_processes=processes)}


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax' handler of the arrays.

    Each device sends a part of a large replicated array. Small arrays are not split, because that takes a program for
    each shape and device, and the first save would wait for their compilation.
    """
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_PART_BYTES)
    numpy = ((kind, kinds.get_type_handler(kind)) for kind in (np.number, np.ndarray))
    registry = kinds.create_type_handler_registry((jax.Array, arrays), *numpy)
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


# Files and their checksums.


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
    written_by = [f"{ARRAYS}/ocdbt.process_{number}/" for number in range(processes)]
    own, others = written_by.pop(process), tuple(written_by)
    paths = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return {
        name: _hashed(folder / name)
        for name in names
        if name != COMMITTED and (name.startswith(own) or (process == 0 and not name.startswith(others)))
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
    files: Files = table["files"]
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
