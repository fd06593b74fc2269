"""What a device's memory holds at a step's peak, by class, and whether a device can hold it.

`memory(compiled, step, state)`:
1. arguments are exact: parameters, optimizer state, batch, as the program takes them;
2. temporaries held at the peak (`liveness.py`) are working copies, gradients, or activations (`roles.py`);
3. what XLA allocates beyond that, gaps in its heap, is `unattributed`, so that the classes add up to XLA's number.

The workspace of cuDNN's attention is left out: a program compiled without a GPU has it empty (`u8[0]`). In the backward
pass it takes 4 x heads x queries x (width + 1) bytes while a call runs, up to 129 MiB in 74 programs that were
examined. It would raise the peak of five of them, by at most 43 MiB (1.3 % of their temporaries): the others' is
elsewhere.

`Memory.fits(memory_bytes)` compares it with what a device leaves to a program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdp.base.formatting import format_bytes, format_percent
from jdp.core.sharding.mesh import mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.memory.liveness import Buffer, Liveness
from jdp.foresight.memory.roles import OPTIMIZER, WEIGHTS, gradients, working_copies
from jdp.foresight.program.compiled import Compiled

CLASSES = {
    "parameters": "parameters (master weights, at rest)",
    "gradients": "gradients (and the optimizer's updates)",
    "optimizer": "optimizer state",
    "working": "working copy of the weights",
    "activations": "activations and temporaries",
    "batch": "batch",
    "other": "other (counters, keys, model state, metrics)",
    "unattributed": "gaps in the heap",
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
class Held:
    """Temporaries of one kind that are held at the peak."""

    role: str  # "working", "gradients" or "activations"; empty where they are not told apart
    count: int  # how many there are
    bytes: int  # of all of them
    dtype: str  # of each
    dims: tuple[int, ...]
    op_name: str | None  # of the operation that wrote them last
    source: str | None  # "file:line" of that; None: the program does not have it

    def __str__(self) -> str:
        times = f"{self.count} × " if self.count > 1 else ""
        source = f" from {self.source}" if self.source else ""
        role = f" ({self.role})" if self.role else ""
        return f"{format_bytes(self.bytes)}: {times}{self.dtype}{list(self.dims)}{role}{source}"


@dataclass(frozen=True)
class Headroom:
    """Whether a device's memory holds a step, and what has to be set for it."""

    fits: bool  # `needed` is at most `available`
    needed: int  # bytes that jax's pool must hold
    available: int  # bytes that it can have (`available_bytes`)
    fraction: float | None  # for XLA_CLIENT_MEM_FRACTION; None: jax's default is enough, or nothing is
    words: str  # all that as a sentence without its subject: "needs …: fits"


@dataclass(frozen=True)
class Memory:
    """Bytes per device at a step's peak, by class (`CLASSES` has them in words); they add up to `total`."""

    parameters: int  # as the program takes them, like optimizer state and batch; exact
    gradients: int  # gradients, their accumulators and reduced sums, whole or sharded, and the optimizer's updates
    optimizer: int
    working: int  # weights in compute dtype, gathered or cast
    activations: int  # everything else that is held: what the forward pass saves, and temporaries
    batch: int
    other: int  # counters, keys, model state; results that are not written into an argument
    unattributed: int  # what XLA allocates beyond the named buffers: gaps in its heap (fragmentation) and alignment
    saved: int = 0  # of `activations`, what the forward pass keeps for the backward pass
    # of "working", "gradients" and "activations", the most that each holds at any time of the step, which need not be
    # that of the peak
    most: Mapping[str, int] = field(default_factory=dict[str, int])
    outside: int = 0  # leaves on the device that the program does not take, as in an evaluation; not in `total`
    host: int = 0  # state and copies in the host's memory, for this device; not in `total`
    at: str | None = None  # "file:line" of what runs at the peak, or its jax name; None where the program has neither
    largest: tuple[Held, ...] = ()  # temporaries held at the peak, largest first, equal ones together

    @property
    def total(self) -> int:
        """What XLA allocates: arguments, temporaries, and results that are not written into an argument."""
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
    available = available_bytes(memory_bytes)
    words = f"needs {format_bytes(needed)} of the {format_bytes(memory_bytes)} that a device has"
    if needed > available:
        beside = f"{format_bytes(RESERVED_BYTES)} of it go to the CUDA context and NCCL"
        return Headroom(False, needed, available, None, f"{words}: does not fit; {beside}")
    if needed <= DEFAULT_FRACTION * memory_bytes:
        return Headroom(True, needed, available, None, f"{words}: fits")
    fraction = min(math.ceil(1000 * needed / memory_bytes) / 1000, 1.0)
    advice = f"jax takes {format_percent(DEFAULT_FRACTION)} of it by default: set XLA_CLIENT_MEM_FRACTION={fraction:g}"
    return Headroom(True, needed, available, fraction, f"{words}: fits, but {advice}")


