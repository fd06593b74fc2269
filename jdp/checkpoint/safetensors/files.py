"""Files of tensors. The `safetensors` package reads and checks one file; this module writes, shards and indexes them.

A file is the length of its header in eight bytes, the header in JSON, and the tensors without gaps. A large model is
several files and an index, as in Hugging Face's libraries. jdp's files have "jdp" in their metadata; other shards and
indexes are neither replaced nor removed. Anyone may have written an index, so its names must stay in its folder.
"""

import functools
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jdp.base.machine import portions
from jdp.base.user_path import check_regular
from jdp.checkpoint.errors import CheckpointError, write_error

SUFFIX = ".safetensors"
_INDEX = ".index.json"
_MARK = "jdp"
# "pt" marks the layout of kernels as PyTorch's; Hugging Face's loaders refuse a file without it.
_METADATA = {"format": "pt", _MARK: "1"}
_METADATA_NAME = "__metadata__"
_AGAIN = "Copy or download it again."
_ROWS = 1024  # rows in memory at a time, if all of a tensor is read
# Eight-bit floats are left out: in files they are quantised weights, whose scales no layer of jdp applies.
_CODES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_KINDS = ("f8", "f4", "f2", ml_dtypes.bfloat16, "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")
_DTYPES: dict[str, np.dtype[Any]] = {code: np.dtype(kind) for code, kind in zip(_CODES, _KINDS, strict=True)}
_CODE_OF = {dtype: code for code, dtype in _DTYPES.items()}

Specs = Mapping[str, jax.ShapeDtypeStruct]
"""Name in the file -> shape and dtype."""


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file; any slice can be read separately."""

    file: Path
    name: str
    source: Any  # the package's slice of the file
    rows: int | None = None  # if more than in the file, the other rows are their mean; None: those of the file

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file, with the added rows."""
        shape = tuple(self.source.get_shape())
        return shape if self.rows is None else (self.rows, *shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        code = str(self.source.get_dtype())
        if code not in _DTYPES:
            raise CheckpointError(
                f"Tensors of {', '.join(_CODES)} can be read; {self.file} has {self.name} as {code}. Convert it, for "
                "example to BF16."
            )
        return _DTYPES[code]

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read only the values in `index`, one slice with both bounds for each dim; return a copy."""
        if self.rows is None:
            shape = tuple(dim.stop - dim.start for dim in index)
            return np.zeros(shape, self.dtype) if 0 in shape else self.source[tuple(index)]
        (rows, columns), own = index, replace(self, rows=None)
        kept = own.read([slice(*(min(end, own.shape[0]) for end in (rows.start, rows.stop))), columns])
        mean = np.broadcast_to(self._mean[columns], (rows.stop - rows.start - len(kept), kept.shape[1]))
        return np.concatenate([kept, mean.astype(kept.dtype)])

    @functools.cached_property
    def _mean(self) -> np.ndarray:
        own = replace(self, rows=None)
        return np.sum([rows.astype(np.float64).sum(0) for rows in in_rows(own)], axis=0) / own.shape[0]


def in_rows(stored: Stored) -> Iterator[np.ndarray]:
    """Yield the values of a tensor, some rows at a time."""
    rows, *others = stored.shape
    for start in range(0, rows, _ROWS):
        yield stored.read([slice(start, min(start + _ROWS, rows)), *(slice(0, size) for size in others)])


def check_writable(specs: Specs) -> None:
    if _METADATA_NAME in specs:
        raise CheckpointError(f"A file reserves the name {_METADATA_NAME}; a tensor has it. Rename the tensor.")
    for name, spec in specs.items():
        if spec.dtype not in _CODE_OF:
            fix = "Pass dtype=jnp.float32." if jnp.issubdtype(spec.dtype, jnp.floating) else "Cast it, or leave it out."
            raise CheckpointError(f"Tensors of {', '.join(_CODES)} can be written; {name} is {spec.dtype}. {fix}")


def write(path: Path, specs: Specs, value: Callable[[str], np.ndarray], limit: int, version: str) -> None:
    """Write tensors to `path`, or to shards and an index if they take more than `limit` bytes together."""
    shards, index = _shards(path, specs, limit), _index_path(path)
    metadata = {"total_size": sum(map(_bytes, specs.values())), _MARK: version}
    weight_map = {name: file.name for file, shard in shards.items() for name in shard}
    files = [*shards] if len(shards) == 1 else [*shards, index]
    stale = _superseded(path, files)
    fresh = {file: file.with_name(f".{file.name}.new") for file in files}
    try:
        for new in fresh.values():
            new.unlink(missing_ok=True)  # left by a process that was killed
        for file, shard in shards.items():
            _write_one(fresh[file], shard, value)
        if index in fresh:
            table = {"metadata": metadata, "weight_map": weight_map}
            fresh[index].write_text(json.dumps(table, indent=2), encoding="utf-8")
    except BaseException:
        for new in fresh.values():
            new.unlink(missing_ok=True)
        raise
    if index in fresh:
        index.unlink(missing_ok=True)  # no index may list a mix of two exports
    for file, new in fresh.items():
        new.replace(file)
    for file in stale:
        file.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Stored]:
    """Open a file, or all files that an index lists, and return its tensors by name."""
    path = path / f"model{SUFFIX}" if path.is_dir() else path
    index = path if path.name.endswith(_INDEX) else _index_path(path)
    if path != index and path.is_file():
        return _open(path)
    if not index.is_file():
        raise CheckpointError(f"{path} does not exist, nor {index.name} beside it. Export or download it again.")
    _, listed = _read_index(index)
    tensors: dict[str, Stored] = {}
    for name in sorted({*listed.values()}):
        file = index.with_name(name)
        if not file.is_file():
            raise CheckpointError(f"{file} is listed in {index.name} but does not exist. {_AGAIN}")
        held = _open(file)
        for tensor in (tensor for tensor, in_file in listed.items() if in_file == name):
            if tensor not in held:
                raise CheckpointError(f"{index} lists {tensor} in {name}, which does not hold it. {_AGAIN}")
            tensors[tensor] = held[tensor]
    return tensors


def _bytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize


def _shards(path: Path, specs: Specs, limit: int) -> dict[Path, Specs]:
    """Split the tensors into files of at most `limit` bytes, in order; a larger tensor gets its own file."""
    groups = list(portions(specs, lambda name: _bytes(specs[name]), limit))
    if len(groups) < 2:
        return {path: specs}
    count = len(groups)
    return {
        path.with_stem(f"{path.stem}-{i:05}-of-{count:05}"): {name: specs[name] for name in group}
        for i, group in enumerate(groups, 1)
    }


def _write_one(file: Path, specs: Specs, value: Callable[[str], np.ndarray]) -> None:
    """Write a file, one tensor at a time: the package would need all at once."""
    header, offsets, end = dict[str, Any]({_METADATA_NAME: _METADATA}), dict[str, int](), 0
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):  # aligned
        offsets[name], start, end = end, end, end + _bytes(spec)
        header[name] = {"dtype": _CODE_OF[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, spec in specs.items():
            array = np.ascontiguousarray(value(name))
            assert (array.dtype, array.size) == (spec.dtype, spec.size), name
            out.seek(8 + len(text) + offsets[name])
            out.write(array.reshape(-1).view(np.uint8).data)
            del array  # before the next one is gathered


def _superseded(path: Path, files: Sequence[Path]) -> list[Path]:
    """Return files of an earlier export to `path`, to delete once `files` are written."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder. Name a file in it: {path.name}/model{SUFFIX}.")
    index, stale = _index_path(path), [path]
    number = "[0-9]" * 5
    shards = path.parent.glob(f"{glob.escape(path.stem)}-{number}-of-{number}{SUFFIX}")
    for file in filter(os.path.lexists, (index, *sorted(shards))):
        if _is_own(file):
            stale.append(file)
        elif file == index or file in files:
            raise CheckpointError(
                f"jdp replaces only files that it wrote; it did not write {file}. Export to another folder, or move "
                "the file."
            )
    return [file for file in stale if file not in files]


