"""Parse the TOML of an experiment file, within limits of nesting and of integers."""

import tomllib
from collections.abc import Mapping
from typing import Any, cast

from jdp.base.shorten import brief, cut, shown_key

DEEPEST = 16
"""Levels of tables and arrays that may be nested; an experiment has four."""


def parse(text: str) -> dict[str, Any]:
    """Parse TOML text."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not valid TOML: {cut(str(error), 200)}") from None
    except ValueError:  # Python's own: it reads no number of more than 4300 digits
        raise ValueError("is not valid TOML: it has a whole number beyond 64 bits") from None
    check(table)
    return table


def check(table: Mapping[str, Any]) -> None:
    """Check the limits of a table that did not come from `parse`."""
    remaining: list[tuple[Any, tuple[str, ...]]] = [(table, ())]
    while remaining:
        value, path = remaining.pop()
        if len(path) > DEEPEST:
            raise ValueError(_too_deep())
        if isinstance(value, Mapping):
            remaining += [(inner, (*path, str(key))) for key, inner in cast("Mapping[Any, Any]", value).items()]
        elif isinstance(value, list | tuple):
            remaining += [(inner, (*path, "")) for inner in cast("list[Any]", value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            key = ".".join(shown_key(name) for name in path if name)
            raise ValueError(f"has a whole number beyond 64 bits, which TOML has not: {key} = {brief(value)}")


def _too_deep() -> str:
    return (
        f"is nested too deeply: tables and arrays may stand in one another {DEEPEST} levels deep, an experiment has 4"
    )
