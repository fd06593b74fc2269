"""The report of a compiled step (`StepReport`), and its memory: of a device by class, and of a host.

XLA's allocations are arguments + results − results written into donated arguments + temporaries + code. The name of an
argument gives its class; temporaries (gradients, the working copy of the weights, activations) are XLA's total. The
workspace of cuDNN's attention is not counted, because a program compiled without a GPU has an empty one (`u8[0]`). In
74 programs it would raise the peak of five, by at most 43 MiB (1.3 % of their temporaries).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_percent, format_seconds
from jdp.core.sharding.axes import factors
from jdp.core.sharding.mesh import mesh_of
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.timeline import Timeline, timeline
from jdp.foresight.traffic.contract import Sent, sent_table

CLASSES = {
    "parameters": "parameters (master weights, at rest)",
    "optimizer": "optimizer state",
    "batch": "batch",
    "other": "other arguments and results",
    "temporaries": "temporaries (gradients, working copy, activations)",
    "code": "compiled code",
}
"""Class -> its words, in the order of tables."""

DEFAULT_FRACTION = 0.75
"""Share of a GPU's memory in jax's pool, unless XLA_CLIENT_MEM_FRACTION is set
(https://docs.jax.dev/en/latest/201/gpu-memory.html)."""

RESERVED_BYTES = 2 * 2**30
"""Assumed use of each GPU outside jax's pool: the CUDA context (0.1 to 0.6 GiB: ggml-org/llama.cpp 20595 and 23604) and
NCCL's buffers (0.5 to 1.6 GiB: NVIDIA/nccl 964, 864; both on 8 H100s 1.06 GB: 1685)."""


@dataclass(frozen=True)
class Headroom:
    """Whether a device's memory holds a step, and the setting that it needs."""

    fits: bool  # `needed` is at most `available`
    needed: int  # bytes that jax's pool must hold
    available: int  # bytes that the pool can have: all but `RESERVED_BYTES`
    fraction: float | None  # XLA_CLIENT_MEM_FRACTION; None: jax's default is enough, or no fraction is
    words: str  # the sentence without its subject: "needs …: fits"


@dataclass(frozen=True)
class HeldArgument:
    path: str  # in the call: "params/layers/kernel"
    bytes: int  # of its shard in the program
    donated: bool = False  # a result may take its memory
    in_place: bool = False  # a result does


@dataclass(frozen=True)
class Memory:
    """Bytes per device of a step, by class (words in `CLASSES`); they add up to `total`."""

    parameters: int = 0  # the program's arguments, like optimizer state and batch
    optimizer: int = 0
    batch: int = 0
    other: int = 0  # counters, keys, model state, arguments of no known class; results
    temporaries: int = 0  # XLA's other allocations while the step runs
    code: int = 0
    outside: int = 0  # leaves on the device that are not arguments, as in an evaluation; not in `total`
    host: int = 0  # state and copies in the host's memory, for this device; not in `total`
    results: int = 0  # the part of `other` that is not written into an argument
    arguments: tuple[HeldArgument, ...] = field(default=(), repr=False)  # in the order of the call

    @property
    def total(self) -> int:
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, int]:
        """Return class -> bytes per device, in the order of `CLASSES`."""
        return {name: getattr(self, name) for name in CLASSES}

    def table(self) -> list[tuple[str, ...]]:
        """Return headings, and a row for each class, the largest arguments, host memory and the total."""
        share = lambda count: format_percent(count / (self.total or 1))  # noqa: E731
        rows = [("held on a device", "bytes", "")]
        rows += [(CLASSES[name], format_bytes(size), share(size)) for name, size in self.by_class().items() if size]
        for leaf in sorted(self.arguments, key=lambda leaf: -leaf.bytes)[:_LISTED]:
            donation = "updated in place" if leaf.in_place else "donated, not updated in place" if leaf.donated else ""
            rows.append((f"- {leaf.path}", format_bytes(leaf.bytes), donation))
        rows += [("in host memory, per device", format_bytes(self.host), "")] if self.host else []
        return [*rows, ("total per device", format_bytes(self.total), "")]

    def to_json(self) -> dict[str, Any]:
        arguments = [asdict(each) for each in self.arguments]
        return {"arguments": arguments, "results": self.results, **self.by_class(), "total": self.total}

    def fits(self, memory_bytes: int) -> Headroom:
        """Compare with a device of `memory_bytes`.

        jax allocates from one pool, by default `DEFAULT_FRACTION` of the memory. Further programs, and checkpoints on
        their way to the host, are not counted.
        """
        needed, available = self.total + self.outside, max(memory_bytes - RESERVED_BYTES, 0)
        fraction, verdict = None, "fits"
        if needed > available:
            verdict = f"does not fit; {format_bytes(RESERVED_BYTES)} of it go to the CUDA context and NCCL"
        elif needed > DEFAULT_FRACTION * memory_bytes:
            fraction = min(math.ceil(1000 * needed / memory_bytes) / 1000, 1.0)
            default = f"jax takes {format_percent(DEFAULT_FRACTION)} of it by default"
            verdict = f"fits, but {default}: set XLA_CLIENT_MEM_FRACTION={fraction:g}"
        words = f"needs {format_bytes(needed)} of the {format_bytes(memory_bytes)} that a device has: {verdict}"
        return Headroom(needed <= available, needed, available, fraction, words)


