"""What a call changes in the NNX modules that it works on, where JAX traces the call apart.

Inside a `jax.lax.scan` or a `jax.checkpoint` NNX refuses to change a variable that was made outside: the new value
would be a tracer that outlives its trace. So there
1. the call gets a copy of its argument, put together from the arrays that the trace was given (`Parts.together`), and
   the variables that it reaches by itself, through its closure, hold the trace's arrays for as long as it runs
   (`standing_in`);
2. what changed leaves the trace as arrays (`Parts.changes`, `values`);
3. outside, those are written into the variables that were meant (`Parts.write`, `assign`).

Of layers that hold no NNX variables, such as plain dicts, linen's or equinox's trees, the same steps find nothing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.tracers import TraceState

Path = tuple[Any, ...]
Record = list[tuple[Path, Any]]
"""What changed: its path, and the treedef that makes a variable (or array) of the arrays that left the trace."""


@dataclass(frozen=True)
class Parts:
    """A pytree taken apart into arrays, each NNX variable once, in however many places it is used.

    Attributes:
        tree: the pytree itself.
        treedef: its structure down to variables and other leaves.
        paths: where each of those is.
        nodes: the distinct variables and leaves.
        slots: for each path, which of `nodes` is there.
    """

    tree: Any
    treedef: Any
    paths: list[Path]
    nodes: list[Any]
    slots: list[int]

    @property
    def arrays(self) -> list[tuple[str, Any]]:
        """(path as text, array) of everything in `nodes`, in order."""
        first = {slot: path for path, slot in reversed(list(zip(self.paths, self.slots, strict=True)))}
        found: list[tuple[str, Any]] = []
        for slot, node in enumerate(self.nodes):
            for path, array in jax.tree.leaves_with_path(node):
                found.append((jax.tree_util.keystr((*first[slot], *path)), array))
        return found

    @property
    def are_state(self) -> list[bool]:
        """Of each of `arrays`, whether it is of a variable that is no parameter."""
        state = [isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param) for node in self.nodes]
        return [is_state for node, is_state in zip(self.nodes, state, strict=True) for _ in jax.tree.leaves(node)]

    @property
    def variables(self) -> list[nnx.Variable[Any]]:
        return [node for node in self.nodes if isinstance(node, nnx.Variable)]

    def together(self, arrays: Iterable[Any]) -> Any:
        """A copy of the tree that holds `arrays` instead; what was shared in the tree is shared in the copy."""
        left = iter(arrays)
        structures = (jax.tree.structure(node) for node in self.nodes)
        nodes = [jax.tree.unflatten(s, list(islice(left, s.num_leaves))) for s in structures]
        return jax.tree.unflatten(self.treedef, [nodes[slot] for slot in self.slots])

    def changes(self, copy: Any, arrays: Iterable[Any]) -> tuple[Record, list[Any]]:
        """What differs, by identity, in a `copy` made of `arrays` after the call: the record, and the new arrays."""
        left = iter(arrays)
        given = [list(islice(left, jax.tree.structure(node).num_leaves)) for node in self.nodes]
        before = {path: given[slot] for path, slot in zip(self.paths, self.slots, strict=True)}
        record: Record = []
        new: list[Any] = []
        seen: set[int] = set()
        for path, node in jax.tree.flatten_with_path(copy, is_leaf=_is_variable)[0]:
            leaves, structure = jax.tree.flatten(node)
            old = before.get(path, [])
            if id(node) not in seen and not (path in before and same(old, leaves)):
                record.append((path, structure))
                new += leaves
            seen.add(id(node))
        return record, new

    def write(self, record: Record, arrays: Iterable[Any]) -> None:
        """Write into the tree itself what `changes` found in a copy; a variable that was added there is added here."""
        own = {path: self.nodes[slot] for path, slot in zip(self.paths, self.slots, strict=True)}
        left = iter(arrays)
        for path, structure in record:
            value = jax.tree.unflatten(structure, list(islice(left, structure.num_leaves)))
            if isinstance(own.get(path), nnx.Variable) and isinstance(value, nnx.Variable):
                own[path].set_raw_value(value.get_raw_value())
            else:
                _put(self.tree, path, value)


def take_apart(tree: Any) -> Parts:
    """The arrays of a pytree, NNX variables known for what they are."""
    found, treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_variable)
    slot_of: dict[int, int] = {}
    nodes: list[Any] = []
    for _, node in found:
        if id(node) not in slot_of:
            slot_of[id(node)] = len(nodes)
            nodes.append(node)
    return Parts(tree, treedef, [path for path, _ in found], nodes, [slot_of[id(node)] for _, node in found])


def closed_over(call: Any, apart_from: Iterable[nnx.Variable[Any]]) -> list[nnx.Variable[Any]]:
    """The variables, parameters left out, that `call` can reach and change by itself, apart from those of its layers.

    Looked through are closures, default arguments, globals that the code names, bound methods, partial functions,
    containers, and the attributes of plain objects found there.
    """
    skipped = {id(variable) for variable in apart_from}
    found = {id(variable): variable for variable in _reached(call, set(), 1)}
    return [
        variable
        for key, variable in found.items()
        if key not in skipped and not isinstance(variable, nnx.Param) and variable._can_update  # pyright: ignore[reportPrivateUsage]
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two trees hold the very same arrays: nobody changed them."""
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def values(variables: Sequence[nnx.Variable[Any]]) -> list[Any]:
    """What the variables hold: arrays, or trees of them."""
    return [variable.get_raw_value() for variable in variables]


