"""Rows of token ids, with the weight of each: columns of what `datasets` reads, or arrays of an .npz.

A weight says whether the token counts where it is the target, from 0 to 1. `weights` has them. `labels` are the ids,
and -100 where the weight is 0, as Hugging Face's models take them. `attention_mask` is 0 at padding, which is left out.
Every row is checked: same lengths, ids of the vocabulary, weights from 0 to 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.user_path import user_path
from jdp.data.held_out import content_score
from jdp.data.sources.array_files import load_arrays
from jdp.data.sources.files import PathLike, read_by_datasets
from jdp.data.sources.hub import check_columns, optional
from jdp.data.text.documents import Found, entries, name_of, pieces
from jdp.data.text.token_array import TokenArray, TokenisedPart, join_spans

MOST_IDS = 2**31  # samples are int32
IGNORED = -100  # the label of a token that does not count


@dataclass(frozen=True)
class IdColumns:
    """The names of columns or arrays; None: they are not read."""

    ids: str
    weights: str | None = None
    labels: str | None = None
    attention_mask: str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.labels is not None:
            raise UserError(
                f'weights and labels both say what counts; given "{self.weights}" and "{self.labels}": give one'
            )

    @property
    def by_key(self) -> dict[str, str]:
        """Key -> the name that is read."""
        return {key: name for key, name in vars(self).items() if name is not None}


def find_ids(source: PathLike | Sequence[PathLike]) -> Found:
    """Find the rows of ids that a source names; nothing is read."""
    words, data_sets = entries(source)
    files = sorted(map(user_path, words))
    for file in files:
        if file.suffix != ".npz":
            raise UserError(
                f"rows of ids are in .npz files, or `datasets` reads them; given {file}: {read_by_datasets(file)}"
            )
        if not file.is_file():
            raise UserError(f"data must exist; given {file}, looked for at {file.absolute()}: fix the path")
    return Found(name_of(source), tuple(files), data_sets)


def id_parts(found: Found, columns: IdColumns, vocab_size: int | None) -> Iterator[TokenisedPart]:
    """Yield all rows, some at a time. Raises ValueError for what is wrong with one."""
    rows = kept = 0
    for values, name, numbers in _values(found, columns):
        part = _Part(values, columns, name, numbers)
        tokens = part.checked(MOST_IDS if vocab_size is None else vocab_size)
        rows += len(numbers)
        if len(tokens.bounds) > 1:
            kept += len(tokens.bounds) - 1
            spans = zip(tokens.bounds[:-1].tolist(), tokens.bounds[1:].tolist(), strict=True)
            scores = [content_score(tokens.ids[start:end].astype("<u4").tobytes()) for start, end in spans]
            yield TokenisedPart(tokens, np.array(scores))
    why = "they are empty" if columns.weights is columns.labels is None else "no token of theirs counts as a target"
    if not kept:
        raise UserError(f"there must be rows to learn; given {found.name}, {rows:,} rows: {why}; give others")
    if kept < rows:
        notice(f"{found.name}: {rows - kept:,} of {rows:,} rows are left out: {why}")


Lists = tuple[NDArray[Any], NDArray[np.int64]]
"""Values of some rows end to end, and where each row begins, with the end of the last."""


def _values(found: Found, columns: IdColumns) -> Iterator[tuple[dict[str, Lists], str, Sequence[int]]]:
    """Yield the values of each key, some rows at a time, with a name and the rows' numbers."""
    for path in found.files:
        arrays = load_arrays(path)
        check_columns(str(path), list(arrays), columns.by_key)
        values = {key: _lists_of_array(arrays[name], name, path) for key, name in columns.by_key.items()}
        yield values, str(path), range(len(values["ids"][1]) - 1)
    for rows in found.data_sets:
        check_columns(rows.name, rows.columns, columns.by_key)
        for table, numbers in pieces(rows):
            values = {key: _lists_of_column(table[name], name, rows.name) for key, name in columns.by_key.items()}
            yield values, rows.name, numbers


def _lists_of_array(array: NDArray[Any], name: str, path: Path) -> Lists:
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2):
        raise UserError(
            f"rows of ids are numbers [n] or [rows, n]; given {array.dtype} {list(array.shape)} in {name} of {path}: "
            "convert them"
        )
    rows = array if array.ndim == 2 else array[None]
    return rows.reshape(-1), np.arange(len(rows) + 1) * rows.shape[1]


