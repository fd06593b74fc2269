"""The safetensors format, written and read tensor by tensor.

A file is eight bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, first and last byte
of the data), and the data, without gaps (huggingface/safetensors, README, "Format"). The `safetensors` package writes
and reads the same files, but its `save_file` wants all tensors in memory at once, and its NumPy side has no bfloat16.

Large models are several files and an index, as Hugging Face's libraries have it: `model-00001-of-00003.safetensors`,
..., `model.safetensors.index.json` with {"metadata": {"total_size"}, "weight_map": {name: file}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jdp.checkpoint.errors import CheckpointError

SUFFIX = ".safetensors"
_INDEX = ".index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors package has it


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def write(
    path: Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray], metadata: dict[str, str], limit: int
) -> list[Path]:
    """Write tensors to `path`, or to shards and an index where they take more than `limit` bytes together.

    Args:
        path: ends with ".safetensors".
        specs: the tensors.
        value: gives a tensor's values; asked for one at a time, in order.
        metadata: of each file.
        limit: bytes of a file; a larger tensor gets a file of its own.

    Raises:
        OSError: as the system says it; no file has been half replaced.
        CheckpointError: a dtype that safetensors does not have.
    """
    for name, spec in specs.items():
        if spec.dtype not in _CODES:
            raise CheckpointError(f"{name} is {spec.dtype}, which safetensors does not have: pass dtype=jnp.float32.")
    shards = _shards(specs, limit)
    count = len(shards)
    files = [path] if count == 1 else [_shard_path(path, i + 1, count) for i in range(count)]
    superseded = set(_files_of(path)) - set(files)
    fresh = [file.with_name(f".{file.name}.new") for file in files]
    try:
        for new, shard in zip(fresh, shards, strict=True):
            _write_one(new, shard, value, metadata)
    except BaseException:
        for new in fresh:
            new.unlink(missing_ok=True)
        raise
    for new, file in zip(fresh, files, strict=True):
        new.replace(file)
    index = _index_path(path)
    if count > 1:
        held = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(spec.bytes for spec in specs.values())
        new = index.with_name(f".{index.name}.new")
        new.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": held}, indent=2), encoding="utf-8")
        new.replace(index)
    for file in superseded - ({index} if count > 1 else set[Path]()):
        file.unlink(missing_ok=True)
    return files


def read(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of all that an index lists; of a folder, those of its `model.safetensors`.

    Raises:
        CheckpointError: no such file, or it is damaged.
    """
    path = path / f"model{SUFFIX}" if path.is_dir() else path
    files = _files_of(path)
    if not files:
        raise CheckpointError(f"{path} does not exist, nor {_index_path(path).name} beside it.")
    found: dict[str, Stored] = {}
    for file in files:
        if file.name.endswith(SUFFIX):
            found |= _read_header(file)
    return found


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its values are read when they are asked for, and only those that are."""

    file: Path
    offset: int
    spec: Spec

    def view(self) -> np.ndarray:
        """The values, not yet read: pages are when they are touched. Read-only."""
        if self.spec.bytes == 0:
            return np.zeros(self.spec.shape, self.spec.dtype)
        raw = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.spec.bytes,))
        return raw.view(self.spec.dtype).reshape(self.spec.shape)


def _shards(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    """In order, as many into a file as fit."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.bytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.bytes
    return shards


def _write_one(
    file: Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray], metadata: dict[str, str]
) -> None:
    with file.open("wb") as out:
        out.write(_header(specs, metadata))
        for name, spec in specs.items():
            array = np.ascontiguousarray(value(name)).reshape(spec.shape)  # a scalar comes back with a dim
            assert array.dtype == spec.dtype, name
            out.write(array.reshape(-1).view(np.uint8).data)
            del array  # before the next is made


def _header(specs: Mapping[str, Spec], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, spec in specs.items():
        offsets = [at, at + spec.bytes]
        table[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


def _read_header(file: Path) -> dict[str, Stored]:
    damaged = f"{file} is damaged or not a safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{damaged}: {size} bytes, and a header of {length}. Copy or download it again.")
            table = json.loads(opened.read(length))
        table.pop("__metadata__", None)
        found = {name: _stored(file, 8 + length, entry) for name, entry in table.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file} is listed in its index and does not exist. Copy or download it again.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{damaged}: {error!r} in its header. Copy or download it again.") from error
    for name, tensor in found.items():
        if tensor.offset + tensor.spec.bytes > size:
            raise CheckpointError(f"{damaged}: it ends before {name} does. Copy or download it again.")
    return found


def _stored(file: Path, start: int, entry: Mapping[str, Any]) -> Stored:
    spec = Spec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    first, last = entry["data_offsets"]
    if last - first != spec.bytes:
        raise TypeError(f"{last - first} bytes for {spec}")
    return Stored(file, start + first, spec)


def _files_of(path: Path) -> list[Path]:
    """The files that there are of a model at `path`: one, or the index (last) and what it lists."""
    index = path if path.name.endswith(_INDEX) else _index_path(path)
    if path.is_file() and path != index:
        return [path]
    if not index.is_file():
        return []
    try:
        listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}. Copy or download it again.") from error
    return [index.parent / name for name in listed] + [index]


def _shard_path(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)
