"""Classes and their numbers: names in sorted order, so every machine and every run numbers them alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_CLASSES = 10_000_000


@dataclass(frozen=True, eq=False)
class Labels:
    """What class each sample is of.

    Attributes:
      classes: the names; a class' number is its place here.
      numbers: int32 [samples], each in [0, len(classes)).
    """

    classes: tuple[str, ...]
    numbers: NDArray[np.int32]


def labels_of(values: Sequence[Any] | NDArray[Any], where: str, *, names: Sequence[str] | None = None) -> Labels:
    """Numbers for labels given as names or as whole numbers.

    Args:
      values: [samples], text or whole numbers. Text is numbered by its sorted names. Numbers stay what they are, and
        name themselves where there are no `names`: 0 to the largest, those that do not occur included.
      where: what the labels were read from, for errors.
      names: of the classes, where the source knows them.

    Raises:
      ValueError: labels that are neither, negative, or beyond `names`.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iubUO":
        raise ValueError(
            f"labels must be one class a sample, a name or a whole number, got {array.dtype} {list(array.shape)} in "
            f'{where}: give class numbers (and numbers to predict under another name than "labels")'
        )
    if array.dtype.kind in "UO":
        return _named(array, where, names)
    if (bad := _first(array < 0)) is not None:
        raise ValueError(
            f"a class number counts from 0, got {array[bad]} for sample {bad} of {where}: leave unlabelled samples out"
        )
    most = int(array.max(initial=0))
    if names is not None and most >= len(names):
        bad = int(np.argmax(array >= len(names)))
        raise ValueError(
            f"a class number must be below the number of classes, {len(names)}, got {array[bad]} for sample {bad} of "
            f"{where}: mend it"
        )
    if names is None and most >= MOST_CLASSES:
        bad = int(np.argmax(array))
        raise ValueError(
            f"class numbers count from 0 without large gaps, up to {MOST_CLASSES:,}, got {most} for sample {bad} of "
            f"{where}: number the classes anew"
        )
    return Labels(tuple(names) if names is not None else tuple(map(str, range(most + 1))), array.astype(np.int32))


def _named(array: NDArray[Any], where: str, names: Sequence[str] | None) -> Labels:
    if (bad := _first(np.array([not isinstance(value, str) for value in array], bool))) is not None:
        raise ValueError(
            f"labels must all be names, or all whole numbers, got {array[bad]!r} for sample {bad} of {where}: mend it, "
            "or leave that sample out"
        )
    classes = tuple(sorted({str(value) for value in array})) if names is None else tuple(names)
    place = {name: number for number, name in enumerate(classes)}
    numbers = np.array([place.get(str(value), -1) for value in array], np.int32)
    if (bad := _first(numbers < 0)) is not None:
        raise ValueError(
            f"a label must be one of the {len(classes)} classes ({', '.join(classes[:10])}{', …' * (len(classes) > 10)}"
            f"), got {str(array[bad])!r} for sample {bad} of {where}: mend it, or leave that sample out"
        )
    return Labels(classes, numbers)


def _first(wrong: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None
