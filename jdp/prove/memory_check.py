"""Check that a proof fits into this machine's memory, before it starts.

Three things are in memory at once: the reference with the bounds at every step; a run's state on all its virtual
devices; its gradients and working copies. Activations are not counted, so this is a lower bound.
"""

from __future__ import annotations

import math

import jax

from jdp.base.formatting import format_bytes
from jdp.core.precision import Precision
from jdp.core.sharding.placement import bytes_per_device
from jdp.core.state import TrainState


def check_memory(state: TrainState, *, devices: int, steps: int, precision: Precision, available: int | None) -> None:
    """Raise ValueError if a proof needs more memory than is available."""
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    state_bytes = sum(bytes_per_device(leaf.shape, leaf.dtype, 1) for leaf in jax.tree.leaves(state))
    copies = parameters * (precision.compute_dtype.itemsize + precision.reduce_dtype.itemsize)
    record, live = 2 * (steps + 1) * state_bytes, devices * (state_bytes + copies)
    if available is not None and record + live > available:
        raise ValueError(
            f"A proof runs the experiment as it is, in this machine's memory: {parameters:,} parameters make "
            f"{format_bytes(state_bytes)} of state; {devices} devices × (state + {format_bytes(copies)} of gradients "
            f"and working copy) + 2 × ({steps} + 1) steps that are kept × state = {format_bytes(record + live)}, "
            f"activations not counted, but {format_bytes(available)} are available. "
            "Prove a smaller model, fewer steps or fewer devices (such as --model.layers 2, "
            "--model.width 128, --steps 3, --devices 2)."
        )
