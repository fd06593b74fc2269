"""The keys of an experiment file: the schema of each table, and each key's type, default and description."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jdp.base.toml import toml_value

Path = tuple[int | str, ...]
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
        inner, named = table_class(field), named_table(field)
        if below := inner or named:
            where = (*path, name) if inner else (*path, name, "NAME")
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
        if not table_class(field) and not named_table(field)
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
    """Return the schema of a field that is a table, required or optional; else None."""
    if typing.get_origin(field.annotation) is dict:
        return None
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def named_table(field: FieldInfo) -> type[BaseModel] | None:
    """Return the schema of the tables in a field that is a table of tables, such as [eval.NAME]; else None."""
    arguments = typing.get_args(field.annotation)
    inner = arguments[1] if typing.get_origin(field.annotation) is dict else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


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
        if typing.get_origin(arguments[0]) is tuple:
            return "array of pairs"
        return f"array of {_type_text(arguments[0])}"
    if origin is dict:
        return _type_text(arguments[1])
    return names.get(annotation, str(annotation))