_LISTED = 8


def memory_by_argument(compiled: Compiled, arguments: Sequence[tuple[str, str, bool]], outside: int = 0) -> Memory:
    """Divide XLA's allocations for a compiled step: its arguments, each a (path, class, donated), and the rest."""
    in_place, sizes = {number for _, number, _ in compiled.program.written_into}, compiled.program.argument_bytes
    leaves, by_kind = list[HeldArgument](), Counter[str]()
    for number, (path, kind, donated) in enumerate(arguments):
        _, size = sizes.get(number, ("", 0))
        leaves.append(HeldArgument(path, size, donated, number in in_place))
        by_kind[kind] += size
    results = compiled.output_bytes - compiled.alias_bytes
    classes = {kind: by_kind[kind] for kind in ("parameters", "optimizer", "batch")}
    return Memory(
        **classes,
        other=compiled.argument_bytes - sum(classes.values()) + results,
        temporaries=compiled.temp_bytes,
        code=compiled.code_bytes,
        outside=outside,
        host=compiled.host_bytes,
        results=results,
        arguments=tuple(leaves),
    )


_PREFIXES = {"state.params": "parameters", "state.opt_state": "optimizer", "batch": "batch"}


def memory(compiled: Compiled, step: Step, state: TrainState) -> Memory:
    """Divide XLA's allocations for a compiled jdp step."""
    arguments = list[tuple[str, str, bool]]()
    for _, (name, _) in sorted(compiled.program.argument_bytes.items()):
        kind = next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), "other")
        arguments.append((path_of_name(name), kind, name.startswith("state.")))
    plan = step.plan.on(mesh_of(state) or step.plan.mesh)
    at_rest = sum(placement.bytes_per_device for placement in plan.placements(state) if not placement.on_host)
    taken = sum(size for name, size in compiled.program.argument_bytes.values() if name.startswith("state"))
    return memory_by_argument(compiled, arguments, max(at_rest - taken, 0))