def available_bytes(memory_bytes: int) -> int:
    """Return what jax's pool can have of a device's memory: all but `RESERVED_BYTES` for the CUDA context and NCCL."""
    return max(memory_bytes - RESERVED_BYTES, 0)


def memory(compiled: Compiled, step: Step, state: TrainState) -> Memory:
    """Divide what a compiled step holds at its peak into classes."""
    live = Liveness(compiled.program)

    def argument_bytes(prefix: str) -> int:
        taken = (b for b in live.buffers if b.home == "argument" and not b.on_host)
        return sum(b.bytes for b in taken if (b.argument or "").startswith(prefix))

    arguments = {"parameters": WEIGHTS, "optimizer": OPTIMIZER, "batch": "batch"}
    arguments = {name: argument_bytes(prefix) for name, prefix in arguments.items()}
    _, held = live.peak
    working, graded = working_copies(live), gradients(live)
    roles = {b: "working" if b in working else "gradients" if b in graded else "activations" for b in live.temporaries}
    sizes = {role: sum(b.bytes for b in held if roles[b] == role) for role in _ROLES}
    named, results = sum(arguments.values()), compiled.output_bytes - compiled.alias_bytes
    # Nothing is lost where an argument has no name: whatever the program takes beside these is "other".
    other = max(compiled.argument_bytes - named, 0) + results
    beyond = compiled.total_bytes - named - other - sum(sizes.values())
    _subtract(sizes, max(-beyond, 0))
    plan = step.plan.on(mesh_of(state) or step.plan.mesh)
    at_rest = sum(placement.bytes_per_device for placement in plan.placements(state) if not placement.on_host)
    at, largest = at_peak(live, roles)
    saved = sum(b.bytes for b in held if roles[b] == "activations" and _is_saved(b))
    return Memory(
        **arguments,
        **sizes,
        other=other,
        unattributed=max(beyond, 0),
        saved=min(saved, sizes["activations"]),
        most={role: live.most(b for b in live.temporaries if roles[b] == role)[1] for role in _ROLES},
        outside=max(at_rest - argument_bytes("state"), 0),
        host=compiled.host_bytes,
        at=at,
        largest=largest,
    )


_ROLES = ("working", "gradients", "activations")


def _subtract(sizes: dict[str, int], shared: int) -> None:
    """Subtract results written into an operand, which `Liveness` holds and XLA does not allocate, largest class first.

    It happens where an optimizer's update of convolution kernels is fused with transposes. XLA's own peak is then less
    by the operands that die there; `Liveness` has no rule to reuse them.
    """
    for role in sorted(sizes, key=lambda role: -sizes[role]):
        less = min(shared, sizes[role])
        sizes[role] -= less
        shared -= less


def _is_saved(buffer: Buffer) -> bool:
    """Return True if the forward pass writes it and the backward pass ("transpose(jvp(" to jax) reads it."""
    written = any(_pass(write.step.op_name) == "forward" for write in buffer.writes)
    return written and any(_pass(step.op_name) == "backward" for _, step in buffer.reads)


def _pass(op_name: str | None) -> str | None:
    if op_name is None:
        return None
    return "backward" if "transpose(jvp" in op_name else "forward" if "jvp(" in op_name else None


def at_peak(live: Liveness, roles: Mapping[Buffer, str]) -> tuple[str | None, tuple[Held, ...]]:
    """Return what runs at the peak (`Memory.at`), and the largest buffers held then, equal ones together."""
    (time, held), counted = live.peak, Counter[Held]()
    for buffer in held:
        step = max((w for w in buffer.writes if w.time <= time), key=lambda w: w.time, default=buffer.writes[0]).step
        source = live.program.source_line(step)
        counted[Held(roles.get(buffer, ""), 1, buffer.bytes, buffer.dtype, buffer.dims, step.op_name, source)] += 1
    all_of = [
        Held(one.role, count, count * one.bytes, one.dtype, one.dims, one.op_name, one.source)
        for one, count in counted.items()
    ]
    running = live.schedule[time][1]
    at = live.program.source_line(running) or running.op_name
    return at, tuple(sorted(all_of, key=lambda one: -one.bytes)[:_LISTED])


_LISTED = 12
