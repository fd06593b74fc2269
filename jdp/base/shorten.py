"""Values and keys shortened for messages, which must not repeat ten megabytes of what was given."""

from collections.abc import Iterable, Mapping
from typing import Any

from jdp.base.toml import toml_value

LONGEST = 100
"""Characters of a value that a message repeats."""
_ENTRIES, _UNCUT = 3, 10
"""Entries shown of a long array or table; one of up to `_UNCUT` is shown in full."""


def brief(value: Any) -> str:
    """Return a value as TOML writes it, shortened for a message: long text is cut, long arrays have three entries."""
    match value:
        case str():
            return toml_value(value) if len(value) <= LONGEST else f"{toml_value(value[:60])} … {_length(value)}"
        case list() | tuple():
            return f"[{_joined(map(brief, _first(value)), len(value))}]"
        case Mapping():
            items = (f"{shown_key(str(key))} = {brief(value[key])}" for key in _first(list(value)))
            return f"{{{_joined(items, len(value))}}}"
        case int() if value.bit_length() > 64:
            return f"{'-' * (value < 0)}2**{value.bit_length() - 1} or more"
        case _:
            return cut(toml_value(value))


def described(value: Any) -> str:
    """Return what a Python value is, in a few words: a number or a text itself, of anything larger its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return cut(repr(value))
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "__code__"):
        return f"the function {value.__name__}"
    if hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple):
        return f"an array {value.dtype}{list(value.shape)}"
    if type(value) is tuple:
        return f"a tuple ({_joined((type(entry).__name__ for entry in _first(value)), len(value))})"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def shown_key(key: str) -> str:
    """Return a key for a message: as it is if it is short and printable, else in quotes and cut."""
    return key if len(key) <= LONGEST and key.isprintable() and key.strip() else brief(key)


def cut(text: str, most: int = LONGEST) -> str:
    """Return text without its middle if it is longer than about `most` characters."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {_length(text)} … {text[-most // 3 :]}"


def _first(entries: Any) -> Any:
    return entries if len(entries) <= _UNCUT else entries[:_ENTRIES]


def _joined(shown: Iterable[str], count: int) -> str:
    return ", ".join(shown) + (f", … and {count - _ENTRIES:,} more" if count > _UNCUT else "")


def _length(text: str) -> str:
    return f"({len(text):,} characters)"
