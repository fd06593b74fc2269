"""Changes that a call makes in NNX modules while JAX traces it in a scan or a checkpoint; modules of equal structure.

Inside a `jax.lax.scan` or a `jax.checkpoint` NNX refuses to change a variable that was made outside, because the new
value would be a tracer that outlives its trace. So the call gets a copy of its argument, built from the arrays of the
trace (`Flattened.unflatten`), and the variables in its closure hold such arrays meanwhile (`substituted`). The changes
leave the trace as arrays, and are then written into the original variables (`Flattened.write`, `assign`).

A step that was compiled for one module serves another of equal structure (`structure_of`). NNX compares functions by
identity, but a lambda in a module's `__init__` is another object in every instance. So two functions are equal here if
they run the same code on the same values.
"""

import functools
import types
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, cast

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.graphlib import Static
from flax.nnx.tracers import TraceState

from jdp.base.errors import UserError

Path = tuple[Any, ...]
Record = list[tuple[Path, Any]]
"""Changed variables: the path, and the treedef that makes a variable (or array) from the arrays that left the trace."""


@dataclass(frozen=True)
class Flattened:
    """A pytree flattened to variables and other leaves (`nodes`), each variable once."""

    tree: Any
    treedef: Any
    paths: list[Path]
    nodes: list[Any]
    slots: list[int]  # for each path, the index in `nodes`

    @property
    def arrays(self) -> list[tuple[str, Any, bool]]:
        """(path as text, array, whether its variable is not a parameter) of everything in `nodes`, in order."""
        first = {slot: path for path, slot in reversed(list(zip(self.paths, self.slots, strict=True)))}
        return [
            (jax.tree_util.keystr((*first[slot], *path)), array, _is_variable(node) and not isinstance(node, nnx.Param))
            for slot, node in enumerate(self.nodes)
            for path, array in jax.tree.leaves_with_path(node)
        ]

    def unflatten(self, arrays: Iterable[Any]) -> Any:
        """Return a copy of the tree with `arrays` instead; a variable shared in the tree is shared in the copy."""
        nodes = jax.tree.unflatten(jax.tree.structure(self.nodes), arrays)
        return jax.tree.unflatten(self.treedef, [nodes[slot] for slot in self.slots])

    def changes(self, copy: Any, arrays: Iterable[Any]) -> tuple[Record, list[Any]]:
        """Return the changes of a call in a `copy` made from `arrays`: the record, and the new arrays."""
        given = jax.tree.unflatten(jax.tree.structure(self.nodes), arrays)
        before = {path: given[slot] for path, slot in zip(self.paths, self.slots, strict=True)}
        record: Record = []
        new: list[Any] = []
        seen: set[int] = set()
        for path, node in jax.tree.flatten_with_path(copy, is_leaf=_is_variable)[0]:
            leaves, structure = jax.tree.flatten(node)
            if id(node) not in seen and not (path in before and is_unchanged(before[path], leaves)):
                record.append((path, structure))
                new += leaves
            seen.add(id(node))
        return record, new

    def write(self, record: Record, arrays: Iterable[Any]) -> None:
        """Write the result of `changes` into the tree itself; a variable that was added to the copy is added here."""
        originals = {path: self.nodes[slot] for path, slot in zip(self.paths, self.slots, strict=True)}
        remaining = iter(arrays)
        for path, structure in record:
            value = jax.tree.unflatten(structure, list(islice(remaining, structure.num_leaves)))
            if isinstance(originals.get(path), nnx.Variable) and isinstance(value, nnx.Variable):
                originals[path].set_raw_value(value.get_raw_value())
            else:
                _put(self.tree, path, value)


def flatten(tree: Any) -> Flattened:
    """Flatten a pytree down to NNX variables and other leaves."""
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_variable)
    nodes = {id(node): node for _, node in leaves}
    slot_of = {key: slot for slot, key in enumerate(nodes)}
    paths, slots = [path for path, _ in leaves], [slot_of[id(node)] for _, node in leaves]
    return Flattened(tree, treedef, paths, [*nodes.values()], slots)


def closed_over(call: Any, excluding: Iterable[Any]) -> list[nnx.Variable[Any]]:
    """Return the variables, except parameters and `excluding`, that `call` can reach and change."""
    excluded, reached = {*map(id, excluding)}, {id(variable): variable for variable in _reached(call, set(), 1)}
    others = [variable for key, variable in reached.items() if key not in excluded]
    return [x for x in others if not isinstance(x, nnx.Param) and x._can_update]  # pyright: ignore[reportPrivateUsage]


