"""Arrays as samples: row i of every array is sample i, by random access, without a copy, in a device's dtype.

An .npz is read, as its format requires; an .npy is mapped into memory, and its array has the file's name. Values that
no model can train on are refused, with the array's name and the sample.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.base.errors import UserError, public
from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.user_path import check_regular, user_path
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import content_score, fingerprint, split_samples
from jdp.data.sources import walk

Arrays = dict[str, NDArray[Any]]
ArraySource = str | os.PathLike[str] | Mapping[str, ArrayLike]

# The model's inputs identify a sample: equal features stay together, even with different labels.
NOT_CONTENT = frozenset({"labels", "targets", "weights"})
_TOKENS = ("tokens", "targets")
_MOST_CLASSES = 10_000_000
_CHUNK = 2**24  # bytes to check at a time


@dataclass(frozen=True, eq=False)
class ArraySamples:
    """Rows of arrays, as a sequence of samples.

    Sample i is a dict of row rows[i] of each array: floats wider than 32 bits as float32, integers wider than int32 as
    int32. "features", "images" and "weights" are always float32, "labels" int32. Missing "weights" are 1, float32.
    "tokens" [length + 1] without "targets" become "tokens" and "targets" int32 [length], the tokens shifted by one, and
    "weights" [length].
    """

    arrays: Arrays  # name -> array [samples, ...]
    rows: NDArray[np.int64]  # int64 [len], the rows of this side

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> NumpyBatch:
        row = self.rows[index]
        sample = {key: np.asarray(a[row]).astype(self._dtypes[key], copy=False) for key, a in self.arrays.items()}
        if "tokens" in sample and "targets" not in sample:
            tokens = sample["tokens"]
            sample |= {"tokens": tokens[:-1], "targets": tokens[1:]}
        if "weights" not in sample:
            sample["weights"] = np.ones(sample["targets"].shape if "tokens" in sample else (), np.float32)
        return sample

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any]]:
        return {key: _sample_dtype(key, array.dtype) for key, array in self.arrays.items()}


@dataclass(frozen=True, eq=False)
class ArrayData:
    """Arrays split in two: `train` and `heldout` are sources for `global_batches`; `str()` is one line of text.

    Attributes:
        name: the source's name.
        train: the samples to train on.
        heldout: the samples held out.
        classes: names of the classes, if there are "labels"; else empty.
        fingerprint: 16 hex digits: equal on two machines, or before and after a resume, only if all samples are equal.
        by_content: True if a hash of the content chose the held-out rows, False if they were given.

    >>> import numpy as np
    >>> data = array_data({"features": np.eye(20, 3) + np.arange(20)[:, None]}, heldout_fraction=0.2)
    >>> data.shape, sorted(data.train[0])
    ((3,), ['features', 'weights'])
    """

    name: str
    train: ArraySamples
    heldout: ArraySamples
    classes: tuple[str, ...]
    fingerprint: str
    by_content: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of "features", "images" or "tokens" in a sample; else of its first array."""
        sample = self.train[0]
        return next(sample[key].shape for key in ("features", "images", "tokens", *sample) if key in sample)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest of "tokens" and "targets"; 0 without them."""
        sides = [side.arrays[key] for side in (self.train, self.heldout) for key in _TOKENS if key in side.arrays]
        return 1 + max((int(tokens.max()) for tokens in sides), default=-1)

    def __str__(self) -> str:
        arrays = self.train.arrays
        shown = ", ".join(f"{key} {a.dtype}{list(a.shape[1:]) if a.ndim > 1 else ''}" for key, a in arrays.items())
        return (
            f"{self.name}: {len(self.train) + len(self.heldout):,} samples of {shown}"
            f"{f'; {len(self.classes)} classes' if self.classes else ''}; train {len(self.train):,}, held out "
            f"{len(self.heldout):,} ({'by a hash of their content' if self.by_content else 'as given'})"
        )


@public()
def array_data(
    source: ArraySource,
    *,
    heldout_fraction: float = 0.05,
    heldout: ArraySource | None = None,
    features: str | None = None,
    labels: str | None = None,
    length: int | None = None,
    vocab_size: int | None = None,
) -> ArrayData:
    """Make samples from NumPy arrays with the same leading dimension.

    Args:
        source: a dict of arrays [samples, ...], an .npz file, an .npy file, or a directory of .npy files. A batch's
            arrays have the same names.
        heldout_fraction: in [0, 1), about the share of the samples to hold out, by content (without "labels", "targets"
            and "weights"). With 0 `heldout` is empty. Opening the data reads all bytes once.
        heldout: a separate held-out set, with arrays of the same names and shapes, in place of `heldout_fraction`.
        features: the array to use as "features", float32.
        labels: the array to use as "labels", int32: integers from 0, or names [samples].
        length: targets in a sample, for "tokens" [tokens] as the only array, cut without a copy. Neighbouring samples
            share one token. Tokens at the end that do not fill a sample are left out, and this is reported.
        vocab_size: the model's: "tokens" and "targets" are below it.

    Returns:
        The data, with `train`, `heldout`, `classes`, `shape`, `fingerprint`.

    Raises:
        ValueError: a source that cannot be read, or has values that no model can train on. Labels that are not classes.
            A name without an array. Tokens that are not integers in [0, vocab_size), of shape [samples, length + 1].
            A held-out set with other names or shapes.

    >>> import numpy as np
    >>> data = array_data({"x": np.eye(20), "y": np.arange(20) % 2}, features="x", labels="y", heldout_fraction=0.2)
    >>> len(data.train) + len(data.heldout), data.classes
    (20, ('0', '1'))
    """
    names = {"features": features, "labels": labels}
    arrays, name = _named(source, names, length)
    arrays, classes = _numbered(arrays, name, None, vocab_size)
    scores = _scores(arrays)
    given: Arrays = {}
    if heldout is None:
        train, held = (ArraySamples(arrays, rows) for rows in split_samples(scores, heldout_fraction, name))
    else:
        given, _ = _numbered(*_named(heldout, names, length), classes, vocab_size)
        wanted, shapes = ({key: list(array.shape[1:]) for key, array in side.items()} for side in (arrays, given))
        if wanted != shapes:
            rule = f"held-out arrays must have the names and shapes of the training arrays, {wanted} in {name}"
            raise UserError(f"{rule}; given {shapes}: fix them")
        train, held = (ArraySamples(side, np.arange(len(next(iter(side.values()))))) for side in (arrays, given))
    # The scores cover the content; add the arrays that they leave out.
    others = [side[key] for side in (arrays, given) for key in sorted(NOT_CONTENT & side.keys())]
    described = f"arrays {sorted(arrays)} {classes} {heldout is None} {heldout_fraction}"
    mark = fingerprint(described, [scores, *([_scores(given)] if given else []), *others])
    return ArrayData(name, train, held, classes, mark, by_content=heldout is None)


def read_arrays(source: ArraySource) -> tuple[Arrays, str]:
    """Return the arrays of a source, checked, and its name for errors."""
    if isinstance(source, Mapping):
        arrays, name = {str(key): np.asarray(value) for key, value in source.items()}, "the arrays given"
    else:
        arrays, name = _read_path(user_path(source)), str(source)
    counts = {len(array) if array.size and array.ndim else 0 for array in arrays.values()}
    if len(counts) != 1 or 0 in counts:
        shown = ", ".join(f"{key} {list(array.shape)}" for key, array in arrays.items()) or "none"
        raise UserError(
            f"data must have arrays of the same number of samples, their leading dimension; given {shown} in {name}: "
            "fix them, or leave out single numbers"
        )
    for key, array in arrays.items():
        _check_values(key, array, name)
    return arrays, name


def _read_path(path: Path) -> Arrays:
    if path.is_dir():
        every = [*map(Path, walk(path))]
        files = sorted(file for file in every if file.suffix == ".npy" and file.parent == path)
        if others := len(every) - len(files):
            notice(f"{path}: reading {len(files)} .npy files, ignoring {others} others")
        return {file.stem: load_arrays(file)[file.stem] for file in files}
    if path.suffix not in (".npy", ".npz") or not path.is_file():
        rule = "arrays must be in an .npz or .npy file that exists, or in a directory of .npy files"
        raise UserError(f"{rule}; given {path}, looked for at {path.absolute()}: fix the path, or convert the file")
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
        raise UserError(f"arrays must be readable; given {path}: {words}; write the file again, as numbers") from error


def _check_values(key: str, array: NDArray[Any], name: str) -> None:
    if array.dtype.kind not in "biuf" and not (key == "labels" and array.dtype.kind == "U"):
        given = f"{key} of dtype {array.dtype} in {name}"
        raise UserError(f"arrays must hold numbers; given {given}: convert it to numbers, or leave it out")
    if array.dtype.kind == "U" or np.can_cast(array.dtype, np.int32):
        return
    limits = np.finfo(np.float32) if array.dtype.kind == "f" else np.iinfo(np.int32)
    step = max(1, _CHUNK // (array.nbytes // len(array)))
    for start in range(0, len(array), step):
        values = array[start : start + step]
        wrong = ~((values >= limits.min) & (values <= limits.max))  # true for NaN
        if wrong.any():
            row, *place = np.argwhere(wrong)[0]
            given = f"{values[row][tuple(place)]} in {key} of sample {start + int(row)} of {name}"
            raise UserError(f"values must be finite and must fit in 32 bits, as on devices; given {given}: fix them")


def _named(source: ArraySource, names: dict[str, str | None], length: int | None) -> tuple[Arrays, str]:
    arrays, name = read_arrays(source)
    for new, old in names.items():
        if old is not None and (old not in arrays or (old != new and new in arrays)):
            given = f"{', '.join(arrays)} in {name}"
            raise UserError(f'{new} = "{old}" must name an array, and no other be "{new}"; given {given}: fix the name')
        arrays = {new if key == old else key: array for key, array in arrays.items()}
    if length is not None and list(arrays) == ["tokens"] and arrays["tokens"].ndim == 1:
        arrays = {"tokens": _cut(arrays["tokens"], length, name)}
    return arrays, name


def _cut(tokens: NDArray[Any], length: int, name: str) -> NDArray[Any]:
    """View [tokens] as [samples, length + 1]: the last token of a row is the first of the next."""
    if not 1 <= length < len(tokens):
        given = f"{len(tokens)} with length {length} in {name}"
        raise UserError(f"tokens must fill a sample, of length + 1 tokens; given {given}: use a smaller length")
    if left := (len(tokens) - 1) % length:
        notice(f"{name}: the last {left} of {len(tokens):,} tokens do not fill a sample of {length} and are left out")
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def _numbered(
    arrays: Arrays, name: str, classes: tuple[str, ...] | None, vocab_size: int | None
) -> tuple[Arrays, tuple[str, ...]]:
    """Return the arrays with labels as numbers, and the classes; tokens are checked."""
    for key in _TOKENS:
        if key in arrays and "tokens" in arrays:
            _check_tokens(key, arrays, name, vocab_size or 2**31)
    if "labels" not in arrays:
        return arrays, ()
    labels = labels_of(arrays["labels"], name, names=classes)
    return {**arrays, "labels": labels.numbers}, labels.classes


def _check_tokens(key: str, arrays: Arrays, name: str, vocab_size: int) -> None:
    tokens = arrays[key]
    shape = "[samples, length]" if "targets" in arrays else "[samples, length + 1]"
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or ("targets" not in arrays and tokens.shape[1] < 2):
        raise UserError(
            f"{key} must be whole numbers {shape}; given {tokens.dtype} {list(tokens.shape)} in {name}: "
            "reshape the array, or set length to cut one-dimensional tokens"
        )
    if "targets" not in arrays and "segments" in arrays:
        raise UserError(f"packed tokens, with segments, require targets; given none in {name}: add them")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        row, column = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0].tolist()
        given = f"{tokens[row, column]} in {key} of sample {row} of {name}"
        raise UserError(
            f"tokens must be from 0 to {vocab_size - 1}, below vocab_size; given {given}: fix it, or raise vocab_size "
            f"to {tokens.max() + 1}; to ignore a token, set its weight to 0"
        )


def _scores(arrays: Arrays) -> NDArray[np.float64]:
    """Return each row's score in [0, 1), from its bytes in a sample: float64 [samples]."""
    names = sorted(arrays.keys() - NOT_CONTENT) or sorted(arrays)
    chosen = [(arrays[name], _sample_dtype(name, arrays[name].dtype)) for name in names]
    rows = range(len(chosen[0][0]))
    contents = (b"".join(array[row].astype(dtype, copy=False).tobytes() for array, dtype in chosen) for row in rows)
    return np.fromiter(map(content_score, contents), np.float64, len(rows))


