"""The derivative of one layer as XLA should compute it: the only place in jdp that changes a program.

A weight's gradient is a matrix product of 16-bit numbers, cast to float32 to be summed. Here the product itself has a
float32 result, because tensor cores sum in float32 anyway. A 16-bit result would lose digits, and its cast would read
and write the whole gradient. Gradients that one layer passes to the next keep their 16 bits.

XLA's scheduler counts kernels, not their seconds, and may hide a collective behind a very short kernel. So large
products of the gradient that is passed on wait for the collectives of the same round, one product for each collective.

On a mesh with a model axis, layers keep XLA's order and products, because XLA then hides more of the traffic along that
axis: experiments/tensor_parallel.toml is foreseen at 813 ms a step on h100:8x8 instead of 858.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jdp.core.reading import bind, flops_of, run

_CALLS = ("jit", "closed_call", "checkpoint", "remat2")
_16_BITS = ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
_SAME_ELEMENTS = ("transpose", "reshape", "squeeze", "copy")
_WAITING = {1: (0.5,), 2: (0.5, 0.9), 3: (0.4, 0.6, 0.9)}
"""Number of collectives -> for each, the share of the FLOPs after which a product waits for it."""


class LayerDerivative:
    """A function (…) -> (gradients, carried, others), lists of arrays, made for arguments of these shapes."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        closed, self._shape = jax.make_jaxpr(function, return_shape=True)(*args)
        self._program = jax.make_jaxpr(lambda *leaves: run(closed, leaves, _written_out))(*jax.tree.leaves(args))
        outputs = self._program.jaxpr.outvars
        first, carried = len(jax.tree.leaves(self._shape[0])), len(jax.tree.leaves(self._shape[1]))
        self._wide = _wide_products(self._program, outputs[:first])
        self._carried = outputs[first : first + carried]

    def __call__(self, meanwhile: Sequence[Any], *args: Any) -> Any:
        """Evaluate it; `meanwhile` are trees of arrays that collectives send at the same time, one tree for each."""
        sends = list(filter(None, meanwhile))
        waiting = dict(zip(_waiting(self._program, self._carried, len(sends)), sends, strict=False))

        def evaluated(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            if eqn.outvars[0] in self._wide:
                eqn = eqn.replace(params={**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)})
            results = bind(eqn, operands)
            sent = waiting.get(eqn.outvars[0]) if eqn.outvars else None
            return jax.lax.optimization_barrier((results, sent))[0] if sent else results

        leaves = run(self._program, jax.tree.leaves(args), evaluated)
        return jax.tree.unflatten(jax.tree.structure(self._shape), leaves)


def _written_out(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name not in _CALLS:
        return bind(eqn, operands)
    inner: Any = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    if eqn.params.get("prevent_cse"):
        operands = jax.lax.optimization_barrier(operands)
    return run(inner, operands, _written_out)


def _wide_products(program: ClosedJaxpr, gradients: Sequence[Any]) -> set[Any]:
    """Return the 16-bit products that are only cast to float32 and returned as these gradients."""
    makers = {eqn.outvars[0]: eqn for eqn in program.jaxpr.eqns if len(eqn.outvars) == 1}
    uses = Counter(x for eqn in program.jaxpr.eqns for x in _variables(eqn.invars))
    uses.update(_variables(program.jaxpr.outvars))

    def product(value: Any) -> Any:
        eqn = makers.get(value)
        if eqn is None or uses[value] != 1:
            return None
        if eqn.primitive.name in (*_SAME_ELEMENTS, "convert_element_type"):
            return product(eqn.invars[0])
        is_plain = eqn.primitive.name == "dot_general" and eqn.params["precision"] is None
        avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        return value if is_plain and {x.dtype for x in avals} in _16_BITS else None

    wide = (product(value) for value in _variables(gradients) if value.aval.dtype == jnp.float32)
    return {value for value in wide if value is not None}


def _waiting(program: ClosedJaxpr, carried: Sequence[Any], sends: int) -> list[Any]:
    """Return the results of those products that `carried` depends on and that wait for one of `sends` collectives."""
    needed, products = set(_variables(carried)), list[JaxprEqn]()
    for eqn in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(_variables(eqn.invars))
            products += [eqn] if eqn.primitive.name == "dot_general" else []
    products.reverse()
    done = list(accumulate(map(flops_of, products)))
    places = [next(i for i, n in enumerate(done) if n >= share * done[-1]) for share in _WAITING.get(sends, ()) if done]
    return [products[i].outvars[0] for i in places]


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (x for x in atoms if not isinstance(x, Literal))