def _is_own(file: Path) -> bool:
    if file.is_symlink():
        return False
    try:
        is_index = file.name.endswith(_INDEX)
        return _MARK in (_read_index(file)[0] if is_index else safe_open(file, framework="numpy").metadata() or {})
    except (CheckpointError, OSError, SafetensorError):
        return False


def _open(file: Path) -> dict[str, Stored]:
    try:
        source = safe_open(file, framework="numpy")
        return {name: Stored(file, name, source.get_slice(name)) for name in source.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")[:200]
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {reason}. {_AGAIN}") from error


def _read_index(index: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the metadata of an index, and tensor name -> file name in its folder."""
    table = read_json(index)
    listed: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f'{index} is damaged: it has no table "weight_map" of tensors and files. {_AGAIN}')
    for tensor, name in listed.items():
        if not isinstance(name, str) or not name.endswith(SUFFIX) or name != Path(name).name or "\0" in name:
            raise CheckpointError(
                f"{index} must list files NAME{SUFFIX} in its own folder; {str(tensor)[:100]} is in {str(name)[:100]!r}"
                ". Copy or download both again."
            )
    metadata = table.get("metadata")
    return metadata if isinstance(metadata, dict) else {}, listed


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


# JSON files beside them.


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file."""
    try:
        if file.exists():
            check_regular(file)
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: it is not JSON ({str(error)[:100]}). Copy or download it again."
        ) from error


def write_json(file: Path, keys: Mapping[str, Any]) -> None:
    try:
        file.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise write_error(f"{file} was not written", error) from error
