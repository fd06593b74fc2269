"""TOML: write values and keys, shorten them for messages, and parse within limits.

Values are shortened because a message must not repeat ten megabytes of input.
"""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from jdp.base.errors import UserError


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it: text, a number, true or false, or an array or inline table of these."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic string, and JSON's
        case list() | tuple():
            return f"[{', '.join(map(toml_value, cast('list[Any]', value)))}]"
        case Mapping():
            return f"{{{', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)


def toml_key(key: str) -> str:
    """Return a key as TOML writes it: bare, or in quotes if it has characters that a bare key may not have."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


LONGEST = 100
"""Characters of a value that a message repeats."""
_ENTRIES, _UNCUT = 3, 10
"""Entries shown of a long array or table; up to `_UNCUT` entries are shown in full."""


def brief(value: Any) -> str:
    """Return a value as TOML writes it, shortened for a message: long text is cut, long arrays have three entries."""
    match value:
        case str():
            return toml_value(value) if len(value) <= LONGEST else f"{toml_value(value[:60])} … {_length(value)}"
        case list() | tuple():
            return f"[{_joined(value, brief)}]"
        case Mapping():
            return f"{{{_joined(value, lambda key: f'{shown_key(str(key))} = {brief(value[key])}')}}}"
        case int() if value.bit_length() > 64:
            return f"{'-' * (value < 0)}2**{value.bit_length() - 1} or more"
        case _:
            return cut(toml_value(value))


def described(value: Any) -> str:
    """Describe a Python value in a few words: numbers and text as they are, anything larger by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return cut(repr(value))
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "__code__"):
        return f"the function {value.__name__}"
    if hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple):
        return f"an array {value.dtype}{list(value.shape)}"
    if type(value) is tuple:
        return f"a tuple ({_joined(value, lambda entry: type(entry).__name__)})"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def shown_key(key: str) -> str:
    """Return a key for a message: unchanged if it is short and printable, else quoted and cut."""
    return key if len(key) <= LONGEST and key.isprintable() and key.strip() else brief(key)


def cut(text: str, most: int = LONGEST) -> str:
    """Return text without its middle if it is longer than about `most` characters."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {_length(text)} … {text[-most // 3 :]}"


def _joined(entries: Collection[Any], show: Callable[[Any], str]) -> str:
    first = [*entries] if len(entries) <= _UNCUT else [*entries][:_ENTRIES]
    rest = len(entries) - len(first)
    return ", ".join(map(show, first)) + (f", … and {rest:,} more" if rest else "")


def _length(text: str) -> str:
    return f"({len(text):,} characters)"


DEEPEST = 16
"""Levels of tables and arrays that may be nested; an experiment has four."""
_TOO_DEEP = f"is nested too deeply: tables and arrays may be nested {DEEPEST} levels deep; an experiment needs 4"


def parse(text: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise UserError(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"is not valid TOML: {cut(str(error), 200)}") from None
    except ValueError:  # Python's own: it reads no number of more than 4300 digits
        raise UserError("is not valid TOML: it has a whole number beyond 64 bits") from None
    check(table)
    return table


def check(table: Mapping[str, Any]) -> None:
    """Check the limits of a table that did not come from `parse`."""
    remaining: list[tuple[Any, tuple[str, ...]]] = [(table, ())]
    while remaining:
        value, path = remaining.pop()
        if len(path) > DEEPEST:
            raise UserError(_TOO_DEEP)
        if isinstance(value, Mapping):
            remaining += [(inner, (*path, str(key))) for key, inner in cast("Mapping[Any, Any]", value).items()]
        elif isinstance(value, list | tuple):
            remaining += [(inner, (*path, "")) for inner in cast("list[Any]", value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            key = ".".join(shown_key(name) for name in path if name)
            raise UserError(f"has a whole number beyond 64 bits, which TOML does not allow: {key} = {brief(value)}")
