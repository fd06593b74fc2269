"""Columns by their usual names: what is read must be there, and what looks like ids or weights is not passed over."""

from collections.abc import Iterable, Mapping, Sequence

from jdp.base.notices import notice

_LOOKS = {
    "ids": ("input_ids", "token_ids", "ids"),
    "weights": ("loss_mask", "loss_weights", "weights", "assistant_masks", "completion_mask"),
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
}
"""Key -> the usual names of such columns."""


def check_columns(name: str, columns: Sequence[str], read: Mapping[str, str]) -> None:
    """Raise ValueError for a column that is not there, and report those that look like ids or weights and are not read.

    Args:
        name: of the source.
        columns: that it has.
        read: key -> the column that is read.
    """
    for key, column in read.items():
        if column not in columns:
            shown = ", ".join(columns[:20]) + ", …" * (len(columns) > 20)
            raise ValueError(f'{key} = "{column}" must be a column; given {name} with {shown}: {_fix(key, columns)}')
    _report_unread(name, columns, read)


def _fix(key: str, columns: Sequence[str]) -> str:
    for column in columns:
        if key == "field" and column in _LOOKS["ids"]:
            return f'write ids = "{column}" for token ids, or name a column of text'
        if column in ("messages", "conversations"):
            return "make ids of chats, by experiments/prepare/chats_to_ids.py, or name another column"
    return "name one of these"


def _report_unread(name: str, columns: Iterable[str], read: Mapping[str, str]) -> None:
    found = {column: key for key, names in _LOOKS.items() for column in columns if column in names}
    left = {column: key for column, key in found.items() if column not in read.values()}
    if left and ("ids" in read or "ids" in left.values()):
        lines = ", ".join(f'{key} = "{column}"' for column, key in left.items())
        notice(f"{name}: {', '.join(left)} {'is' if len(left) == 1 else 'are'} not read; if meant, write {lines}")
