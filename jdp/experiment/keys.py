"""The keys of an experiment file: the schema of each table; each key's type, default and description; its problems.

`problems` turns each error of pydantic into one line: the key, the rule, the value given, the fix. It shows at most
`ALIKE` problems of a kind in one place, and `MOST` in all.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jdp.base.toml import LONGEST, brief, cut, shown_key, toml_value
from jdp.base.user_path import PathError
from jdp.base.words import nearest
from jdp.core.sharding.strategy import strategy_hint

Path = tuple[int | str, ...]
_CALLED = {"learning_rate": "lr", "gradient_accumulation_steps": "accumulate", "max_steps": "steps", "fsdp": "strategy"}
"""Other libraries' names of keys."""
_FREE_KEYS = {"mesh": "AXIS", "rules": "PATTERN"}
"""A table with free keys is shown as one key: mesh.AXIS, rules.PATTERN."""


@dataclass(frozen=True)
class OnlyFor:
    """In a field's annotation: only some experiments read the key; in all others it must have its default.

    A key's help ends with "For {readers}."; the message for other experiments begins "KEY is for {readers}{instead}".
    """

    readers: str
    is_read: Callable[[Any], object]  # returns whether an experiment reads the key
    instead: str = ""  # may contain fields of the experiment, such as {x.kind}


@dataclass(frozen=True)
class Schemas:
    """The schemas of the whole file, of its tables, and of [model], which is None for an unknown name."""

    root: type[BaseModel]
    model: type[BaseModel] | None

    def at(self, path: Path) -> type[BaseModel] | None:
        """Return the schema of the table at `path`; None without a table, or if its keys are free as in [mesh]."""
        if not path:
            return self.root
        if path == ("model",):
            return self.model
        names, known = tuple(map(str, path)), dict(tables(self.root))
        return known.get(names) or known.get((*names[:-1], "NAME"))


def tables(root: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield the tables below `root` with their paths, in file order; [eval.NAME] is ("eval", "NAME")."""
    for name, field in root.model_fields.items():
        if below := table_class(field):
            where = (*path, name, "NAME") if typing.get_origin(field.annotation) is dict else (*path, name)
            yield where, below
            yield from tables(below, where)


@dataclass(frozen=True)
class Key:
    """A key of the file as `--help-all` shows it."""

    name: str
    type: str
    default: str
    description: str


def table_keys(schema: type[BaseModel]) -> list[Key]:
    """Return the keys of a table that are not tables, in file order, with their ranges."""
    return [
        Key(
            f"{name}.{_FREE_KEYS[name]}" if typing.get_origin(field.annotation) is dict else name,
            _type_text(field.annotation) + _range(field.metadata),
            "required" if field.is_required() else "none" if field.default is None else toml_value(field.default),
            " ".join(f"{field.description or ''}{_readers(field.metadata)}".split()),
        )
        for name, field in schema.model_fields.items()
        if not table_class(field)
    ]


def config_keys(kind: type) -> list[Key]:
    """Return the fields of a model's configuration, described by `Fields:` in its docstring."""
    hints, described = typing.get_type_hints(kind), described_fields(kind)
    return [
        Key(field.name, _type_text(hints[field.name]), "by size", described.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]


def described_fields(kind: type) -> dict[str, str]:
    """Return name -> description, from the lines `a, b: text` below `Fields:`."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("\nFields:\n")
    descriptions: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?=\w)", "\n" + text.split("\n\n")[0]):
        names, _, description = entry.partition(": ")
        names, description = names.strip().split(", "), " ".join(description.split())
        each = description.split("; ")  # "a, b: what a is; what b is"
        apart = len(each) == len(names)
        descriptions |= dict(zip(names, each, strict=True)) if apart else dict.fromkeys(names, description)
    return descriptions


def _range(rules: Iterable[Any]) -> str:
    """Return the limits of a number, such as " >= 1"."""
    flat = [inner for rule in rules for inner in (rule.metadata if isinstance(rule, FieldInfo) else [rule])]
    limits = [
        f" {sign} {getattr(rule, name)}"
        for rule in flat
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, name, None) is not None
    ]
    return "".join(limits)


def _readers(rules: Iterable[Any]) -> str:
    """Return for which experiments a key is read, as a sentence; "" for all."""
    readers = "; for ".join(rule.readers for rule in rules if isinstance(rule, OnlyFor))
    return f" For {readers}." if readers else ""


def table_class(field: FieldInfo) -> type[BaseModel] | None:
    """Return the schema of a field that is a table, or has tables by name, such as [eval.NAME]; else None."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _type_text(annotation: Any) -> str:
    """Return a type as `--help-all` shows it: int, float, text, true|false, the allowed words, "none"."""
    names = {int: "int", float: "float", str: "text", bool: "true|false", type(None): "none"}
    arguments, origin = typing.get_args(annotation), typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type_text(arguments[0]) + _range(arguments[1:])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return "|".join("table" if typing.get_origin(kind) is dict else _type_text(kind) for kind in arguments)
    if origin is tuple:
        return f"array of {_type_text(arguments[0])}"
    if origin is dict:
        return _type_text(arguments[1])
    return names.get(annotation, str(annotation))


# An experiment file's problems in plain words.

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
        if path == ("optimizer", "name"):
            hint = '; for others of optax write make = "optax:NAME" in its place, with --plugin optax'
        among = f"one of {', '.join(words)}" if len(words) > 1 else f"{words[0]}, the only choice"
        return f"{key} must be {among}; {given}{hint}"
    if kind in _LIMITS:
        name, rule = _LIMITS[kind]
        return f"{key} {rule.format(limits[name])}; {given}"
    if kind in _KINDS:
        return f"{key} must be {_KINDS[kind]}; {given}{_fix(kind, str(path[-1]), detail['input'])}"
    return f"{key}: {detail['msg'].replace('Input should', 'it should')}; {given}"


def _unknown_key(dashes: str, path: Path, schemas: Schemas) -> str:
    """Return the line of an unknown key, with the nearest key, of its table before those of other tables."""
    table, places = path[:-1], dict[str, str]()
    for name in reversed(schemas.root.model_fields):
        if other := schemas.at((name,)):
            places |= {key: f"{name}.{key}" for key in other.model_fields}
    keys = list(schema.model_fields) if (schema := schemas.at(table)) else []
    places |= {key: _dotted((*table, key)) for key in keys}
    places |= {theirs: places[key] for theirs, key in _CALLED.items() if key in places}
    near = get_close_matches(str(path[-1]).replace("-", "_")[:LONGEST], places, n=1, cutoff=0.75)
    listed = "--help lists options and keys" if dashes and not table else f"its keys are {', '.join(keys)}"
    hint = f"did you mean {dashes}{places[near[0]]}?" if near else listed
    return f"{dashes}{_dotted(path)} is not a key of {f'[{_dotted(table)}]' if table else 'the top level'}; {hint}"


def _fix(kind: str, key: str, value: Any) -> str:
    """Return the text of a fix if the given value suggests one; else ""."""
    if kind in ("model_type", "dict_type"):
        return f": set its keys one by one, as {key}.NAME"
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
    return ""


def _dotted(path: Path) -> str:
    """Return a path as text: ("model", "hidden", 1) is model.hidden[1]."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{shown_key(step)}" for step in path)
    return "".join(steps).removeprefix(".")