def assign(variables: Sequence[nnx.Variable[Any]], held: Sequence[Any]) -> None:
    for variable, value in zip(variables, held, strict=True):
        variable.set_raw_value(value)


@contextmanager
def standing_in(variables: Sequence[nnx.Variable[Any]], held: Sequence[Any]) -> Generator[None]:
    """While the context lasts, the variables hold `held` and belong to the trace at work; then they are as before."""
    fields = ("_trace_state", "_raw_value")
    kept = [[getattr(variable, name) for name in fields] for variable in variables]
    try:
        for variable, value in zip(variables, held, strict=True):
            _set(variable, fields, (TraceState(), value))
        yield
    finally:
        for variable, before in zip(variables, kept, strict=True):
            _set(variable, fields, before)


@contextmanager
def explaining() -> Generator[None]:
    """Say in words which changes cannot leave a block."""
    try:
        yield
    except TraceContextError as error:
        raise ValueError(
            "scan_layers: the block changes a part of a module that was made outside the loop and is not found in the "
            f"block's layers or closure ({error}). Let the layers hold it, close over the module itself, or pass it "
            "along in x."
        ) from error


def _reached(thing: Any, seen: set[int], objects: int) -> Iterator[nnx.Variable[Any]]:
    """Variables within reach of `thing`; `objects`: how many plain objects deep to look for more."""
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
        case type() | types.ModuleType() | jax.Array():
            pass
        case _ if objects and hasattr(thing, "__dict__"):
            inside, objects = list(vars(thing).values()), objects - 1
        case _:
            pass
    for part in inside:
        yield from _reached(part, seen, objects)


def _of_function(function: types.FunctionType) -> list[Any]:
    """What a function holds on to: cells that are filled, defaults, what its wrapper wraps, and globals of its own."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    own = [
        value
        for value in named
        if isinstance(value, nnx.Pytree | nnx.Variable)
        or (isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__)
    ]
    return [*cells, *defaults, getattr(function, "__wrapped__", None), *own]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is bound later
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _set(variable: nnx.Variable[Any], fields: Sequence[str], given: Sequence[Any]) -> None:
    """Past the check of the trace level that NNX's own setters make."""
    for name, value in zip(fields, given, strict=True):
        object.__setattr__(variable, name, value)


def _put(tree: Any, path: Path, value: Any) -> None:
    """Set what is at `path`, by attribute, key or position."""
    *parents, last = path
    for key in parents:
        tree = getattr(tree, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else tree[_index(key)]
    if isinstance(last, jax.tree_util.GetAttrKey):
        setattr(tree, last.name, value)
    else:
        tree[_index(last)] = value


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key
