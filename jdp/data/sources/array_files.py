"""NumPy arrays from memory or files, as one dict: name -> array [samples, ...].

The source is a dict (also of JAX arrays or lists), an .npz file, an .npy file or a directory of .npy files. An .npz is
read, as its format requires; an .npy is mapped into memory, and its array has the file's name. Values that no model can
train on are refused, with the array's name and the sample.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.user_path import check_regular, user_path
from jdp.data.sources.files import walk

Arrays = dict[str, NDArray[Any]]
ArraySource = str | os.PathLike[str] | Mapping[str, ArrayLike]

_CHUNK = 2**24  # bytes to check at a time


def read_arrays(source: ArraySource) -> tuple[Arrays, str]:
    """Return the arrays of a source, checked, and its name for errors."""
    if isinstance(source, Mapping):
        arrays, name = {str(key): np.asarray(value) for key, value in source.items()}, "the arrays given"
    else:
        arrays, name = _read_path(user_path(source)), str(source)
    if not arrays:
        raise UserError(
            f"data must have at least one array; given none in {name}: add arrays, such as features and labels"
        )
    _check_sizes(arrays, name)
    for key, array in arrays.items():
        _check_values(key, array, name)
    return arrays, name


def _read_path(path: Path) -> Arrays:
    if path.is_dir():
        every = [Path(folder, name) for folder, name in walk(path) if not name.startswith(".")]
        files = sorted(file for file in every if file.suffix == ".npy" and file.parent == path)
        others = len(every) - len(files)
        if not files:
            raise UserError(
                f"a directory of arrays must hold .npy files; given {path} with {others} other files: add .npy files"
            )
        if others:
            notice(f"{path}: reading {len(files)} .npy files, ignoring {others} others")
        return {file.stem: load_arrays(file)[file.stem] for file in files}
    if path.suffix not in (".npy", ".npz"):
        raise UserError(f"arrays must be in .npz or .npy files, or a directory of .npy files; given {path}: convert it")
    if not path.is_file():
        raise UserError(f"data must exist; given {path}, looked for at {path.absolute()}: fix the path")
    return load_arrays(path)


def load_arrays(path: Path) -> Arrays:
    """Return all arrays of an .npz, read; or the array of an .npy, mapped, under the file's name.

    Objects are refused, as unpickling them would run code.
    """
    try:
        check_regular(path)
        if path.suffix == ".npy":  # a plain array of the mapping avoids np.memmap's cost at each access
            return {path.stem: np.asarray(np.load(path, mmap_mode="r"))}
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile, its decompressors and NumPy raise a dozen kinds for a damaged file
        words = cut(str(error) or type(error).__name__, 300)
        raise UserError(
            f"arrays must be readable; given {path}: {words}; write the file again, with numbers only"
        ) from error


def _check_sizes(arrays: Arrays, name: str) -> None:
    sizes = {key: list(array.shape) for key, array in arrays.items()}
    shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
    if any(array.ndim == 0 for array in arrays.values()):
        raise UserError(
            f"every array must have the samples as its leading dimension; given {shown} in {name}: leave out "
            "single numbers"
        )
    if len({size[0] for size in sizes.values()}) > 1:
        raise UserError(f"arrays must all have the same number of samples; given {shown} in {name}: fix them")
    if any(array.size == 0 for array in arrays.values()):
        raise UserError(f"arrays must not be empty; given {shown} in {name}: add data")


def _check_values(key: str, array: NDArray[Any], name: str) -> None:
    if array.dtype.kind not in "biuf" and not (key == "labels" and array.dtype.kind == "U"):
        raise UserError(
            f"arrays must hold numbers; given {key} of dtype {array.dtype} in {name}: convert it to floats or "
            "whole numbers, or leave it out"
        )
    if array.dtype.kind == "f":
        limits, rule, fix = np.finfo(np.float32), "must be finite numbers of 32 bits", "fix or leave out that sample"
    elif array.dtype.kind in "iu" and not np.can_cast(array.dtype, np.int32):
        limits, rule, fix = np.iinfo(np.int32), "must fit in 32 bits, as on devices", "use smaller numbers, or floats"
    else:
        return
    step = max(1, _CHUNK // (array.nbytes // len(array)))
    for start in range(0, len(array), step):
        values = array[start : start + step]
        wrong = ~((values >= limits.min) & (values <= limits.max))  # true for NaN
        if wrong.any():
            row, *place = np.argwhere(wrong)[0]
            given = f"{values[row][tuple(place)]} in {key} of sample {start + int(row)} of {name}"
            raise UserError(f"values {rule}; given {given}: {fix}")
