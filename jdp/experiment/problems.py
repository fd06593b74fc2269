"""An experiment file's problems in plain words.

`problems` turns each error of pydantic into one line: the key, the rule, the value given, the fix. It shows at most
`ALIKE` problems of a kind in one place, and `MOST` in all.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jdp.base.toml import LONGEST, brief, cut, shown_key
from jdp.base.user_path import PathError
from jdp.base.words import nearest
from jdp.core.sharding.strategy import strategy_hint
from jdp.experiment.keys import Path, Schemas

MOST, ALIKE = 8, 3
"""Largest number of lines for a file, and for one kind of problem in one table or array."""
_WIDTH = 300
"""Largest number of characters of a message from another library."""

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
}
_PLAIN = {"int_type": r"[+-]?\d+", "float_type": r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", "bool_type": "true|false"}
"""Kinds of value written without quotes, and their texts in TOML."""
_LIMITS = {
    "greater_than": ("gt", "must be more than {}"),
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be {} or less"),
}


def problems(error: ValidationError, schemas: Schemas, from_command_line: frozenset[Path]) -> tuple[int, list[str]]:
    """Return the number of problems of an experiment, and the lines that describe them."""
    lines: list[str] = []
    count = 0
    alike: dict[tuple[Path, str], int] = {}
    for detail in error.errors(include_url=False):
        path = detail["loc"]
        if not path:  # rules between keys: one line each, which names the keys
            broken = str(detail["ctx"]["error"] if "ctx" in detail else detail["msg"]).split("\n")
            lines += [cut(line, 2 * _WIDTH) for line in broken[:MOST]]
            count += len(broken)
            continue
        count, place = count + 1, (path[:-1], detail["type"])
        alike[place] = alike.get(place, 0) + 1
        if alike[place] <= ALIKE and len(lines) < MOST:
            typed = any(path[: len(key)] == key or key[: len(path)] == path for key in from_command_line)
            lines.append(_problem("--" if typed else "", path, detail, schemas))
    return count, lines[:MOST]


def _problem(dashes: str, path: Path, detail: ErrorDetails, schemas: Schemas) -> str:
    """Return the line of one problem: the key, the rule, the value given, the fix."""
    kind, limits = detail["type"], detail.get("ctx", {})
    key, given = f"{dashes}{_dotted(path)}", f"given {brief(detail['input'])}"
    if kind == "missing":
        if table := schemas.at(path):
            needed = [f"{name} = …" for name, field in table.model_fields.items() if field.is_required()]
            return f"{key} is missing: add the table [{_dotted(path)}] with {' and '.join(needed)}"
        return f"{key} is missing: add {path[-1]} = … {f'to [{_dotted(path[:-1])}]' if path[1:] else 'at the top'}"
    if kind == "extra_forbidden":
        return _unknown_key(dashes, path, schemas)
    if kind == "value_error":
        message = cut(str(limits["error"]), _WIDTH)
        # A sentence, and a rule about a table or a path, already has the given value.
        complete = schemas.at(path) or isinstance(limits["error"], PathError) or message[:1].isupper()
        return f"{key}: {message}" if complete else f"{key} {message}; {given}"
    if kind == "literal_error":
        words = [word for position, word in enumerate(limits["expected"].split("'")) if position % 2]
        hint = nearest(detail["input"], words) if isinstance(detail["input"], str) else ""
        if path == ("strategy",):
            hint = strategy_hint(str(detail["input"]))
        among = f"one of {', '.join(words)}" if len(words) > 1 else f"{words[0]}, the only choice"
        return f"{key} must be {among}; {given}{hint}"
    if kind in _LIMITS:
        name, rule = _LIMITS[kind]
        return f"{key} {rule.format(limits[name])}; {given}"
    if kind in _KINDS:
        return f"{key} must be {_KINDS[kind]}; {given}{_fix(kind, str(path[-1]), detail['input'])}"
    return f"{key}: {detail['msg'].replace('Input should', 'it should')}; {given}"


def _unknown_key(dashes: str, path: Path, schemas: Schemas) -> str:
    """Return the line of an unknown key, with the nearest key of its table or the same key in another table."""
    table, last = path[:-1], str(path[-1])
    schema = schemas.at(table)
    keys = list(schema.model_fields) if schema else []
    prefix = f"{dashes}{_dotted(table)}." if table else dashes
    elsewhere = [
        f"{dashes}{name}.{last}"
        for name in schemas.root.model_fields
        if (other := schemas.at((name,))) and last in other.model_fields
    ]
    hint = nearest(last, keys, f"; did you mean {prefix}")
    if not hint:
        hint = f"; did you mean {elsewhere[0]}?" if elsewhere else f"; its keys are {', '.join(keys)}"
    return f"{dashes}{_dotted(path)} is not a key of {f'[{_dotted(table)}]' if table else 'the top level'}{hint}"


def _fix(kind: str, key: str, value: Any) -> str:
    """Return the text of a fix if the given value suggests one; else ""."""
    if isinstance(value, str):
        plain = value.lower() if kind == "bool_type" else value
        unquoted = len(value) <= LONGEST and re.fullmatch(_PLAIN.get(kind, r"(?!)"), plain)
        return ", which is text" + (f": write {key} = {plain}, without quotes" if unquoted else "")
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f": write {key} = {int(value)}"
    if kind == "string_type" and not isinstance(value, Mapping | list | tuple):
        return f': write {key} = "{brief(value)}", in quotes'
    if kind == "tuple_type":
        return f": write {key} = [{brief(value)}]"
    if kind == "model_type":
        return f": write [{key}], and its keys below it"
    return ""


def _dotted(path: Path) -> str:
    """Return a path as text: ("model", "hidden", 1) is model.hidden[1]."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{shown_key(step)}" for step in path)
    return "".join(steps).removeprefix(".")
