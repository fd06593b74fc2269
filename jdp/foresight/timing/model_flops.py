"""Model FLOPs of a step: what its mathematics needs, whatever the compiler makes of it.

The loss is traced forward, abstractly, and the multiplications and additions of its matrix products and convolutions
are counted, loops included. The backward pass costs twice the forward pass (one product for each operand's gradient),
so a step is three times that. Recomputation is not counted: model FLOPs utilisation (MFU, Chowdhery et al. 2022,
arXiv:2204.02311, appendix B) leaves it out by definition. Frozen parameters have no gradient, one of the three products
that each takes part in: their share of the parameters is left out of that third.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax

from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_trace import trace_loss
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch


def model_flops(step: Step, state: TrainState, batch: Batch) -> float:
    """Return the FLOPs of one training step over the global batch, all devices together."""
    rows = batch_rows(batch)
    forward = count_flops(trace_loss(step.loss_fn, step.precision, state, batch, rows).jaxpr)
    if (trained := state.static.trained) is None:
        return 3.0 * forward
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    share = sum(size for size, is_trained in zip(sizes, trained, strict=True) if is_trained) / sum(sizes)
    return (2 + share) * forward


def count_flops(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products and convolutions in a jaxpr: 2 for each multiplication and addition.

    A scan counts as often as it runs, a `while` loop of unknown length once, of branches the one with most FLOPs.
    """
    return sum(map(_operation_flops, jaxpr.eqns))


def _operation_flops(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    if name.startswith("dot_product_attention_fwd"):  # cuDNN's: all scores, as they are counted of products
        queries, keys = eqn.invars[0].aval, eqn.invars[1].aval
        length = keys.shape[1 if eqn.params["layout"] == 0 else 2]  # [batch, length, heads, width], or heads first
        return 2 * length * (queries.size + eqn.outvars[0].aval.size)
    if name == "cond":
        return max(map(count_flops, _jaxprs(eqn.params["branches"])))
    times = eqn.params["length"] if name == "scan" else 1
    if name == "shard_map":  # its body is one device's share
        manual = eqn.params.get("newly_manual_axes") or eqn.params["manual_axes"]  # the name in jax 0.10; since
        times = math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
    return times * sum(map(count_flops, _jaxprs(eqn.params.values())))


def _jaxprs(values: Iterable[Any]) -> list[Any]:
    """Return the jaxprs among a primitive's parameters; of a custom derivative only the function itself."""
    jaxprs = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]
