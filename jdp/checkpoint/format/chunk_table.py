"""Where the chunks of each array lie in the files of a checkpoint.

Orbax writes arrays as chunks (Zarr) into a tree of keys and values (OCDBT). The key "params/w/0.1" has a range of a
file, or the value itself if it is small. TensorStore decodes the nodes of the tree. The chunks can then be read as
plain bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorstore as ts


@dataclass(frozen=True)
class Range:
    """A range of bytes in a file below the folder of the arrays, or bytes that are known already."""

    file: str
    offset: int
    size: int
    known: bytes | memoryview | None = None


@dataclass(frozen=True)
class Chunks:
    """A stored array: its shape and dtype, the shape of a chunk (at the edge too), and each chunk's range."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    ranges: Mapping[str, Range]  # "0.1": the second chunk of the first row


Fetch = Callable[[Iterable[Range]], None]


@dataclass(frozen=True)
class Partial:
    """A copy of a checkpoint on this host, of which some files are fetched in parts.

    Attributes:
        files: their names in the checkpoint, and sizes.
        fetch: fetches ranges of them, and raises DamagedError if they are not as they were saved.
    """

    files: Mapping[str, int]
    fetch: Fetch


class InMemory(Protocol):
    """A state in the hosts' memory: its table and record, and its arrays as those of a checkpoint.

    Attributes:
        chunks: the arrays, for the ranges that are needed of them.
        at_hand: the same, with the bytes of what was fetched.
    """

    @property
    def table(self) -> Mapping[str, Any]: ...
    @property
    def record(self) -> Mapping[str, Any]: ...
    @property
    def chunks(self) -> Mapping[str, Chunks]: ...
    @property
    def at_hand(self) -> Mapping[str, Chunks]: ...

    def fetch(self, wanted: Iterable[Range]) -> str:
        """Have these ranges at hand; return "", or what is damaged, the same on every process."""
        ...


class Source(NamedTuple):
    """A checkpoint to read: its folder, what to do if it is damaged, what is fetched in parts, or what is in memory."""

    folder: Path
    fix: str
    partial: Partial | None = None
    memory: InMemory | None = None


def chunk_table(arrays: Path, fetch: Fetch = lambda ranges: None) -> dict[str, Chunks]:
    """Return the arrays of a checkpoint by path, except for those that are compressed."""
    ranges: dict[str, dict[str, Range]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for key, found in _values(arrays, fetch):
        path, _, name = key.rpartition("/")
        if name == ".zarray":
            kinds[path] = json.loads(bytes(_content(arrays, found, fetch)))
        else:
            ranges.setdefault(path, {})[name] = found
    plain = {path: kind for path, kind in kinds.items() if _is_plain(kind)}
    return {
        path: Chunks(tuple(kind["shape"]), np.dtype(kind["dtype"]), tuple(kind["chunks"]), ranges.get(path, {}))
        for path, kind in plain.items()
    }


def _is_plain(kind: Mapping[str, Any]) -> bool:
    """Return True for chunks that are stored as the bytes of their elements, in the order of C."""
    rule = (kind["zarr_format"], kind["compressor"], kind["filters"], kind["order"])
    return rule == (2, None, None, "C") and kind.get("dimension_separator", ".") == "."


def _values(arrays: Path, fetch: Fetch) -> Iterator[tuple[str, Range]]:
    """Yield all keys of the tree, and where their values are."""
    base = ts.KvStore.open({"driver": "file", "path": f"{arrays}/"}).result()
    manifest: Any = ts.ocdbt.dump(base).result()
    root = manifest["versions"][-1]["root"]
    nodes = [(b"", root["location"])] if "location" in root else []
    while nodes:
        prefix, location = nodes.pop()
        fetch([_range(location)])
        node: Any = ts.ocdbt.dump(base, location).result()
        for entry in node["entries"]:
            if "location" in entry:
                nodes.append((prefix + entry["subtree_common_prefix"], entry["location"]))
            elif "inline_value" in entry:
                value: bytes = entry["inline_value"]
                yield (prefix + entry["key"]).decode(), Range("", 0, len(value), value)
            else:
                yield (prefix + entry["key"]).decode(), _range(entry["indirect_value"])


def _range(location: str) -> Range:
    """Parse "value:FOLDER/:FILE:OFFSET:SIZE", or the same without a folder."""
    _, *parts, offset, size = location.split(":")
    file = "".join(parts)
    if len(parts) > 2 or not file or {"", ".", ".."} & set(file.split("/")) or "%" in file:
        raise ValueError(f"{location!r} leads to no file of a checkpoint")
    return Range(file, int(offset), int(size))


def _content(arrays: Path, found: Range, fetch: Fetch) -> bytes | memoryview:
    if found.known is not None:
        return found.known
    fetch([found])
    with (arrays / found.file).open("rb") as file:
        file.seek(found.offset)
        return file.read(found.size)
