"""Classes and their numbers: names in sorted order, so that every machine and run has the same numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError

MOST_CLASSES = 10_000_000


@dataclass(frozen=True, eq=False)
class Labels:
    """The class of each sample."""

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
        return _named(array, source, names)
    limit = MOST_CLASSES if names is None else len(names)
    if (bad := _first((array < 0) | (array >= limit))) is not None:
        raise UserError(
            f"a class number must count from 0 and be below the number of classes, {limit:,}; given {array[bad]} for "
            f"sample {bad} of {source}: number the classes without gaps, and remove samples without a label"
        )
    classes = map(str, range(int(array.max(initial=0)) + 1)) if names is None else names
    return Labels(tuple(classes), array.astype(np.int32))


def _named(array: NDArray[Any], source: str, names: Sequence[str] | None) -> Labels:
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