def is_unchanged(before: Any, after: Any) -> bool:
    """Return True if two trees hold the very same arrays."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))


def values(variables: Sequence[nnx.Variable[Any]]) -> list[Any]:
    return [variable.get_raw_value() for variable in variables]


def assign(variables: Sequence[nnx.Variable[Any]], new: Sequence[Any]) -> None:
    for variable, value in zip(variables, new, strict=True):
        variable.set_raw_value(value)


@contextmanager
def substituted(variables: Sequence[nnx.Variable[Any]], new: Sequence[Any]) -> Generator[None]:
    """Give the variables the values `new` and the current trace while the context lasts."""
    before = [(variable._trace_state, variable._raw_value) for variable in variables]  # pyright: ignore[reportPrivateUsage]
    try:
        _set_fields(variables, [(TraceState(), value) for value in new])
        yield
    finally:
        _set_fields(variables, before)


def _set_fields(variables: Sequence[nnx.Variable[Any]], states: Sequence[tuple[TraceState, Any]]) -> None:
    """Set traces and values without the trace-level check of NNX's own setters."""
    for variable, (trace, value) in zip(variables, states, strict=True):
        object.__setattr__(variable, "_trace_state", trace)
        object.__setattr__(variable, "_raw_value", value)


@contextmanager
def explaining_trace_errors() -> Generator[None]:
    """Turn NNX's error about a change that cannot leave a trace into one that names the fix."""
    try:
        yield
    except TraceContextError as error:
        raise UserError(
            "scan_layers: the block changes a module that is neither in its layers nor in its closure "
            f"({error}). Put it into the layers, close over the module itself, or pass it in x."
        ) from error


def _reached(thing: Any, seen: set[int], objects: int) -> Iterator[nnx.Variable[Any]]:
    """Yield the variables within reach of `thing`; look into plain objects `objects` levels deep."""
    if id(thing) in seen or thing is None:
        return
    seen.add(id(thing))
    inside: Iterable[Any] = ()
    match thing:
        case nnx.Variable():
            yield thing
        case nnx.Pytree():
            yield from (node for _, node in nnx.iter_graph(thing) if isinstance(node, nnx.Variable))
        case types.FunctionType():
            inside = _of_function(thing)
        case types.MethodType():
            inside = (thing.__self__, thing.__func__)
        case functools.partial():
            inside = (thing.func, *thing.args, *thing.keywords.values())  # pyright: ignore[reportUnknownMemberType]
        case list() | tuple() | set():
            inside = thing  # pyright: ignore[reportUnknownVariableType]
        case dict():
            inside = list(thing.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        case _ if objects and hasattr(thing, "__dict__") and not isinstance(thing, type | types.ModuleType | jax.Array):
            inside, objects = list(vars(thing).values()), objects - 1
        case _:
            pass
    for inner in inside:
        yield from _reached(inner, seen, objects)


def _of_function(function: types.FunctionType) -> list[Any]:
    """Return the objects that a function refers to: filled cells, defaults, the function it wraps, globals."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    own = [
        value
        for value in named
        if isinstance(value, nnx.Pytree | nnx.Variable)
        or (isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__)
    ]
    return [*cells, *defaults, getattr(function, "__wrapped__", None), *own]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _put(tree: Any, path: Path, value: Any) -> None:
    *parents, last = path
    for key in parents:
        tree = getattr(tree, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else tree[_index(key)]
    if isinstance(last, jax.tree_util.GetAttrKey):
        setattr(tree, last.name, value)
    else:
        tree[_index(last)] = value


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key


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
    match value:
        case types.FunctionType():
            cells = value.__closure__ or ()
            if not cells and "<locals>" not in value.__qualname__:
                return value
            if not all(map(_is_filled, cells)):
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
    with suppress(TypeError):
        hash(value)
        return value
    if is_dataclass(value) and not isinstance(value, type) and "__eq__" in vars(type(value)):
        return (type(value), *(_comparable(getattr(value, each.name)) for each in fields(value) if each.compare))
    return _Identity(value)


def _is_filled(cell: types.CellType) -> bool:
    """Return False for a variable of a closure that is not bound yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
