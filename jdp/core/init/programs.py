"""Run `init` as a few small programs, each compiled once and called for every leaf that it fits.

As one program a state is compiled leaf by leaf: each random draw is code of its own, half a second of it on a CPU, and
that of an unrolled GPT-2 takes a minute on a GPU. But most of its leaves differ in nothing but their keys:

1. What only derives keys (`fold_in`, `split`) is computed at once, operation by operation.
2. What remains falls into pieces that share nothing but keys: most often a leaf each. Pieces that are the same but for
   their keys are one program. All leaves that need no key (zeros, ones) are one more.
3. A program has the shardings of its leaves: every device computes the shard that it keeps, and nothing else is held.

`threefry.py` has the keys of 1, and on CPU devices the random numbers, in a form that is compiled sooner or not at all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jdp.core.random.threefry import derived, random_bits
from jdp.core.tracing.jaxprs import bind, inlined

_CALLS = ("jit", "pjit")
_MOST_KEYS = 4096
"""Elements of an array that counts as keys: those of all layers, or of all rows of an embedding at most."""


@dataclass(eq=False)
class _Value:
    """A value of the program.

    Attributes:
        aval: its shape and dtype.
        node: the operation that computes it; None for the key, a constant or a literal.
        keyed: it depends on the key.
        known: the value itself, where there is one before any program runs.
        literal: the known value is part of the program, not an argument of it.
    """

    aval: Any
    node: "_Node | None" = None
    keyed: bool = False
    known: Any = None
    literal: bool = False


@dataclass(eq=False)
class _Node:
    """An operation: its place in the program, what it takes and what it returns."""

    place: int
    equation: JaxprEqn
    inputs: list[_Value]
    outputs: list[_Value] = field(default_factory=list[_Value])

    def run(self, inputs: Sequence[Any], *, written_out: bool = False) -> list[Any]:
        """Compute the outputs; with `written_out`, random bits without a loop."""
        equation: Any = self.equation
        if written_out and equation.primitive.name == "random_bits":
            bits = random_bits(inputs[0], equation.params["shape"], equation.params["bit_width"])
            if bits is not None:
                return [bits]
        return bind(equation, inputs)

    def run_now(self) -> list[Any]:
        """Compute the outputs of inputs that are known."""
        equation, inputs = self.equation, [value.known for value in self.inputs]
        if equation.primitive.name in ("random_fold_in", "random_split"):
            keys = derived(equation.primitive.name, *inputs, shape=equation.params.get("shape", ()))
            if keys is not None:
                return [keys]
        return self.run(inputs)


def run_init(make: Callable[[jax.Array], Any], key: jax.Array, shardings: Any) -> Any:
    """Return `make(key)`, a tree of arrays, bit for bit as `jax.jit(make, out_shardings=shardings)(key)` has it."""
    traced: Any = jax.jit(make).trace(key)
    program = traced.jaxpr
    if program.effects:  # prints and callbacks keep their order in one program only
        return jax.jit(make, out_shardings=shardings)(key)
    nodes: list[_Node] = []
    arguments = [_Value(jax.typeof(key), keyed=True, known=key)]
    outputs = _read_program(program, arguments, nodes)
    _derive_keys(nodes, outputs)
    leaves, tree = jax.tree.flatten(shardings)
    results: list[Any] = [None] * len(outputs)
    programs: dict[Any, Callable[..., Any]] = {}
    for piece in _pieces(outputs):
        wanted, own = [outputs[i] for i in piece], tuple(leaves[i] for i in piece)
        ordered = sorted(_needed(wanted), key=lambda node: node.place)
        inputs, name = _described(ordered, wanted)
        if (name, own) not in programs:
            programs[name, own] = _program(ordered, inputs, wanted, own)
        made = programs[name, own]([value.known for value in inputs])
        for i, leaf in zip(piece, made, strict=True):
            results[i] = leaf
    return tree.unflatten(results)


def _read_program(program: ClosedJaxpr, arguments: Sequence[_Value], nodes: list[_Node]) -> list[_Value]:
    """Add a program's operations to `nodes`, those of the functions that it calls too; return its results."""

    def add(equation: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        node, keyed = _Node(len(nodes), equation, inputs), any(value.keyed for value in inputs)
        node.outputs = [_Value(var.aval, node, keyed) for var in equation.outvars]
        nodes.append(node)
        return node.outputs

    def constant(aval: Any, value: Any, literal: bool) -> _Value:
        return _Value(aval, known=value, literal=literal)

    constants = [_Value(jax.typeof(value), known=value) for value in program.consts]
    return inlined(program.jaxpr, [*constants, *arguments], _CALLS, constant, add)


def _derive_keys(nodes: Sequence[_Node], outputs: Sequence[_Value]) -> None:
    """Compute the keys that the outputs need, from the one key that is known."""
    live = _needed(outputs)
    for node in nodes:
        ready = all(value.known is not None or not value.keyed for value in node.inputs)
        if node in live and node.outputs[0].keyed and ready and all(map(_is_keys, node.outputs)):
            for value in node.inputs:
                _compute(value)
            _compute(node.outputs[0])


def _is_keys(value: _Value) -> bool:
    """Return True for keys, and for their words: a few arrays of two."""
    shape, dtype = value.aval.shape, value.aval.dtype
    words = dtype == np.uint32 and shape[-1:] == (2,)
    return (jnp.issubdtype(dtype, jax.dtypes.prng_key) or words) and value.aval.size <= _MOST_KEYS


def _compute(value: _Value) -> None:
    if value.known is None and value.node is not None:
        for one in value.node.inputs:
            _compute(one)
        for output, known in zip(value.node.outputs, value.node.run_now(), strict=True):
            output.known = known


def _needed(values: Iterable[_Value]) -> set[_Node]:
    """Return the operations that are still to run for these values."""
    found: set[_Node] = set()
    waiting = [value.node for value in values if value.known is None and value.node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [value.node for value in node.inputs if value.known is None and value.node is not None]
    return found


def _pieces(outputs: Sequence[_Value]) -> Iterator[list[int]]:
    """Yield outputs that belong together, by index: those that share an operation on the key, and those with none."""
    piece_of: dict[_Node, int] = {}  # an operation on the key -> the first output that needs it
    pieces: dict[int, list[int]] = {}
    unkeyed: list[int] = []
    for i, value in enumerate(outputs):
        own = [node for node in _needed([value]) if node.outputs[0].keyed]
        shared = {piece_of[node] for node in own if node in piece_of}
        pieces[i] = sorted([i, *(j for first in shared for j in pieces.pop(first))])
        piece_of |= dict.fromkeys(own, i)
        piece_of = {node: i if first in shared else first for node, first in piece_of.items()} if shared else piece_of
        if not own:
            unkeyed += pieces.pop(i)
    yield from pieces.values()
    if unkeyed:
        yield unkeyed


def _described(ordered: Sequence[_Node], wanted: Sequence[_Value]) -> tuple[list[_Value], tuple[Any, ...]]:
    """Return what a piece takes, and a name that two pieces share if they are the same but for what they take."""
    numbers: dict[_Value, int] = {}
    inputs: list[_Value] = []

    def refer(value: _Value) -> Any:
        if value.literal:
            return (str(value.aval), np.asarray(value.known).tobytes())
        if value not in numbers:
            numbers[value] = len(numbers)
            inputs.append(value)
        return (numbers[value], str(value.aval))

    lines: list[Any] = []
    for node in ordered:
        taken = tuple(refer(value) for value in node.inputs)
        numbers.update({value: len(numbers) + i for i, value in enumerate(node.outputs)})
        lines.append((node.equation.primitive.name, _name_of(node), taken))
    return inputs, (*lines, *map(refer, wanted))


def _name_of(node: _Node) -> Any:
    """Return the parameters as text; the node itself where that does not say all: of arrays in them, at any depth."""
    waiting: list[Any] = list(node.equation.params.values())
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, np.ndarray | jax.Array):
            return node
        if isinstance(value, ClosedJaxpr | Jaxpr):  # one class from jax 0.12 on, whose `jaxpr` is itself
            if id(value) in seen:
                continue
            seen[id(value)] = value
            program: Any = getattr(value, "jaxpr", value)
            waiting += getattr(value, "consts", ())
            waiting += [atom.val for eqn in program.eqns for atom in eqn.invars if isinstance(atom, Literal)]
            waiting += [inner for eqn in program.eqns for inner in eqn.params.values()]
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value
    return str(node.equation.params)


def _program(
    ordered: Sequence[_Node], inputs: Sequence[_Value], wanted: Sequence[_Value], shardings: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a compiled function of what a piece takes, which returns its leaves."""
    written_out = all(device.platform == "cpu" for device in shardings[0].device_set)

    def init(arguments: Sequence[Any]) -> tuple[Any, ...]:
        env: dict[_Value, Any] = dict(zip(inputs, arguments, strict=True))

        def read(value: _Value) -> Any:
            return value.known if value.literal else env[value]

        for node in ordered:
            env.update(zip(node.outputs, node.run(list(map(read, node.inputs)), written_out=written_out), strict=True))
        return tuple(map(read, wanted))

    return jax.jit(init, out_shardings=shardings)
