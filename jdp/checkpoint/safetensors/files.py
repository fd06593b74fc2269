"""Files of tensors: the `safetensors` package reads and writes one file; here are shards, their index, and replacing.

A large model is several files and an index, as Hugging Face's libraries have it: `model-00001-of-00003.safetensors`,
..., `model.safetensors.index.json` with {"metadata": {"total_size"}, "weight_map": {name: file}}. An index of jdp has
"jdp" in its metadata. An index may be written by anyone: the names in it must stay in its folder. A shard is only
replaced or removed if an index of jdp lists it, and its tensors are those listed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from jdp.checkpoint.errors import CheckpointError

SUFFIX = ".safetensors"
_INDEX = ".index.json"
_MARK = "jdp"
# "pt" marks the layout of kernels as PyTorch's; Hugging Face's loaders refuse a file without it. No more entries: the
# package writes several in random order, and equal weights should be equal files.
_METADATA = {"format": "pt"}
_AGAIN = "Copy or download it again."
# Eight-bit floats are left out: in files they are quantised weights, whose scales no layer of jdp applies.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
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


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file, of which any slice can be read by itself."""

    file: Path
    name: str
    source: Any
    """The package's slice of the file."""

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        code = str(self.source.get_dtype())
        if code not in _DTYPES:
            raise CheckpointError(
                f"Tensors of {', '.join(_DTYPES)} can be read; {self.file} has {self.name} as {code}. Convert it to "
                "one of these, such as BF16."
            )
        return Spec(tuple(self.source.get_shape()), _DTYPES[code])

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read the values in `index`, one slice with both bounds for each dim, and no others; return a copy."""
        shape = tuple(dim.stop - dim.start for dim in index)
        return np.zeros(shape, self.spec.dtype) if 0 in shape else self.source[tuple(index)]


def write(
    path: Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray], limit: int, version: str
) -> list[Path]:
    """Write tensors to `path`, or to shards and an index if they take more than `limit` bytes together."""
    for name, spec in specs.items():
        if spec.dtype not in _DTYPES.values():
            raise CheckpointError(
                f"Tensors of {', '.join(_DTYPES)} can be written; {name} is {spec.dtype}. Pass dtype=jnp.float32."
            )
    shards = _shards(specs, limit)
    count, index = len(shards), _index_path(path)
    files = [path] if count == 1 else [_shard_path(path, i + 1, count) for i in range(count)]
    stale = _superseded(path, files)
    new_files = {file.with_name(f".{file.name}.new"): file for file in (files if count == 1 else [*files, index])}
    try:
        for new, shard in zip(new_files, shards, strict=False):
            new.unlink(missing_ok=True)  # left by a process that was killed
            _write_one(new, shard, value)
        if count > 1:
            _write_index([*new_files][-1], files, shards, version)
    except BaseException:
        for new in new_files:
            new.unlink(missing_ok=True)
        raise
    if count > 1 and index.exists():
        index.replace(_old_index(index))  # while shards may be of two exports, no index lists them
    for new, file in new_files.items():
        new.replace(file)
    for file in stale:
        file.unlink(missing_ok=True)
    return files


def read(path: Path) -> dict[str, Stored]:
    """Open a file, or all files that an index lists, and return its tensors by name."""
    path = path / f"model{SUFFIX}" if path.is_dir() else path
    index = path if path.name.endswith(_INDEX) else _index_path(path)
    if path != index and path.is_file():
        return _open(path)
    if not index.is_file():
        raise CheckpointError(f"{path} does not exist, nor {index.name} beside it.")
    _, listed = _read_index(index)
    tensors: dict[str, Stored] = {}
    for name in sorted({*listed.values()}):
        file = index.with_name(name)
        if not file.is_file():
            raise CheckpointError(f"{file} is listed in {index.name} and does not exist. {_AGAIN}")
        for tensor, stored in _open(file).items():
            if listed.get(tensor, name) != name:
                continue  # the index takes it from another file
            if tensor in tensors:
                raise CheckpointError(
                    f"{file} holds {tensor} as another file does; {index.name} lists neither. {_AGAIN}"
                )
            tensors[tensor] = stored
    for tensor, name in listed.items():
        if tensor not in tensors:
            raise CheckpointError(f"{index} lists {tensor} in {name}, which does not hold it. {_AGAIN}")
    return tensors


def _shards(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    """Split the tensors into files of at most `limit` bytes, in order; a larger tensor has a file of its own."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.bytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.bytes
    return shards


