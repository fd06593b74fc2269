"""An experiment file's problems and keys in plain words.

`problems` turns what pydantic found into one line for each: the key, the rule, the value given, the fix; of many alike
it shows three, of many `MOST`. `table_keys` and `config_keys` list keys with type, default and description, for
`jdp train --help`.
"""

import dataclasses
import difflib
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jdp.toml import LONGEST, brief, cut, shown_key, toml_value
from jdp.user_path import PathError

MOST, ALIKE = 8, 3
"""Lines for all problems of a file, and for problems of one kind in one table or array."""
_WIDTH = 300
"""Characters of a line that somebody else worded."""

Path = tuple[int | str, ...]

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
}
_LIMITS = {
    "greater_than": ("gt", "must be more than {}"),
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be {} or less"),
}


def nearest(word: str, words: Iterable[str], before: str = "; did you mean ", cutoff: float = 0.5) -> str:
    """A hint naming the word of `words` nearest to `word`; empty when none is near."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return f"{before}{found[0]}?" if found else ""


def problems(error: ValidationError, schemas: "Schemas", from_command_line: frozenset[Path]) -> tuple[int, list[str]]:
    """How many things are wrong, and a line for each of the first: `ALIKE` of a kind in one place, `MOST` in all.

    Args:
        error: what validation found.
        schemas: which model describes which table.
        from_command_line: the keys given as `--a.b value`, which are shown that way.
    """
    lines: list[str] = []
    count = 0
    alike: dict[tuple[Path, str], int] = {}
    for detail in error.errors(include_url=False):
        path = detail["loc"]
        if not path:  # rules between keys: one line each, naming the keys themselves
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


@dataclass(frozen=True)
class Schemas:
    """The model of the whole file, and the one its [model] table was held against (which depends on the size)."""

    root: type[BaseModel]
    model: type[BaseModel] | None

    def at(self, path: Path) -> type[BaseModel] | None:
        """The model of the table at `path`; None where keys are free, as in [mesh]."""
        if not path:
            return self.root
        if path == ("model",):
            return self.model
        outer, last = self.at(path[:-1]), str(path[-1])
        if outer is not None:
            field = outer.model_fields.get(last)
            return _table_class(field) if field else None
        named = self.at(path[:-2]) if path[1:] else None  # [eval.NAME]: a table of tables
        field = named.model_fields.get(str(path[-2])) if named else None
        return _named_table(field) if field else None

    def tables(self) -> list[tuple[tuple[str, ...], type[BaseModel]]]:
        """The tables below the root, with their paths, in file order; a table of tables as ("eval", "NAME")."""
        return list(self._below((), self.root))

    def _below(
        self, path: tuple[str, ...], table: type[BaseModel]
    ) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
        for name, field in table.model_fields.items():
            inner, named = _table_class(field), _named_table(field)
            found = ((*path, name), inner) if inner else ((*path, name, "NAME"), named) if named else None
            if found:
                yield found
                yield from self._below(*found)


def _problem(dashes: str, path: Path, detail: ErrorDetails, schemas: Schemas) -> str:
    """The key, the rule, the value given, the fix."""
    kind, limits = detail["type"], detail.get("ctx", {})
    key, given = f"{dashes}{_dotted(path)}", f"given {brief(detail['input'])}"
    if kind == "missing":
        return f"{key} is missing: {_how_to_add(path, schemas)}"
    if kind == "extra_forbidden":
        return _unknown_key(dashes, path, schemas)
    if kind == "value_error":
        said = cut(str(limits["error"]), _WIDTH)
        whole = schemas.at(path) or isinstance(limits["error"], PathError)  # it says itself what was given
        return f"{key}: {said}" if whole else f"{key} {said}; {given}"
    if kind == "literal_error":
        words = [word for position, word in enumerate(limits["expected"].split("'")) if position % 2]
        hint = nearest(detail["input"], words) if isinstance(detail["input"], str) else ""
        return f"{key} must be one of {', '.join(words)}; {given}{hint}"
    if kind in _LIMITS:
        name, rule = _LIMITS[kind]
        return f"{key} {rule.format(limits[name])}; {given}"
    if kind in _KINDS:
        return f"{key} must be {_KINDS[kind]}; {given}{_fix(kind, str(path[-1]), detail['input'])}"
    return f"{key}: {detail['msg'].replace('Input should', 'it should')}; {given}"


def _how_to_add(path: Path, schemas: Schemas) -> str:
    """What to write for a key that is required and not there."""
    table = schemas.at(path)
    if table:
        needed = [f"{name} = …" for name, field in table.model_fields.items() if field.is_required()]
        return f"add the table [{_dotted(path)}] with {' and '.join(needed)}"
    return f"add {path[-1]} = … {f'to [{_dotted(path[:-1])}]' if path[1:] else 'at the top'}"


def _unknown_key(dashes: str, path: Path, schemas: Schemas) -> str:
    """Name the nearest key of the same table, else the same key in another one."""
    table, last = path[:-1], str(path[-1])
    schema = schemas.at(table)
    here = list(schema.model_fields) if schema else []
    prefix = f"{dashes}{_dotted(table)}." if table else dashes
    elsewhere = [
        f"{dashes}{name}.{last}"
        for name in schemas.root.model_fields
        if (other := schemas.at((name,))) and last in other.model_fields
    ]
    hint = nearest(last, here, f"; did you mean {prefix}")
    if not hint:
        hint = f"; did you mean {elsewhere[0]}?" if elsewhere else f"; its keys are {', '.join(here)}"
    place = f"[{_dotted(table)}]" if table else "the top level"
    return f"{dashes}{_dotted(path)} is not a key of {place}{hint}"


def _fix(kind: str, last: str, given: Any) -> str:
    """What to write instead, when the value given makes it plain."""
    if isinstance(given, str):
        said = ", which is text"
        if kind in ("int_type", "float_type", "bool_type") and len(given) <= LONGEST:
            plain = given.lower() if kind == "bool_type" else given
            return f"{said}: write {last} = {plain}, without quotes" if _is(kind, plain) else said
        return said
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f": write {last} = {int(given)}"
    if kind == "string_type" and not isinstance(given, Mapping | list | tuple):
        return f': write {last} = "{brief(given)}", in quotes'
    if kind == "tuple_type":
        return f": write {last} = [{brief(given)}]"
    if kind == "model_type":
        return f": write [{last}], and its keys below it"
    return ""


def _is(kind: str, text: str) -> bool:
    """Whether `text`, without quotes, is a value of this kind."""
    try:
        table = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return False
    wanted = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}[kind]
    return len(table) == 1 and type(table["x"]) in wanted


def _dotted(path: Path) -> str:
    """("model", "hidden", 1) -> model.hidden[1]"""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_key(part)}" for part in path)
    return "".join(parts).removeprefix(".")


@dataclass(frozen=True)
class Key:
    """A key of the file as `--help` shows it."""

    name: str
    type: str
    default: str
    description: str


def table_keys(schema: type[BaseModel]) -> list[Key]:
    """The keys of one table that are not tables themselves, in file order, with their ranges."""
    return [
        Key(_shown_name(name, field), _type_of(field), _default(field), " ".join((field.description or "").split()))
        for name, field in schema.model_fields.items()
        if not _table_class(field) and not _named_table(field)
    ]


def config_keys(kind: type) -> list[Key]:
    """The fields of a model's configuration; descriptions from its docstring's `Fields:`, defaults by size."""
    hints, described = typing.get_type_hints(kind), _described_fields(kind)
    return [
        Key(field.name, _type_text(hints[field.name]), "by size", described.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]


def _described_fields(kind: type) -> dict[str, str]:
    """name -> description, from lines `a, b: text` and their deeper indented continuations."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("\nFields:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?=\w)", "\n" + text.split("\n\n")[0]):
        names, _, description = entry.partition(": ")
        names, description = names.strip().split(", "), " ".join(description.split())
        each = description.split("; ")  # "a, b: what a is; what b is"
        found |= dict(zip(names, each, strict=True)) if len(each) == len(names) else dict.fromkeys(names, description)
    return found


