"""Model FLOPs of a step: what its mathematics needs, whatever the compiler makes of it.

The loss is traced forward, abstractly, and the multiplications and additions of its matrix products and convolutions
are counted, loops included. The backward pass costs twice the forward pass (one product for each operand's gradient),
so a step is three times that. Recomputation is not counted: model FLOPs utilisation (MFU, Chowdhery et al. 2022,
arXiv:2204.02311, appendix B) leaves it out by definition. Frozen parameters have no gradient, one of the three products
that each takes part in: their share of the parameters is left out of that third.
"""

import jax

from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_trace import trace_loss
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.tracing.flops import count_flops
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
