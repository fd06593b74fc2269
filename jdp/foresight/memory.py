"""Memory of a device by class, memory of a host, and whether they hold a step.

`memory(compiled, step, state)` adds up what XLA allocates: arguments + results − results written into donated
arguments + temporaries + code. Arguments are told apart by name; temporaries (gradients, the working copy of the
weights, activations) are XLA's total, with the gaps in its heap.

The workspace of cuDNN's attention is left out: a program compiled without a GPU has it empty (`u8[0]`). In the backward
pass it takes 4 x heads x queries x (width + 1) bytes while a call runs, up to 129 MiB in 74 programs that were
examined. It would raise the peak of five of them, by at most 43 MiB (1.3 % of their temporaries): the others' is
elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_bytes, format_percent
from jdp.core.sharding.mesh import mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.program.compiled import Compiled

CLASSES = {
    "parameters": "parameters (master weights, at rest)",
    "optimizer": "optimizer state",
    "batch": "batch",
    "other": "other (counters, keys, model state, metrics)",
    "temporaries": "temporaries (gradients, working copy, activations)",
    "code": "compiled code",
}
"""Class -> in words, in the order of tables."""

DEFAULT_FRACTION = 0.75
"""Of a GPU's memory, what a jax process takes at most unless XLA_CLIENT_MEM_FRACTION says otherwise
(https://docs.jax.dev/en/latest/201/gpu-memory.html)."""

RESERVED_BYTES = 2 * 2**30
"""Assumed to be taken on each GPU outside of jax's pool: the CUDA context (0.1 to 0.6 GiB: ggml-org/llama.cpp pull
requests 20595 and 23604) and NCCL's buffers (0.5 to 1.6 GiB, more with more communicators: NVIDIA/nccl issues 964, 864;
context and NCCL on 8 H100s 1.06 GB: issue 1685)."""


@dataclass(frozen=True)
class Headroom:
    """Whether a device's memory holds a step, and what has to be set for it."""

    fits: bool  # `needed` is at most `available`
    needed: int  # bytes that jax's pool must hold
    available: int  # bytes that it can have: all but `RESERVED_BYTES`
    fraction: float | None  # for XLA_CLIENT_MEM_FRACTION; None: jax's default is enough, or nothing is
    words: str  # all that as a sentence without its subject: "needs …: fits"


@dataclass(frozen=True)
class Memory:
    """Bytes per device of a step, by class (`CLASSES` has them in words); they add up to `total`."""

    parameters: int  # as the program takes them, like optimizer state and batch
    optimizer: int
    batch: int
    other: int  # counters, keys, model state; results that are not written into an argument
    temporaries: int  # everything else that XLA allocates while the step runs
    code: int
    outside: int = 0  # leaves on the device that the program does not take, as in an evaluation; not in `total`
    host: int = 0  # state and copies in the host's memory, for this device; not in `total`

    @property
    def total(self) -> int:
        """What XLA allocates."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, int]:
        """Return class -> bytes per device, in the order of `CLASSES`."""
        return {name: getattr(self, name) for name in CLASSES}

    def __str__(self) -> str:
        rows = [(words, self.by_class()[name]) for name, words in CLASSES.items()]
        width = max(len(words) for words, _ in rows)
        lines = [
            f"{words:{width}}  {format_bytes(count):>9}  {format_percent(count / (self.total or 1)):>6}"
            for words, count in rows
        ]
        host = [f"{'in host memory, per device':{width}}  {format_bytes(self.host):>9}"] if self.host else []
        return "\n".join([*lines, f"{'total per device':{width}}  {format_bytes(self.total):>9}", *host])

    def fits(self, memory_bytes: int) -> Headroom:
        """Compare with a device of `memory_bytes`.

        jax allocates from one pool, by default `DEFAULT_FRACTION` of the memory. More than one program at a time, and
        checkpoints on their way to the host, are not counted.
        """
        return headroom(self.total + self.outside, memory_bytes)


def headroom(needed: int, memory_bytes: int) -> Headroom:
    """Compare the bytes that a program needs with a device of `memory_bytes`, as `Memory.fits` does."""
    available = max(memory_bytes - RESERVED_BYTES, 0)
    words = f"needs {format_bytes(needed)} of the {format_bytes(memory_bytes)} that a device has"
    if needed > available:
        beside = f"{format_bytes(RESERVED_BYTES)} of it go to the CUDA context and NCCL"
        return Headroom(False, needed, available, None, f"{words}: does not fit; {beside}")
    if needed <= DEFAULT_FRACTION * memory_bytes:
        return Headroom(True, needed, available, None, f"{words}: fits")
    fraction = min(math.ceil(1000 * needed / memory_bytes) / 1000, 1.0)
    advice = f"jax takes {format_percent(DEFAULT_FRACTION)} of it by default: set XLA_CLIENT_MEM_FRACTION={fraction:g}"
    return Headroom(True, needed, available, fraction, f"{words}: fits, but {advice}")


def memory(compiled: Compiled, step: Step, state: TrainState) -> Memory:
    """Divide what XLA allocates for a compiled step into classes."""
    sizes = compiled.program.argument_bytes

    def argument_bytes(prefix: str) -> int:
        return sum(size for name, size in sizes.values() if name.startswith(prefix))

    prefixes = {"parameters": "state.params", "optimizer": "state.opt_state", "batch": "batch"}
    named = {name: argument_bytes(prefix) for name, prefix in prefixes.items()}
    plan = step.plan.on(mesh_of(state) or step.plan.mesh)
    at_rest = sum(placement.bytes_per_device for placement in plan.placements(state) if not placement.on_host)
    return Memory(
        **named,
        # Nothing is lost where an argument has no name: whatever the program takes beside these is "other".
        other=compiled.argument_bytes - sum(named.values()) + compiled.output_bytes - compiled.alias_bytes,
        temporaries=compiled.temp_bytes,
        code=compiled.code_bytes,
        outside=max(at_rest - argument_bytes("state"), 0),
        host=compiled.host_bytes,
    )


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the memory of the fullest host.

    Attributes:
        copies: of `keep_in_memory`, two generations, with the neighbour's parts.
        staging: of a save, until it is in storage.
        offloaded: of the devices' arrays.
        available: of the host; None where it is not known.
        devices: of the host.
    """

    copies: int
    staging: int
    offloaded: int
    available: int | None
    devices: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.copies + self.staging + self.offloaded

    @property
    def fits(self) -> bool:
        """False where a host is known to have less."""
        return self.available is None or self.total <= self.available

    @property
    def words(self) -> str:
        """What a host holds, in a sentence."""
        parts = {"copies of the state": self.copies, "a save that is written": self.staging}
        parts |= {"offloaded arrays": self.offloaded} if self.offloaded else {}
        listed = " + ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items())
        has = f" of {format_bytes(self.available)}" if self.available is not None else " (--host-memory compares it)"
        return f"a host's memory holds {listed} = {format_bytes(self.total)}{has}{'' if self.fits else ': too little'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as `jdp plan --json` prints it, in bytes."""
        return {
            "copies": self.copies,
            "staging": self.staging,
            "offloaded": self.offloaded,
            "available": self.available,
            "fits": self.fits,
        }