def path_of_name(name: str) -> str:
    """Return the path of an argument's name: `state.params['layers']['kernel']` -> params/layers/kernel."""
    keys = re.findall(r"\['?(.*?)'?\]|\.(\w+)", name.removeprefix("state"))
    return "/".join(key or attribute for key, attribute in keys) or name


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the memory of the fullest host."""

    copies: int  # two generations of `keep_in_memory`, with the neighbour's parts
    staging: int  # a save on its way to storage
    offloaded: int  # arrays of its devices
    available: int | None  # the host's memory; None if unknown
    devices: int  # number of the host's devices

    @property
    def total(self) -> int:
        return self.copies + self.staging + self.offloaded

    @property
    def fits(self) -> bool:
        return self.available is None or self.total <= self.available

    @property
    def words(self) -> str:
        parts = {"copies of the state": self.copies, "a save that is written": self.staging}
        parts |= {"offloaded arrays": self.offloaded} if self.offloaded else {}
        listed = " + ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items())
        has = f" of {format_bytes(self.available)}" if self.available is not None else " (--host-memory compares it)"
        return f"a host's memory holds {listed} = {format_bytes(self.total)}{has}{'' if self.fits else ': too little'}"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("copies", "staging", "offloaded", "available", "fits")}


# The report of one compiled step, from jdp or not; that of a jdp step (`verify.Report`) compares more.


@dataclass(frozen=True, kw_only=True, repr=False)
class StepReport:
    """The memory, traffic and schedule of a compiled step; breaches, strays, symptoms and notes are sentences."""

    name: str  # the strategy, or the name of the function
    kept: bool | None  # it sends at most 1.02 times its bound; None if nothing is judged
    target: str  # the devices' name
    mesh: dict[str, int]  # axis -> size
    wire_bytes_per_device: float  # bytes that a device sends a step; with a strategy, along the batch's axes only
    bound_wire_bytes_per_device: float | None = None  # bytes that it may send; None if nothing is compared
    bound_words: str = ""  # the source of the bound
    ratio: float | None = None  # bytes sent / bound; None if nothing is compared, or the bound is 0
    memory: Memory = field(default_factory=Memory)  # bytes per device by class and argument
    headroom: Headroom | None = None  # whether a device can hold it; None if the device's memory is unknown
    sent: tuple[Sent, ...] = ()  # tensors by collective and source line, most bytes first
    # the simulated schedule; None if the device's rates are unknown, or the step does not fit
    timeline: Timeline | None = field(default=None, repr=False)
    breaches: tuple[str, ...] = ()  # the reasons why the bound is not kept
    strays: tuple[str, ...] = ()  # further traffic that belongs to no parameter
    symptoms: tuple[str, ...] = ()  # signs of something unintended (`traffic/faults.py`); they break no contract
    notes: tuple[str, ...] = ()  # assumptions behind the numbers

    @property
    def heading(self) -> str:
        split = {name: count for name, count in self.mesh.items() if count > 1} or self.mesh
        return f"{self.name} on {factors(split)} for {self.target}"

    @property
    def verdict(self) -> str:
        if self.bound_wire_bytes_per_device is None:
            return f"{self.sends[0].upper()}{self.sends[1:]}."
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of "
        bound = format_bytes(self.bound_wire_bytes_per_device)
        return f"{'Kept' if self.kept else 'BROKEN'}: {self.sends}, {ratio}the {bound} {self.bound_words}."

    @property
    def sends(self) -> str:
        return f"a device sends {format_bytes(self.wire_bytes_per_device)} a step"

    @property
    def schedule(self) -> list[str]:
        time = self.timeline
        if time is None:
            return []
        hidden = format_percent(1 - time.exposed_fraction)
        sent = f"{format_seconds(time.communication_seconds)} of communication, {hidden} of it hidden"
        computing = f"{format_seconds(time.compute_seconds)} of computing"
        return [f"A step takes {format_seconds(time.step_seconds)}: {computing}, {sent}."]

    def comparison(self) -> list[list[str]]:
        """Return further paragraphs: lists of lines."""
        return []

    def __str__(self) -> str:
        held = [f"It {self.headroom.words}."] if self.headroom is not None else []
        paragraphs = [[self.heading, self.verdict, *self.schedule, *held], *self.comparison()]
        paragraphs += [align_columns(self.memory.table())] if self.memory.total else []
        paragraphs += [align_columns(sent_table(self.sent))] if self.sent else []
        lists = {"Breaches": self.breaches, "Sent besides": self.strays, "Symptoms": self.symptoms, "Notes": self.notes}
        paragraphs += [[f"{title}:", *(f"- {words}" for words in items)] for title, items in lists.items() if items]
        return "\n\n".join("\n".join(lines) for lines in paragraphs)

    def __repr__(self) -> str:
        sentences = [f"{self.heading}.", self.verdict, *(self.schedule or self.breaches[:1])]
        return f"<{type(self).__name__} of {' '.join(sentences)} print() shows all>"

    def to_json(self) -> dict[str, Any]:
        seconds = "step_seconds compute_seconds communication_seconds exposed_seconds"
        headroom = None if self.headroom is None else asdict(self.headroom)
        return {
            **json_values(self, "kept name target mesh wire_bytes_per_device bound_wire_bytes_per_device ratio"),
            "memory": {**self.memory.to_json(), "headroom": headroom, "host": self.memory.host},
            "sent": [asdict(tensor) for tensor in self.sent],
            "schedule": self.timeline and json_values(self.timeline, seconds),
            **json_values(self, "breaches strays symptoms notes"),
        }


def json_values(source: object, names: str) -> dict[str, Any]:
    """Return attributes by name, tuples as lists; None for an attribute that `source` lacks."""
    values = {name: getattr(source, name, None) for name in names.split()}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}


def on_target(held: Memory, compiled: Compiled, target: str | Target) -> dict[str, Any]:
    """Return a report's `target`, `memory`, `headroom` and `timeline`; a name alone gives no simulated time."""
    room = line = None
    if isinstance(target, Target):
        room = None if target.memory_bytes is None else held.fits(target.memory_bytes)
        if target.chip is not None and (room is None or room.fits):
            line = timeline(compiled.program, target)
    return {"target": str(target), "memory": held, "headroom": room, "timeline": line}


CPU_PROGRAM = (
    "this is XLA:CPU's program: it makes no reduce-scatter from a sharding constraint and has its own dtypes; the "
    "target h100:1x8 judges the traffic of GPUs"
)
"""The note on a report of a program for CPUs."""


def caveats_on(sent: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Yield a note for each caveat of pairs (kind of collective, caveats)."""
    for caveat in dict.fromkeys(caveat for _, caveats in sent for caveat in caveats):
        kinds = dict.fromkeys(kind for kind, caveats in sent if caveat in caveats)
        yield f"{', '.join(kinds)} {caveat}, so it may send more than is reported here"
