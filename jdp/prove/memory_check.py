"""Whether a proof fits into this machine's memory, before it starts.

Three things are held at once: the reference and the bounds at every step; the run at hand on all its virtual devices,
which share this machine's memory; its gradients and working copies. Activations are not counted: what is said here is
the least that is needed.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jdp.core.precision import Precision
from jdp.core.state import TrainState


def check_room(state: TrainState, *, devices: int, steps: int, precision: Precision, available: int | None) -> None:
    """Raise ValueError if the proof needs more bytes than are available.

    Args:
        state: abstract.
        devices: of the largest run; under `ddp` each holds a whole state.
        steps: of each run.
        precision: dtypes of the working copy and the gradients.
        available: bytes; None: unknown, and nothing is checked.
    """
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    held = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
    copies = parameters * (precision.compute_dtype.itemsize + precision.reduce_dtype.itemsize)
    record, live = 2 * (steps + 1) * held, devices * (held + copies)
    if available is not None and record + live > available:
        raise ValueError(
            f"A proof runs the experiment as it is, in this machine's memory: {parameters:,} parameters make "
            f"{_gib(held)} of state; {devices} devices × (state + {_gib(copies)} of gradients and working copy) + 2 × "
            f"({steps} + 1) steps that are kept × state = {_gib(record + live)}, activations not counted, but "
            f"{_gib(available)} are available. Prove a smaller model, fewer steps or fewer devices (such as "
            "--model.layers 2, --model.width 128, --steps 3, --devices 2)."
        )


def available_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of its control group; None where Linux is not."""
    try:
        table = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next(int(line.split()[1]) * 1024 for line in table.splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return math.prod(leaf.shape) * (8 if key else jnp.dtype(leaf.dtype).itemsize)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
