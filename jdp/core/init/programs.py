"""Run `init` as a few small programs, each compiled once and called for every leaf that it fits.

As one program a state takes long to compile: half a second for each random draw on a CPU, and a minute for an unrolled
GPT-2 on a GPU. But most of its leaves differ in nothing but their keys:

1. What only derives keys (`fold_in`, `split`) is computed at once, operation by operation.
2. What remains falls into pieces that share nothing but keys: most often a leaf each. Pieces that are the same but for
   their keys are one program. All leaves that need no key (zeros, ones) are one more.
3. A program has the shardings of its leaves: every device computes the shard that it keeps, and nothing else is held.

`threefry.py` has the keys of 1, and on CPU devices the random numbers, in a form that is compiled sooner or not at all.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.core.random.threefry import derived, random_bits
from jdp.core.tracing.graph import (
    FORWARD,
    Env,
    Graph,
    Operation,
    Value,
    after,
    before,
    described,
    evaluate,
    known,
    read,
)
from jdp.core.tracing.jaxprs import bind

_MOST_KEYS = 4096
"""Elements of an array that counts as keys: those of all layers, or of all rows of an embedding at most."""


def run_init(make: Callable[[jax.Array], Any], key: jax.Array, shardings: Any) -> Any:
    """Return `make(key)`, a tree of arrays, bit for bit as `jax.jit(make, out_shardings=shardings)(key)` has it."""
    traced: Any = jax.jit(make).trace(key)
    if traced.jaxpr.effects:  # prints and callbacks keep their order in one program only
        return jax.jit(make, out_shardings=shardings)(key)
    graph = read(traced.jaxpr, FORWARD)
    keyed, env = after(graph.operations, graph.inputs), dict[Value, Any](zip(graph.inputs, [key], strict=True))
    _derive_keys(graph, keyed, env)
    leaves, tree = jax.tree.flatten(shardings)
    results: list[Any] = [None] * len(graph.outputs)
    programs: dict[Any, Callable[..., Any]] = {}
    for piece in _pieces(graph.outputs, keyed, env):
        wanted, own = [graph.outputs[i] for i in piece], tuple(leaves[i] for i in piece)
        operations, _ = before(wanted, env.__contains__)
        inputs, name = described(operations, wanted)
        if (name, own) not in programs:
            programs[name, own] = _program(operations, inputs, wanted, own)
        made = programs[name, own]([known(value, env) for value in inputs])
        for i, leaf in zip(piece, made, strict=True):
            results[i] = leaf
    return tree.unflatten(results)


def _derive_keys(graph: Graph, keyed: Collection[Operation], env: Env) -> None:
    """Add to `env`, which has the one key, the keys that the outputs need."""
    for operation in before(graph.outputs)[0]:
        ready = all(value in env or value.maker not in keyed for value in operation.operands)
        if operation in keyed and ready and all(map(_is_keys, operation.results)):
            evaluate(before(operation.results, env.__contains__)[0], env, _derived)


def _is_keys(value: Value) -> bool:
    """Return True for keys, and for their words: a few arrays of two."""
    shape, dtype = value.aval.shape, value.aval.dtype
    words = dtype == np.uint32 and shape[-1:] == (2,)
    return (jnp.issubdtype(dtype, jax.dtypes.prng_key) or words) and value.aval.size <= _MOST_KEYS


def _derived(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Compute an operation that leads to keys: in NumPy where that can be."""
    keys = None
    if operation.name in ("random_fold_in", "random_split"):
        keys = derived(operation.name, *operands, shape=operation.eqn.params.get("shape", ()))
    return bind(operation.eqn, operands) if keys is None else [keys]


def _written_out(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Compute an operation: random bits without a loop."""
    bits, params = None, operation.eqn.params
    if operation.name == "random_bits":
        bits = random_bits(operands[0], params["shape"], params["bit_width"])
    return bind(operation.eqn, operands) if bits is None else [bits]


def _pieces(outputs: Sequence[Value], keyed: Collection[Operation], env: Env) -> Iterator[list[int]]:
    """Yield outputs that belong together, by index: those that share an operation on the key, and those with none."""
    piece_of: dict[Operation, int] = {}  # an operation on the key -> the first output that needs it
    pieces: dict[int, list[int]] = {}
    unkeyed: list[int] = []
    for i, value in enumerate(outputs):
        own = [operation for operation in before([value], env.__contains__)[0] if operation in keyed]
        shared = {piece_of[operation] for operation in own if operation in piece_of}
        pieces[i] = sorted([i, *(j for first in shared for j in pieces.pop(first))])
        piece_of |= dict.fromkeys(own, i)
        piece_of = {each: i if first in shared else first for each, first in piece_of.items()} if shared else piece_of
        if not own:
            unkeyed += pieces.pop(i)
    yield from pieces.values()
    if unkeyed:
        yield unkeyed


def _program(
    operations: Sequence[Operation], inputs: Sequence[Value], wanted: Sequence[Value], shardings: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a compiled function of what a piece takes, which returns its leaves."""
    on_cpu = all(device.platform == "cpu" for device in shardings[0].device_set)

    def init(arguments: Sequence[Any]) -> tuple[Any, ...]:
        env = dict(zip(inputs, arguments, strict=True))
        evaluate(operations, env, _written_out if on_cpu else None)
        return tuple(known(value, env) for value in wanted)

    return jax.jit(init, out_shardings=shardings)
