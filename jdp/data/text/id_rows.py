"""Rows of token ids and their weights: columns that `datasets` reads, or arrays of an .npz.

A weight from 0 to 1 says how much a token counts as a target. `weights` has the weights. `labels` are the ids, with
-100 for weight 0, as in Hugging Face's models. `attention_mask` is 0 for padding, which is left out.
Every row is checked: equal lengths, ids in the vocabulary, weights from 0 to 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.user_path import user_path
from jdp.data.arrays import load_arrays
from jdp.data.held_out import content_score
from jdp.data.sources import PathLike, check_columns, optional, read_by_datasets
from jdp.data.text.documents import Found, find, pieces
from jdp.data.text.tokens import TokenArray, TokenSource

MOST_IDS = 2**31  # samples are int32
IGNORED = -100  # the label of a token that does not count


def id_tokens(source: PathLike | Sequence[PathLike], columns: Mapping[str, str], vocab_size: int | None) -> TokenSource:
    """Find the rows of ids of a source. `columns` names "ids", and any of "weights", "labels", "attention_mask"."""
    if {"weights", "labels"} <= columns.keys():
        given = f'"{columns["weights"]}" and "{columns["labels"]}"'
        raise UserError(f"weights and labels both set the weights of targets; given {given}: use one")
    found = find(source, _array_files)
    identity = f"{found.identity} {columns} {vocab_size}"
    return TokenSource(found.name, found.size, identity, vocab_size, None, _parts(found, columns, vocab_size))


def _array_files(entries: Sequence[PathLike]) -> list[Path]:
    files = sorted(map(user_path, entries))
    for file in files:
        if file.suffix != ".npz" or not file.is_file():
            raise UserError(
                f"rows of ids are in .npz files that exist, or `datasets` reads them; given {file}, looked for at "
                f"{file.absolute()}: {read_by_datasets(file)}; experiments/prepare/text_to_ids.py converts text"
            )
    return files


def _parts(
    found: Found, columns: Mapping[str, str], vocab_size: int | None
) -> Iterator[tuple[TokenArray, NDArray[np.float64]]]:
    """Yield the rows with a weighted target, some at a time, with their scores."""
    rows = kept = 0
    for part in _read(found, columns):
        tokens = part.checked(MOST_IDS if vocab_size is None else vocab_size)
        rows, kept = rows + len(part.values["ids"][1]) - 1, kept + len(tokens.documents)
        contents = (tokens.ids[start:end].astype("<u4").tobytes() for start, end in tokens.documents.tolist())
        yield tokens, np.array([content_score(content) for content in contents])
    why = "none of their tokens counts as a target" if {"weights", "labels"} & columns.keys() else "they are empty"
    if not kept:
        raise UserError(f"some rows must have targets; given {found.name}, {rows:,} rows: {why}; use other rows")
    if kept < rows:
        notice(f"{found.name}: {rows - kept:,} of {rows:,} rows are left out: {why}")


Lists = tuple[NDArray[Any], NDArray[np.int64]]
"""Values of some rows end to end, and the bounds of the rows."""


def _read(found: Found, columns: Mapping[str, str]) -> Iterator["_Rows"]:
    for path in found.files:
        arrays = load_arrays(path)
        check_columns(str(path), list(arrays), columns)
        values = dict[str, Lists]()
        for key, name in columns.items():
            array = arrays[name]
            if array.dtype.kind not in "iufb" or array.ndim not in (1, 2):
                given = f"{array.dtype} {list(array.shape)} in {name} of {path}"
                raise UserError(f"rows of ids are numbers [n] or [rows, n]; given {given}: convert them")
            rows = np.atleast_2d(array)
            values[key] = rows.reshape(-1), np.arange(len(rows) + 1) * rows.shape[1]
        yield _Rows(values, columns, str(path), 0)
    for rows in found.data_sets:
        check_columns(rows.name, rows.columns, columns)
        for batch, first in pieces(rows):
            values = {key: _lists_of_column(batch[name], name, rows.name) for key, name in columns.items()}
            yield _Rows(values, columns, rows.name, first)


def _lists_of_column(column: Any, field: str, name: str) -> Lists:
    pyarrow = optional("pyarrow", name)
    types, kind = pyarrow.types, column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not (types.is_primitive(kind.value_type) and not types.is_temporal(kind.value_type)):
        raise UserError(f'the column "{field}" must have a list of numbers a row; given {kind} in {name}: convert it')
    rows = column.cast(pyarrow.large_list(kind.value_type))
    values = rows.flatten()
    if rows.null_count or values.null_count:
        raise UserError(f'the column "{field}" must have a list in each row; given null in {name}: fix it')
    sizes = rows.value_lengths().to_numpy(zero_copy_only=False)
    return values.to_numpy(zero_copy_only=False), np.cumsum([0, *sizes])


@dataclass(frozen=True, eq=False)
class _Rows:
    values: Mapping[str, Lists]  # by key
    columns: Mapping[str, str]
    name: str
    first: int  # number of the first row

    def checked(self, limit: int) -> TokenArray:
        """Return the rows with a weighted target, without padding."""
        ids, bounds = self.values["ids"]
        for key, (_, others) in self.values.items():
            if np.array_equal(others, bounds):
                continue
            sizes = zip_longest(np.diff(bounds).tolist(), np.diff(others).tolist(), fillvalue="none")
            for row, (size, other) in enumerate(sizes, self.first):
                if size != other:
                    names = f'ids = "{self.columns["ids"]}" and {key} = "{self.columns[key]}"'
                    given = f"{size} and {other} in {self.name}, row {row}"
                    raise UserError(f"{names} must be of the same lengths; given {given}: fix it")
        wrong = ~((ids >= 0) & (ids < limit)) | (ids.dtype.kind not in "iu")
        self._refuse("ids", wrong, f"whole numbers from 0 to {limit - 1}, below vocab_size {limit}")
        tokens = TokenArray(ids.astype(np.int64, copy=False), bounds, self._weights(ids))
        if "attention_mask" in self.values:
            tokens = self._without_padding(tokens)
        weighted = tokens.weights is not None  # a row's first token is not a target
        learnt = np.concatenate([[0], np.cumsum(tokens.weights > 0 if weighted else np.ones(len(tokens.ids)))])
        starts, ends = tokens.bounds[:-1], tokens.bounds[1:]
        return tokens.joined(tokens.documents[learnt[ends] > learnt[np.minimum(starts + weighted, ends)]])

    def _weights(self, ids: NDArray[Any]) -> NDArray[np.float32] | None:
        if "labels" in self.values:
            labels = self.values["labels"][0]
            rule = f"the ids, or {IGNORED} if a token does not count (do not shift labels)"
            self._refuse("labels", (labels != IGNORED) & (labels != ids), rule)
            return (labels != IGNORED).astype(np.float32)
        if "weights" in self.values:
            weights = self.values["weights"][0]
            self._refuse("weights", ~((weights >= 0) & (weights <= 1)), "numbers from 0 to 1")  # false for NaN
            return weights.astype(np.float32)
        return None

    def _without_padding(self, tokens: TokenArray) -> TokenArray:
        """Remove the tokens with mask 0, at the ends of rows."""
        mask, bounds = self.values["attention_mask"]
        self._refuse("attention_mask", (mask != 0) & (mask != 1), "0 or 1")
        content = np.flatnonzero(mask)
        row = np.searchsorted(bounds, content, side="right")
        gap = np.zeros(len(mask), bool)
        gap[content[:-1][(np.diff(content) > 1) & (np.diff(row) == 0)] + 1] = True
        self._refuse("attention_mask", gap, "1 in one stretch of a row, with padding at its ends")
        weights = None if tokens.weights is None else tokens.weights[content]
        return TokenArray(tokens.ids[content], np.searchsorted(content, bounds), weights)

    def _refuse(self, key: str, wrong: NDArray[np.bool_], rule: str) -> None:
        if wrong.any():
            at, bounds = int(np.argmax(wrong)), self.values["ids"][1]
            row = int(np.searchsorted(bounds, at, side="right")) - 1
            where = f"token {at - bounds[row]} of {self.name}, row {self.first + row}"
            given = self.values[key][0][at]
            raise UserError(f'{key} = "{self.columns[key]}" must be {rule}; given {given} as {where}: fix it')
