"""The FLOPs of the matrix products and convolutions in a jaxpr."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # cuDNN's


def count_flops(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products and convolutions in a jaxpr: 2 for each multiplication and addition.

    A scan counts once for each iteration, a `while` loop once, and a condition as its branch with the most FLOPs.
    """
    return sum(times * flops_of(eqn) for eqn, times in _products(jaxpr))


def _products(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield each product, and how often it runs."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated") or name.startswith(_ATTENTION):
            yield eqn, times
        elif name == "cond":
            yield from _products(max(jaxprs_in_params(eqn.params), key=count_flops), times)
        else:
            rounds = eqn.params["length"] if name == "scan" else 1
            if name == "shard_map":  # its body is the work of one device
                manual = eqn.params.get("newly_manual_axes") or eqn.params["manual_axes"]  # its name in jax 0.10
                rounds = math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
            for inner in jaxprs_in_params(eqn.params):
                yield from _products(inner, times * rounds)


def flops_of(eqn: Any) -> int:
    """Return the FLOPs of one matrix product, convolution or call of cuDNN's attention."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    # cuDNN's attention, with masked scores: two products forward, five backward
    queries, keys = eqn.invars[0].aval, eqn.invars[1].aval
    length = keys.shape[1 if eqn.params["layout"] == 0 else 2]  # [batch, length, heads, width], or heads first
    if name.startswith(_ATTENTION[1]):
        return 2 * 5 * length * queries.size
    return 2 * length * (queries.size + eqn.outvars[0].aval.size)
