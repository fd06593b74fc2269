"""Whether two modules are made alike, so that a step compiled for the one serves the other.

NNX compares what a module's attributes hold. Functions are compared by identity: a lambda or a `functools.partial` that
is written in a module's `__init__` is another one in every instance. Here they are alike when they run the same code on
the same values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

from flax import nnx
from flax.nnx.graphlib import Static


@dataclass(frozen=True)
class Structure:
    """A graphdef that can be compared: equal, and of equal hash, for modules that are made alike.

    Attributes:
        nodes: NNX's own description of them.
        attributes: of every node in turn: names, with what they hold, functions by what they do.
    """

    nodes: tuple[Any, ...]
    attributes: tuple[tuple[Any, Hashable], ...]

    @property
    def may_differ(self) -> bool:
        """Whether something in it is compared by identity and has no name by which it were the same next time."""
        return any(_is_nameless(held) for _, held in self.attributes)

    def difference(self, other: Structure) -> str | None:
        """The name of the first attribute that differs; None if none does."""
        pairs = zip(self.attributes, other.attributes, strict=False)
        return next((str(mine[0]) for mine, theirs in pairs if mine != theirs), None)


@dataclass(frozen=True)
class _Identity:
    """What cannot be hashed is alike only if it is the very same."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(graphdef: nnx.GraphDef[Any]) -> Structure:
    """The structure of a module, by its graphdef."""
    held = ((name, attr.value if isinstance(attr, Static) else attr) for name, attr in graphdef.attributes)
    return Structure(tuple(graphdef.nodes), tuple((name, _alike(value)) for name, value in held))


def _alike(value: Any) -> Hashable:
    """Something to compare and hash in place of `value`."""
    match value:
        case types.FunctionType():
            cells = value.__closure__ or ()
            code, filled = value.__code__, all(map(_is_filled, cells))
            if not cells and "<locals>" not in value.__qualname__:
                return value
            if not filled:
                return _Identity(value)
            held = (value.__defaults__ or (), value.__kwdefaults__ or {}, [cell.cell_contents for cell in cells])
            return (code, code.co_filename, id(value.__globals__), *map(_alike, held))
        case functools.partial():
            partial = cast("functools.partial[Any]", value)
            return (functools.partial, *map(_alike, (partial.func, partial.args, partial.keywords)))
        case tuple() | list():
            items = cast("tuple[Any, ...]", value)
            return (type(items), *map(_alike, items))
        case dict():
            entries = cast("dict[Any, Any]", value)
            return (dict, *((key, _alike(entries[key])) for key in sorted(entries, key=repr)))
        case _:
            return value if _is_hashable(value) else _Identity(value)


def _is_nameless(held: Any) -> bool:
    if isinstance(held, tuple):
        return any(map(_is_nameless, cast("tuple[Any, ...]", held)))
    if held is None or isinstance(held, types.ModuleType) or type(held).__eq__ is not object.__eq__:
        return isinstance(held, _Identity)
    return "<locals>" in getattr(held, "__qualname__", "<locals>")


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is bound later
        return False


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
