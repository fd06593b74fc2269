"""The possible names of a table of an experiment file: entries with typed fields and a function that makes the object.

The fields of a dataclass become the keys of a strict table. Wrong types, unknown keys, and values that the dataclass
itself refuses are reported like any mistake in a file. jdp's own models are entries too; `jdp.experiment.plugins` adds
those of a plug-in.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model, model_validator
from pydantic_core import PydanticKnownError

from jdp.experiment.keys import described_fields
from jdp.experiment.schema.fields import BoolOrAuto, Section, Single, Whole

Learns = Literal["text", "images", "features"]
Named = TypeVar("Named", bound=Section)


@dataclass(frozen=True, eq=False)
class Entry:
    """The entry of one name.

    Attributes:
        name: as in the file.
        fields: a dataclass; or an instance of one, whose values are the defaults.
        make: makes the object; its first argument is an instance of the dataclass.
        by: the package that registered it; "": jdp's own.
        learns: of a model, the kind of jdp's own data and loss; None: those of a plug-in.
        metrics: of a loss, the names of its metrics.
    """

    name: str
    fields: Any
    make: Callable[..., Any]
    by: str = ""
    learns: Learns | None = None
    metrics: tuple[str, ...] = ()

    @property
    def kind(self) -> type:
        """The dataclass."""
        return self.fields if isinstance(self.fields, type) else type(self.fields)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its fields."""
        return tuple(each.name for each in _init_fields(self.kind))

    def values(self, table: BaseModel) -> Any:
        """Return the dataclass with the values of a table; its errors pass through."""
        return self.kind(**{key: getattr(table, key) for key in self.keys})

    def registered_by(self, plugin: str | None) -> bool:
        """Return True if a plug-in, or a module of it, registered this."""
        return plugin is not None and (self.by == plugin or self.by.startswith(f"{plugin}."))


@dataclass(frozen=True, eq=False)
class Table:
    """The names that one table of the file can have.

    Attributes:
        key: of the table.
        own: jdp's own names, without entries.
        reserved: keys of every such table: no entry's field can have these names.
        entries: name -> entry.
    """

    key: str
    own: Collection[str] = ()
    reserved: Collection[str] = ("name",)
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])

    def section(self, name: object, base: type[Named]) -> type[Named] | None:
        """Return the schema of the table with this name."""
        entry = self.entries.get(name) if isinstance(name, str) else None
        return None if entry is None else typing.cast("type[Named]", section(entry, base))

    def check(self, name: str, *more: str) -> str:
        """Return the name if something is registered under it. `more`: other possible names."""
        if name not in self.entries:
            expected = ", ".join(f"'{known}'" for known in (*self.own, *self.entries, *more))
            if not expected:
                raise ValueError("must be a name that the plug-in registers, and there is none (--plugin PACKAGE)")
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name


@functools.cache
def section(entry: Entry, base: type[Section]) -> type[Section]:
    """Return the schema of a table with an entry's name: its fields are keys beside those of `base`."""
    hints, described = hints_of(entry.kind), described_fields(entry.kind)
    fields: dict[str, Any] = {
        each.name: (_limited(hints[each.name]), Field(_default(entry, each), description=described.get(each.name)))
        for each in _init_fields(entry.kind)
    }

    def obey_its_own_rules(table: BaseModel) -> BaseModel:
        entry.values(table)  # the dataclass checks; its ValueError is the message
        return table

    rules: Any = {"obey_its_own_rules": model_validator(mode="after")(obey_its_own_rules)}
    return create_model(f"{base.__name__}Of{entry.name}", __base__=base, __validators__=rules, **fields)


def hints_of(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass. Raises NameError for a type that is not there."""
    return typing.get_type_hints(kind, include_extras=True)


def is_plain(hint: Any) -> bool:
    """Return True if TOML can hold such a value, or "none": numbers, text, true and false, words, tuples of them."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return is_plain(inner[0])
    if origin is Literal:
        return all(isinstance(word, str) for word in inner)
    if origin in (types.UnionType, typing.Union):
        return all(map(is_plain, inner))
    if origin is tuple:
        return len(inner) == 2 and inner[1] is ... and is_plain(inner[0])
    return hint in (int, float, str, bool, type(None))


def _init_fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(kind) if each.init]


def _default(entry: Entry, each: dataclasses.Field[Any]) -> Any:
    """Return a field's default: an instance's value; `...` where there is none."""
    if not isinstance(entry.fields, type):
        return getattr(entry.fields, each.name)
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return ... if each.default is dataclasses.MISSING else each.default


def _limited(hint: Any) -> Any:
    """Return a field's type as the schema has it: its numbers limited to the 32 bits of devices."""
    if hint in (int, float):
        return Annotated[hint, Whole if hint is int else Single]
    if hint == bool | Literal["auto"]:
        return BoolOrAuto  # with one message for both
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return Annotated[_limited(inner[0]), *inner[1:]]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_limited, inner))
    return tuple[_limited(inner[0]), ...] if typing.get_origin(hint) is tuple else hint
