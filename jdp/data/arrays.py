"""Arrays as samples: row i of every array is sample i, by random access, without a copy, in a device's dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.public import public
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import content_score, fingerprint, split_samples
from jdp.data.sources.array_files import Arrays, ArraySource, read_arrays

# The model's inputs identify a sample: equal features stay together, even with different labels.
NOT_CONTENT = frozenset({"labels", "targets", "weights"})
MOST_CLASSES = 10_000_000


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

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any]]:
        return {key: _sample_dtype(key, array.dtype) for key, array in self.arrays.items()}

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


_TOKENS = ("tokens", "targets")


@public()
def array_data(
    source: ArraySource,
    *,
    heldout_fraction: float = 0.05,
    heldout: ArraySource | None = None,
    features: str | None = None,
    labels: str | None = None,
    length: int | None = None,
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

    Returns:
        The data, with `train`, `heldout`, `classes`, `shape`, `fingerprint`.

    Raises:
        ValueError: a source that cannot be read, or has values that no model can train on. Labels that are not classes.
            A name without an array. Tokens that are not integers from 0 of shape [samples, length + 1]. A held-out set
            with other names or shapes.

    >>> import numpy as np
    >>> data = array_data({"x": np.eye(20), "y": np.arange(20) % 2}, features="x", labels="y", heldout_fraction=0.2)
    >>> len(data.train) + len(data.heldout), data.classes
    (20, ('0', '1'))
    """
    names = {"features": features, "labels": labels}
    arrays, name = _named(source, names, length)
    arrays, classes = _numbered(arrays, name, None)
    scores = _scores(arrays)
    given: Arrays = {}
    if heldout is None:
        train, held = (ArraySamples(arrays, rows) for rows in split_samples(scores, heldout_fraction, name))
    else:
        given, _ = _numbered(*_named(heldout, names, length), classes)
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


def check_tokens(data: ArrayData, vocab_size: int) -> None:
    """Raise ValueError, with array, sample and token, for a token that is not below `vocab_size`."""
    if data.vocab_size <= vocab_size:
        return
    for side in (data.train, data.heldout):
        for key in _TOKENS:
            if key in side.arrays and (wrong := side.arrays[key] >= vocab_size).any():
                row, column = (int(i) for i in np.argwhere(wrong)[0])
                raise UserError(
                    f"a token must be below the model's vocab_size, {vocab_size}; given "
                    f"{side.arrays[key][row, column]} in {key} of sample {row} of {data.name}: raise vocab_size "
                    f"to {data.vocab_size}, or fix the data"
                )


def _named(source: ArraySource, names: dict[str, str | None], length: int | None) -> tuple[Arrays, str]:
    arrays, name = read_arrays(source)
    for new, old in names.items():
        if old is not None and (old not in arrays or (old != new and new in arrays)):
            problem = f'no array "{old}"' if old not in arrays else f'"{new}" too'
            given = f"{problem} in {name}, which has {', '.join(arrays)}"
            raise UserError(f'{new} = "{old}" must name one of the arrays; given {given}: use one of these')
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


def _numbered(arrays: Arrays, name: str, classes: tuple[str, ...] | None) -> tuple[Arrays, tuple[str, ...]]:
    """Return the arrays with labels as numbers, and the classes; tokens are checked."""
    for key in _TOKENS:
        if key in arrays and "tokens" in arrays:
            _check_tokens(key, arrays, name)
    if "labels" not in arrays:
        return arrays, ()
    labels = labels_of(arrays["labels"], name, names=classes)
    return {**arrays, "labels": labels.numbers}, labels.classes


def _check_tokens(key: str, arrays: Arrays, name: str) -> None:
    tokens = arrays[key]
    shape = "[samples, length]" if "targets" in arrays else "[samples, length + 1]"
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or ("targets" not in arrays and tokens.shape[1] < 2):
        raise UserError(
            f"{key} must be whole numbers {shape}; given {tokens.dtype} {list(tokens.shape)} in {name}: "
            "reshape the array, or set length to cut one-dimensional tokens"
        )
    if "targets" not in arrays and "segments" in arrays:
        raise UserError(f"packed tokens, with segments, require targets; given none in {name}: add them")
    if tokens.min() < 0:
        row, column = (int(i) for i in np.argwhere(tokens < 0)[0])
        raise UserError(
            f"tokens must count from 0; given {tokens[row, column]} in {key} of sample {row} of {name}: fix it; to "
            "ignore tokens, set their weights to 0"
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
    if key in ("labels", *_TOKENS, "segments") and dtype.kind in "iu":
        return np.dtype(np.int32)
    if dtype.kind in "iu" and not np.can_cast(dtype, np.int32):
        return np.dtype(np.int32)  # reading checked that the values fit
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize > 4 else dtype.newbyteorder("=")


# Classes and their numbers: names in sorted order, so that every machine and run has the same numbers.


@dataclass(frozen=True, eq=False)
class Labels:
    classes: tuple[str, ...]  # names; a class' number is its index
    numbers: NDArray[np.int32]  # int32 [samples], each in [0, len(classes))


def labels_of(values: Sequence[Any] | NDArray[Any], source: str, *, names: Sequence[str] | None = None) -> Labels:
    """Number the classes of labels [samples] given as names or as integers.

    Text is numbered by its sorted names, or by `names`. Integers stay: without `names` the classes are named by their
    numbers, 0 to the largest. `source` is for errors.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iubUO":
        raise UserError(
            f"labels must be one class a sample, a name or a whole number; given {array.dtype} {list(array.shape)} in "
            f'{source}: use class numbers (and name numbers to predict other than "labels")'
        )
    if array.dtype.kind in "UO":
        return _named_labels(array, source, names)
    limit = MOST_CLASSES if names is None else len(names)
    if (bad := _first((array < 0) | (array >= limit))) is not None:
        raise UserError(
            f"a class number must count from 0 and be below the number of classes, {limit:,}; given {array[bad]} for "
            f"sample {bad} of {source}: number the classes without gaps, and remove samples without a label"
        )
    classes = map(str, range(int(array.max(initial=0)) + 1)) if names is None else names
    return Labels(tuple(classes), array.astype(np.int32))


def _named_labels(array: NDArray[Any], source: str, names: Sequence[str] | None) -> Labels:
    if (bad := _first(np.array([not isinstance(value, str) for value in array], bool))) is not None:
        raise UserError(
            f"labels must all be names, or all whole numbers; given {array[bad]!r} for sample {bad} of {source}: fix "
            "it, or remove that sample"
        )
    classes = tuple(sorted({str(value) for value in array})) if names is None else tuple(names)
    number_of = {name: number for number, name in enumerate(classes)}
    numbers = np.array([number_of.get(str(value), -1) for value in array], np.int32)
    if (bad := _first(numbers < 0)) is not None:
        raise UserError(
            f"a label must be one of the {len(classes)} classes ({', '.join(classes[:10])}{', …' * (len(classes) > 10)}"
            f"); given {str(array[bad])!r} for sample {bad} of {source}: fix it, or remove that sample"
        )
    return Labels(classes, numbers)


def _first(wrong: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None
