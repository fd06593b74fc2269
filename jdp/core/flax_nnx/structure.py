"""Compare the structure of two modules, so that a step compiled for one of them serves the other.

NNX compares functions by identity, but a lambda in a module's `__init__` is another object in every instance. So two
functions are equal here if they run the same code on the same values.
"""

import contextlib
import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

from flax import nnx
from flax.nnx.graphlib import Static


@dataclass(frozen=True)
class _Identity:
    """An object that cannot be hashed, compared by its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(graphdef: nnx.GraphDef[Any]) -> Hashable:
    """Return a value that is equal, and of equal hash, for the graphdefs of modules of equal structure."""
    pairs = ((name, attr.value if isinstance(attr, Static) else attr) for name, attr in graphdef.attributes)
    return tuple(graphdef.nodes), tuple((name, _comparable(value)) for name, value in pairs)


def _comparable(value: Any) -> Hashable:
    """Return a value that can be hashed and compared in place of `value`."""
    match value:
        case types.FunctionType():
            cells = value.__closure__ or ()
            if not cells and "<locals>" not in value.__qualname__:
                return value
            if not all(map(is_filled, cells)):
                return _Identity(value)
            code, bound = value.__code__, [cell.cell_contents for cell in cells]
            values = (value.__defaults__ or (), value.__kwdefaults__ or {}, bound)
            return (code, code.co_filename, id(value.__globals__), *map(_comparable, values))
        case functools.partial():
            partial = cast("functools.partial[Any]", value)
            return (functools.partial, *map(_comparable, (partial.func, partial.args, partial.keywords)))
        case tuple() | list():
            return (type(value), *map(_comparable, cast("tuple[Any, ...]", value)))
        case dict():
            entries = cast("dict[Any, Any]", value)
            return (dict, *((key, _comparable(entries[key])) for key in sorted(entries, key=repr)))
        case _:
            pass
    with contextlib.suppress(TypeError):
        hash(value)
        return value
    if is_dataclass(value) and not isinstance(value, type) and "__eq__" in vars(type(value)):
        return (type(value), *(_comparable(getattr(value, each.name)) for each in fields(value) if each.compare))
    return _Identity(value)


def is_filled(cell: types.CellType) -> bool:
    """Return False for a variable of a closure that is not bound yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
