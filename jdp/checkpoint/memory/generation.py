"""One process' parts of one step: a file in memory, and an index with checksums; renaming the index commits them.

Each visit of a process writes into two slots in turn, so one generation is always complete. Rewriting a file keeps its
memory and its mapping, because a new page costs more than copying one.
"""

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jdp.checkpoint.format.checksums import parse_table, write_table
from jdp.checkpoint.memory.layout import Layout

FILES = "*.[01]"
"""Pattern of the files of parts."""
_FORMAT = 2
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
    """The index of one process' parts of one step."""

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
        offsets = _offsets([part.size for part in parts])
        rows = [
            [number, offset, part.size, xxhash.xxh3_64_hexdigest(part.data)]
            for number, offset, part in zip(numbers, offsets, parts, strict=False)
        ]
        write_table(_index_of(self.file), {**head, "parts": rows})

    def discard(self) -> None:
        """Delete the index; the memory stays for the next generation."""
        self.step = -1
        _index_of(self.file).unlink(missing_ok=True)


def head(key: Key, table: Mapping[str, Any], record: Any, layout: Layout) -> dict[str, Any]:
    """Return the part of an index that all processes share."""
    grids = {path: astuple(grid) for path, grid in layout.grids.items()}
    return {"format": _FORMAT, "key": key, "table": table, "record": record, "grids": grids, "total": layout.total}


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
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return offsets
