"""One process' parts of one step: a file in memory, and an index with checksums; renaming the index commits them.

Each process writes into two slots in turn, so one generation is always complete. Rewriting a file keeps its memory and
its mapping, because a new page costs more than copying one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jdp.checkpoint.format.checksums import parse_table, write_table
from jdp.checkpoint.memory.layout import Grid

_FORMAT = 1
_ALIGNED = 64
_INDEX = ".json"
Key = tuple[int, str]
"""The step of a generation and the visit that wrote it: parts of two visits never mix."""


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
    """The index of one process' parts of one step.

    Attributes:
        table: the leaves, as in a checkpoint's table.
        record: the record saved with the state.
        grids: path -> grid of its parts.
        total: number of parts of all processes.
        parts: number -> part, of this process.
    """

    key: Key
    table: Mapping[str, Any]
    record: Mapping[str, Any]
    grids: Mapping[str, Grid]
    total: int
    parts: Mapping[int, Part]


class Slot:
    """A reusable file for one process' parts."""

    def __init__(self, folder: Path, process: int, number: int) -> None:
        self.file = folder / f"{process}.{number}"
        self.index = self.file.with_name(f"{self.file.name}{_INDEX}")
        self._mapped = np.empty(0, np.uint8)

    def open(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Discard the generation in the slot; return memory for parts of these sizes. Raises OSError."""
        self.index.unlink(missing_ok=True)
        if not sizes:
            return []
        self.file.parent.mkdir(mode=0o700, exist_ok=True)  # something may have removed it in mid-run
        offsets = _offsets(sizes)
        if self._mapped.size != offsets[-1] or not self.file.exists():
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(handle, offsets[-1])
                os.posix_fallocate(handle, 0, offsets[-1])  # a missing page would kill the process later
            finally:
                os.close(handle)
            self._mapped = np.memmap(self.file, np.uint8, "r+")
        return [self._mapped[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]

    def commit(self, head: Mapping[str, Any], numbers: Iterable[int], parts: Sequence[np.ndarray]) -> None:
        """Hash the parts and write the index, which commits them."""
        offsets = _offsets([part.size for part in parts])
        rows = [
            [number, offset, part.size, xxhash.xxh3_64_hexdigest(part.data)]
            for number, offset, part in zip(numbers, offsets, parts, strict=False)
        ]
        write_table(self.index, {**head, "parts": rows})

    @staticmethod
    def remove(file: Path) -> None:
        """Remove a file of parts, and its index."""
        file.with_name(f"{file.name}{_INDEX}").unlink(missing_ok=True)
        file.unlink(missing_ok=True)


def head(key: Key, table: Mapping[str, Any], record: Any, grids: Mapping[str, Grid], total: int) -> dict[str, Any]:
    """Return the part of an index that all processes share."""
    kinds = {path: [grid.dtype, grid.shape, grid.chunk, grid.first] for path, grid in grids.items()}
    return {"format": _FORMAT, "key": key, "table": table, "record": record, "grids": kinds, "total": total}


def slots(folder: Path) -> dict[Path, Index]:
    """Return the committed, undamaged generations of all processes in a folder: file -> index."""
    found = dict[Path, Index]()
    for file in sorted(folder.glob(f"*{_INDEX}")):
        with contextlib.suppress(OSError):  # another process has removed it
            fields = parse_table(file.read_bytes())
            if fields is not None and (index := of(fields, file.with_suffix(""))):
                found[file] = index
    return found


def of(fields: Mapping[str, Any], file: Path) -> Index | None:
    """Return the index with these fields; None for another version."""
    if fields["format"] != _FORMAT:
        return None
    grids = {
        path: Grid(dtype, tuple(shape), tuple(chunk), first)
        for path, (dtype, shape, chunk, first) in fields["grids"].items()
    }
    parts = {number: Part(file, offset, size, digest) for number, offset, size, digest in fields["parts"]}
    step, visit = fields["key"]
    return Index((step, visit), fields["table"], fields["record"], grids, fields["total"], parts)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, then the total size."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return offsets
