"""Refuses a run or a proof before it is built if its batch or state cannot fit into memory.

Only a lower bound is counted, sharded: no activations, and for a run no gradients or working copies (`jdp plan`
compiles the step and counts them). It is compared with the total memory, not with the free memory, so a run that is
refused could not have started.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.machine import memory_bytes
from jdp.core.precision import Precision
from jdp.core.sharding.host_memory import PINNED
from jdp.core.sharding.placement import bytes_per_device
from jdp.core.state import TrainState
from jdp.core.types import Batch, PyTree


def check_batch(batch: Batch, rows: int) -> None:
    """Check this process' part of a global batch against this machine's memory. Raises ValueError."""
    held, memory = _total(batch) // jax.process_count(), memory_bytes()
    if memory is not None and held > memory:
        raise UserError(
            f"a batch must fit into memory; train.batch_size = {rows} makes {format_bytes(held)} of samples a step in "
            f"a process, and this machine has {format_bytes(memory)}: lower it, or the size of a sample"
        )


def check_state(state: TrainState, mesh: Mesh, strategy: str) -> None:
    """Check the sharded state of weights, optimizer and model. Raises ValueError."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    held = sum(
        bytes_per_device(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape), leaf.dtype, 1)
        for leaf in jax.tree.leaves(state)
        if on_cpu or getattr(leaf.sharding, "memory_kind", None) != PINNED
    )
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices if device.platform != "cpu"]
    available = min(filter(None, limits), default=math.inf)  # infinity: unknown
    described = f"a device has {format_bytes(available)}"
    if on_cpu and devices and (memory := memory_bytes()) is not None:
        share = f", which {len(devices)} devices share" if len(devices) > 1 else ""
        available, described = memory / len(devices), f"this machine has {format_bytes(memory)}{share}"
    if held > available:
        raise UserError(
            "its weights and the optimizer's state must fit into the devices' memory; a model of "
            f"{sum(leaf.size for leaf in jax.tree.leaves(state.params)):,} parameters needs {format_bytes(held)} for "
            f"them on each of {mesh.size} devices under {strategy}, and {described}: make the model smaller"
            f"{'' if strategy == 'zero3' else ', or shard more (strategy)'}; `jdp plan` counts the rest"
        )


def check_proof(state: TrainState, *, devices: int, steps: int, precision: Precision, available: int | None) -> None:
    """Check a proof: its reference and bounds at every step, and a run's state, gradients and copies on all devices.

    The virtual devices share this machine's memory. Raises ValueError.
    """
    parameters, state_bytes = sum(leaf.size for leaf in jax.tree.leaves(state.params)), _total(state)
    copies = parameters * (precision.compute_dtype.itemsize + precision.reduce_dtype.itemsize)
    record, live = 2 * (steps + 1) * state_bytes, devices * (state_bytes + copies)
    if available is not None and record + live > available:
        raise UserError(
            f"A proof runs the experiment as it is, in this machine's memory: {parameters:,} parameters make "
            f"{format_bytes(state_bytes)} of state; {devices} devices × (state + {format_bytes(copies)} of gradients "
            f"and working copy) + 2 × ({steps} + 1) steps that are kept × state = {format_bytes(record + live)}, "
            f"activations not counted, but {format_bytes(available)} are available. "
            "Prove a smaller model, fewer steps or fewer devices (such as --model.layers 2, "
            "--model.width 128, --steps 3, --devices 2)."
        )


def _total(tree: PyTree) -> int:
    return sum(bytes_per_device(leaf.shape, leaf.dtype, 1) for leaf in jax.tree.leaves(tree))