def _sample_dtype(key: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if key in ("features", "images", "weights"):
        return np.dtype(np.float32)
    if dtype.kind in "iu" and (key in ("labels", *_TOKENS, "segments") or not np.can_cast(dtype, np.int32)):
        return np.dtype(np.int32)  # reading checked that the values fit
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize > 4 else dtype.newbyteorder("=")


@dataclass(frozen=True, eq=False)
class Labels:
    classes: tuple[str, ...]  # names; a class' number is its index, the same on every machine
    numbers: NDArray[np.int32]  # int32 [samples], each in [0, len(classes))


def labels_of(values: Sequence[Any] | NDArray[Any], source: str, *, names: Sequence[str] | None = None) -> Labels:
    """Number the classes of labels [samples] given as names or as integers.

    Text is numbered by its sorted names, or by `names`. Integers stay: without `names` the classes are named by their
    numbers, 0 to the largest. `source` is for errors.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iubU":
        raise UserError(
            f"labels must be one class a sample, a name or a whole number; given {array.dtype} {list(array.shape)} in "
            f'{source}: use class numbers (and name numbers to predict other than "labels")'
        )
    if array.dtype.kind == "U":
        classes = tuple(sorted(set(array.tolist())) if names is None else names)
        number_of = {name: number for number, name in enumerate(classes)}
        numbers, most = np.array([number_of.get(name, -1) for name in array.tolist()]), len(classes)
        rule = f"one of the {most} classes ({', '.join(classes[:10])}{', …' * (most > 10)})"
    else:
        numbers, most = array, _MOST_CLASSES if names is None else len(names)
        classes = None if names is None else tuple(names)
        rule = f"a number from 0, below the number of classes, {most:,}"
    wrong = (numbers < 0) | (numbers >= most)
    if wrong.any():
        sample = int(np.argmax(wrong))
        given = f"{array[sample].item()!r} for sample {sample} of {source}"
        raise UserError(f"a label must be {rule}; given {given}: fix it, or remove that sample")
    if classes is None:
        classes = tuple(map(str, range(int(numbers.max(initial=0)) + 1)))
    return Labels(classes, numbers.astype(np.int32))