def _lists_of_column(column: Any, field: str, name: str) -> Lists:
    pyarrow = optional("pyarrow", name)
    kind = column.type
    is_list = any(getattr(pyarrow.types, f"is_{each}")(kind) for each in ("list", "large_list", "fixed_size_list"))
    tests = (pyarrow.types.is_integer, pyarrow.types.is_floating, pyarrow.types.is_boolean)
    if not is_list or not any(test(kind.value_type) for test in tests):
        raise UserError(f'the column "{field}" must have a list of numbers a row; given {kind} in {name}: convert it')
    flat, bounds = list[Any](), [np.zeros(1, np.int64)]
    for chunk in column.cast(pyarrow.large_list(kind.value_type)).chunks:
        offsets = chunk.offsets.to_numpy()
        inside = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
        if chunk.null_count or inside.null_count:
            raise UserError(f'the column "{field}" must have a list a row; given nothing (null) in {name}: fix it')
        flat.append(inside.to_numpy(zero_copy_only=False))
        bounds.append(offsets[1:] - offsets[0] + bounds[-1][-1])
    return np.concatenate(flat) if flat else np.zeros(0, np.int64), np.concatenate(bounds).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows that are to be checked."""

    values: Mapping[str, Lists]  # by key
    columns: IdColumns
    name: str
    numbers: Sequence[int]  # of the rows

    def checked(self, limit: int) -> TokenArray:
        """Return the rows that have something to learn, without padding."""
        ids, bounds = self.values["ids"]
        for key, (_, others) in self.values.items():
            if not np.array_equal(others, bounds):
                self._refuse_length(key, np.diff(bounds), np.diff(others))
        whole = ids.dtype.kind in "iu"
        wrong = ~((ids >= 0) & (ids < limit)) if whole else np.ones(len(ids), bool)
        self._refuse("ids", wrong, f"whole numbers from 0 to {limit - 1}, below vocab_size {limit}")
        weights = self._weights()
        tokens = TokenArray(ids.astype(np.int64, copy=False), bounds, weights)
        if "attention_mask" in self.values:
            tokens = self._without_padding(tokens)
        counted = np.concatenate([[0], np.cumsum(np.ones(len(tokens.ids)) if weights is None else tokens.weights > 0)])
        starts, ends = tokens.bounds[:-1], tokens.bounds[1:]
        first = 0 if weights is None else 1  # a row's first token is no target of its own row
        learnt = counted[ends] > counted[np.minimum(starts + first, ends)]
        return join_spans(tokens, np.stack([starts, ends], axis=1)[learnt], None)

    def _weights(self) -> NDArray[np.float32] | None:
        ids = self.values["ids"][0]
        if "labels" in self.values:
            labels = self.values["labels"][0]
            rule = f"the ids, or {IGNORED} where a token does not count (labels that were shifted are not)"
            self._refuse("labels", (labels != IGNORED) & (labels != ids), rule)
            return (labels != IGNORED).astype(np.float32)
        if "weights" in self.values:
            weights = self.values["weights"][0]
            self._refuse("weights", ~((weights >= 0) & (weights <= 1)), "numbers from 0 to 1")  # false for NaN
            return weights.astype(np.float32)
        return None

    def _without_padding(self, tokens: TokenArray) -> TokenArray:
        """Leave out the tokens whose mask is 0, which are at the ends of rows."""
        mask, bounds = self.values["attention_mask"]
        self._refuse("attention_mask", (mask != 0) & (mask != 1), "0 or 1")
        there = mask != 0
        begins = there & ~np.concatenate([[False], there[:-1]])
        begins[bounds[:-1][bounds[:-1] < len(there)]] = there[bounds[:-1][bounds[:-1] < len(there)]]
        count = np.concatenate([[0], np.cumsum(begins)])
        again = np.repeat(count[bounds[1:]] - count[bounds[:-1]] > 1, np.diff(bounds))
        self._refuse("attention_mask", again & ~there, "1 in one stretch of a row, as padding is at its ends")
        kept = np.concatenate([[0], np.cumsum(there)])
        weights = None if tokens.weights is None else tokens.weights[there]
        return TokenArray(tokens.ids[there], kept[bounds], weights)

    def _refuse(self, key: str, wrong: NDArray[np.bool_], rule: str) -> None:
        if wrong.any():
            at = int(np.argmax(wrong))
            row, token = self._place(at)
            value = self.values[key][0][at]
            raise UserError(
                f'{key} = "{self.columns.by_key[key]}" must be {rule}; given {value} as token {token} of {self.name}, '
                f"row {row}: fix it"
            )

    def _refuse_length(self, key: str, sizes: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        if len(sizes) != len(others):
            where, given = self.name, f"{len(sizes)} rows and {len(others)}"
        else:
            row = int(np.argmax(sizes != others))
            where, given = f"{self.name}, row {self.numbers[row]}", f"{sizes[row]} and {others[row]}"
        raise UserError(
            f'ids = "{self.columns.ids}" and {key} = "{self.columns.by_key[key]}" must be of the same lengths; given '
            f"{given} in {where}: fix it"
        )

    def _place(self, at: int) -> tuple[int, int]:
        bounds = self.values["ids"][1]
        row = int(np.searchsorted(bounds, at, side="right")) - 1
        return self.numbers[row], at - int(bounds[row])