def _shown_name(name: str, field: FieldInfo) -> str:
    """A table of free keys is shown as one key: mesh.AXIS, rules.PATTERN."""
    free = {"mesh": "AXIS", "rules": "PATTERN"}
    return f"{name}.{free[name]}" if typing.get_origin(field.annotation) is dict else name


def _type_of(field: FieldInfo) -> str:
    return _type_text(field.annotation) + _range(field.metadata)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else toml_value(field.default)


def _range(rules: Iterable[Any]) -> str:
    """The limits a number must keep, such as " >= 1"."""
    flat = [part for rule in rules for part in (rule.metadata if isinstance(rule, FieldInfo) else [rule])]
    limits = [
        f" {sign} {getattr(rule, name)}"
        for rule in flat
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, name, None) is not None
    ]
    return "".join(limits)


def _table_class(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table (or may be left out), else None."""
    if typing.get_origin(field.annotation) is dict:
        return None
    for part in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _named_table(field: FieldInfo) -> type[BaseModel] | None:
    """The model of the tables in a field that is a table of tables, such as [eval.NAME], else None."""
    arguments = typing.get_args(field.annotation)
    inner = arguments[1] if typing.get_origin(field.annotation) is dict else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _type_text(annotation: Any) -> str:
    """int | float | text | true|false | the words that may stand there, and "none" where that is allowed."""
    names = {int: "int", float: "float", str: "text", bool: "true|false", type(None): "none"}
    arguments, origin = typing.get_args(annotation), typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type_text(arguments[0]) + _range(arguments[1:])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return "|".join(map(_type_text, arguments))
    if origin is tuple:
        return f"array of {_type_text(arguments[0])}"
    if origin is dict:
        return _type_text(arguments[1])
    return names.get(annotation, str(annotation))