def _write_one(file: Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray]) -> None:
    """Write a file of zeros with the package, then overwrite each tensor's zeros with its values.

    The package takes all tensors of a file at once; this way one at a time is in memory. All share the same zeros,
    which take none: the system backs pages that were never written to with a single one.
    """
    zeros = np.zeros(max((spec.bytes for spec in specs.values()), default=0), np.uint8)
    start = zeros.ctypes.data
    layout = {
        name: TensorSpec(dtype=spec.dtype.name, shape=spec.shape, data_ptr=start, data_len=spec.bytes)
        for name, spec in specs.items()
    }
    file.touch()
    mode = file.stat().st_mode
    try:
        serialize_file(layout, file, _METADATA)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    file.chmod(mode)  # the package makes a file that its owner alone may read
    del zeros
    order = safe_open(file, framework="numpy").offset_keys()
    offsets, end = dict[str, int](), file.stat().st_size - sum(spec.bytes for spec in specs.values())
    for name in order:  # without gaps, up to the end of the file
        offsets[name] = end
        end += specs[name].bytes
    with file.open("r+b") as out:
        for name, spec in specs.items():
            array = np.ascontiguousarray(value(name))
            assert (array.dtype, array.size) == (spec.dtype, math.prod(spec.shape)), name
            out.seek(offsets[name])
            out.write(array.reshape(-1).view(np.uint8).data)
            del array  # before the next is made


def _as_os_error(error: SafetensorError) -> OSError:
    """Return the system's error, from its number in the text of the package's error."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error))


def _write_index(new: Path, files: list[Path], shards: list[dict[str, Spec]], version: str) -> None:
    weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(spec.bytes for shard in shards for spec in shard.values())
    table = {"metadata": {"total_size": total, _MARK: version}, "weight_map": weight_map}
    new.unlink(missing_ok=True)
    new.write_text(json.dumps(table, indent=2), encoding="utf-8")


def _superseded(path: Path, files: Sequence[Path]) -> list[Path]:
    """Return files of an earlier export to `path`, to delete once `files` are written."""
    index = _index_path(path)
    old = _old_index(index)  # exists if a process was killed
    own = [file for each in (index, old) if os.path.lexists(each) for file in _own_shards(each, path)]
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder. Give a file in it: {path.name}/model{SUFFIX}.")
    for file in files:
        if file != path and file not in own and os.path.lexists(file):
            raise _foreign(file)
    kept = {*files} if len(files) == 1 else {*files, index}
    stale = [file for file in dict.fromkeys((path, index, *own)) if file not in kept and os.path.lexists(file)]
    return [*stale, old]


def _own_shards(index: Path, path: Path) -> list[Path]:
    """Return the shards that hold what an index lists."""
    try:
        metadata, listed = _read_index(index)
    except CheckpointError:
        raise _foreign(index) from None
    if index.is_symlink() or _MARK not in metadata:
        raise _foreign(index)
    own: list[Path] = []
    for name in sorted({*listed.values()}):
        file = index.with_name(name)
        shard = re.fullmatch(rf"{re.escape(path.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(SUFFIX)}", name)
        if shard and file.is_file() and not file.is_symlink() and _holds(file, listed):
            own.append(file)
    return own


def _holds(file: Path, listed: Mapping[str, str]) -> bool:
    """Return True if a file holds the tensors that the index lists for it, and no others."""
    try:
        return _open(file).keys() == {tensor for tensor, name in listed.items() if name == file.name}
    except CheckpointError:
        return False


def _foreign(file: Path) -> CheckpointError:
    return CheckpointError(
        f"jdp replaces only files that it wrote; {file} is there, and jdp did not write it. Export to another folder, "
        "or move it away."
    )


def _open(file: Path) -> dict[str, Stored]:
    """Open one file and return its tensors by name."""
    try:
        source = safe_open(file, framework="numpy")
        return {name: Stored(file, name, source.get_slice(name)) for name in source.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")[:200]
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {reason}. {_AGAIN}") from error


def _read_index(index: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the metadata of an index, and tensor name -> name of a file in its folder."""
    try:
        table: Any = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged: it is not JSON ({str(error)[:100]}). {_AGAIN}") from error
    listed: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f'{index} is damaged: it has no table "weight_map" of tensors and files. {_AGAIN}')
    for tensor, name in listed.items():
        if not isinstance(name, str) or not name.endswith(SUFFIX) or name != Path(name).name or "\0" in name:
            raise CheckpointError(
                f"{index} must list files NAME{SUFFIX} of its own folder; {str(tensor)[:100]} is in {str(name)[:100]!r}"
                ". Copy or download both again."
            )
    metadata = table.get("metadata")
    return metadata if isinstance(metadata, dict) else {}, listed


def _shard_path(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


def _old_index(index: Path) -> Path:
    """Return the path of the old index while its shards are being replaced."""
    return index.with_name(f".{index.name}.old")
