"""What a plan reports: an estimate for each candidate, which of them to take, and why.

An `Estimate` holds what was read off one compiled program: memory by class, traffic against theory, the timeline. A
`PlanReport` holds all of them, in words (`str`), as a table, and as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_percent, format_rate, format_seconds
from jdp.base.notebook import Drawn
from jdp.foresight.candidates.max_batch import MaxBatch
from jdp.foresight.candidates.meshes import MeshSearch
from jdp.foresight.candidates.smallest_cluster import Smallest
from jdp.foresight.cost.bill import Bill
from jdp.foresight.cost.goodput import Goodput
from jdp.foresight.memory.host import HostMemory
from jdp.foresight.memory.peak import Headroom, Memory
from jdp.foresight.memory.zero_formula import zero_bytes
from jdp.foresight.targets.relocate import candidate_name
from jdp.foresight.timing.timeline import Timeline
from jdp.foresight.verify import Report


@dataclass(frozen=True)
class Settings:
    """What is set already, so that advice does not ask for it; a field that is None is not known."""

    precision: str | None = None  # "fp32", "bf16" or "fp8"
    compiler: str | None = None  # "default", "overlap", "own" for the user's options, "none" without a preset
    remat: str | None = None  # the model's policy, such as "none" or "dots"; "" for a model that has none
    scan: bool | str | None = None  # False where layers are stored one by one
    attention: str | None = None  # "auto", "cudnn" or "xla"
    rows: int | None = None  # of a microbatch on a device
    max_batch: bool = False  # True where the largest batch was searched


@dataclass(frozen=True)
class Estimate:
    """What was read off one candidate's compiled program.

    Attributes:
        strategy, accumulate, remat, axes: the candidate; `remat` is None where the model's own policy was left as it
            is, `axes` where the mesh was.
        partitioning, partitioning_why: as the step settled them.
        memory: bytes per device by class; None when the step did not compile.
        headroom: whether a device can hold it; None where the device's memory is not known.
        host: what a host's memory holds, where the state is copied into it; None: that is not asked for.
        parameters, shards: how many parameters the model has, and how many devices share them (the `data` axis).
        state_bytes: of the whole state, each array counted once: what a checkpoint holds.
        report: traffic against the communication contract.
        timeline: the simulated schedule; None where the device's rates are not known, and of what does not fit, which
            takes no time as it cannot run.
        model_flops: FLOPs of the step's mathematics over the global batch (`timing.model_flops`).
        peak_flops: of one device, in the step's compute dtype; None where it is not known.
        tokens: tokens (or examples) of a global batch.
        devices: how many share the work.
        compile_seconds: what compiling took; 0 when it was found in the cache (`cached`).
        error: why the step did not compile; None when it did.
        settings: what the experiment has set already; of a step in Python only the compiler's options are known.
    """

    strategy: str
    accumulate: int
    remat: str | None
    axes: Mapping[str, int] | None = None
    partitioning: str | None = None
    partitioning_why: str = ""
    memory: Memory | None = None
    headroom: Headroom | None = None
    host: HostMemory | None = None
    parameters: int = 0
    shards: int = 1
    state_bytes: int = 0
    report: Report | None = None
    timeline: Timeline | None = field(default=None, repr=False)
    model_flops: float = 0.0
    peak_flops: float | None = None
    tokens: int = 0
    devices: int = 1
    compile_seconds: float = 0.0
    cached: bool = False
    error: str | None = None
    settings: Settings = field(default=Settings(), repr=False)

    @property
    def name(self) -> str:
        """Strategy, mesh, microbatches and rematerialisation policy, such as "zero1 K=4 remat=full"."""
        return candidate_name(self.strategy, self.accumulate, self.remat, self.axes)

    @property
    def fits(self) -> bool | None:
        """Whether it compiled and a device can hold it; None where the device's memory is not known."""
        if self.error is not None or (self.host is not None and not self.host.fits):
            return False
        return None if self.headroom is None else self.headroom.fits

    @property
    def available_bytes(self) -> int | None:
        """Bytes of a device's memory that the step can have; None where that is not known."""
        return None if self.headroom is None else self.headroom.available

    @property
    def closed_form_bytes(self) -> int | None:
        """Bytes of model state by ZeRO's closed form, 2 + 2 + 12 a parameter (`zero_bytes`); None if not compiled."""
        return zero_bytes(self.parameters, self.shards, self.strategy).total if self.parameters else None

    @property
    def bytes_per_device(self) -> int | None:
        """What a device holds at the step's peak; None when the step did not compile."""
        return None if self.memory is None else self.memory.total

    @property
    def step_seconds(self) -> float | None:
        """Simulated seconds of a step; None where they are not known, or a device cannot hold it."""
        return None if self.timeline is None else self.timeline.step_seconds

    @property
    def step_range(self) -> tuple[float, float] | None:
        """(least, most) seconds of a step by the error of published runs; None where that or the step is not known."""
        if self.timeline is None or self.timeline.error is None:
            return None
        factor = 1 + self.timeline.error
        return self.timeline.step_seconds / factor, self.timeline.step_seconds * factor

    @property
    def compute_parts(self) -> dict[str, float] | None:
        """Seconds of computing by what they are spent on, the most first; None where times are not known."""
        return None if self.timeline is None else {name: part.seconds for name, part in self.timeline.parts.items()}

    @property
    def exposed_fraction(self) -> float | None:
        """Share of the communication's time that no computation hides; 0 when nothing is sent."""
        return None if self.timeline is None else self.timeline.exposed_fraction

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: model FLOPs / (seconds × devices × peak) (Chowdhery et al. 2022, appendix B)."""
        if not self.step_seconds or self.peak_flops is None:
            return None
        return self.model_flops / (self.step_seconds * self.devices * self.peak_flops)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or examples) a second of all devices together; None where times are not known."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency T(1)/T(N): the step without its communication over the step with it.

        T(1) is one device doing this device's share of the work: a device by itself could often not hold the model.
        """
        if self.timeline is None or not self.timeline.step_seconds:
            return None
        return (self.timeline.compute_seconds + self.timeline.host_wait_seconds) / self.timeline.step_seconds

    @property
    def fits_in_words(self) -> str:
        """Cell of a table: "yes", "no", or "?" where the device's memory is not known."""
        return "?" if self.fits is None else "yes" if self.fits else "no"

    @property
    def speed_cells(self) -> tuple[str, ...]:
        """Cells of a table: communication hidden, waiting, step, MFU, tokens a second; "–" of what cannot run."""
        timeline = self.timeline
        if timeline is None:
            return ("–" if self.fits is False else "?",) * 5
        return (
            format_percent(1 - timeline.exposed_fraction) if timeline.communication_seconds else "–",
            format_seconds(timeline.exposed_seconds),
            format_seconds(timeline.step_seconds),
            "?" if self.mfu is None else format_percent(self.mfu),
            format_rate(self.tokens_per_second or 0),
        )

    def to_json(self) -> dict[str, Any]:
        """Return one of the `strategies` that `jdp plan --json` prints."""
        report, memory = self.report, self.memory
        found: dict[str, Any] = {
            "mesh": None if self.axes is None else dict(self.axes),
            "memory": None if memory is None else memory.by_class(),
            "host_bytes": 0 if memory is None else memory.host,
            "memory_most": None if memory is None else dict(memory.most),
            "memory_advice": None if self.headroom is None else self.headroom.words,
            "wire_bytes_per_device": None if report is None else report.wire_bytes_per_device,
            "theory_wire_bytes_per_device": None if report is None else report.theory_wire_bytes_per_device,
            "keeps_contract": None if report is None else report.kept,
            "like_zero2": None if report is None else report.like_zero2 or None,
            "step_seconds_range": None if self.step_range is None else list(self.step_range),
            "tokens_per_step": self.tokens,
            **{name: getattr(self.timeline, name, None) for name in _TIMES},
        }
        in_memory = {} if self.host is None else {"host": self.host.to_json()}
        float8 = {} if report is None or report.float8 is None else {"fp8_products": report.float8.to_json()}
        return {name: found[name] if name in found else getattr(self, name) for name in _IN_JSON} | float8 | in_memory


_TIMES = ("exposed_seconds", "host_seconds", "host_wait_seconds")
_IN_JSON = (
    *("strategy", "accumulate", "remat", "mesh", "partitioning", "fits", "bytes_per_device", "available_bytes"),
    *("memory", "host_bytes", "memory_most", "memory_advice", "closed_form_bytes", "wire_bytes_per_device"),
    *("theory_wire_bytes_per_device", "keeps_contract", "like_zero2", "exposed_fraction", *_TIMES, "step_seconds"),
    *("step_seconds_range", "compute_parts", "mfu", "tokens_per_second", "efficiency", "compile_seconds", "cached"),
    *("tokens_per_step", "parameters", "partitioning_why", "error"),
)
"""The keys of an estimate in JSON, in order; most are its attributes."""
MEMORY = (
    *("candidate", "fits", "holds", "parameters", "gradients", "optimizer", "working copy", "activations", "other"),
    "ZeRO's formula",
)
"""Headings of the table of memory."""
HOST = "host"
"""One more heading, where a candidate keeps something in host memory."""
SPEED = ("candidate", "partitioning", "sends", "of theory", "hidden", "waits", "step", "MFU", "tokens/s", "T(1)/T(N)")


@dataclass(frozen=True)
class PlanReport(Drawn):
    """Every candidate that was compiled, and which to take.

    Attributes:
        target: the devices' name, such as "h100:8x8".
        devices: how many there are.
        estimates: one a candidate, in the order asked for.
        choice: the one to take; None when none fits.
        why: sentences: what fits, what is fastest and why, what to change.
        notes: assumptions and changes that the reader must know of.
        unit: what `Estimate.tokens` counts: "tokens", or "examples".
        max_batch: the largest batch that fits the choice, where it was asked for.
        goodput: which share of its time the choice is expected to train when devices fail, where it was asked for.
        bill: the days and the money of a number of tokens under the choice, where it was asked for and one fits.
        axes: which other meshes were searched, where that was asked for.
        smallest: the smallest cluster of these devices that the batch fits; None where that is not known.
    """

    target: str
    devices: int
    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    why: tuple[str, ...]
    notes: tuple[str, ...] = ()
    unit: str = "tokens"
    max_batch: MaxBatch | None = None
    goodput: Goodput | None = None
    bill: Bill | None = None
    axes: MeshSearch | None = None
    smallest: Smallest | None = None

    @property
    def verdict(self) -> str:
        """Which candidate to take, in a sentence."""
        if self.choice is not None:
            return f"Take {self.choice.name}."
        compiled = any(estimate.memory is not None for estimate in self.estimates)
        return "No candidate fits." if compiled else "No candidate compiled."

    @property
    def speed(self) -> float | None:
        """Tokens (or examples) a second of the choice; None where there is none, or times are not known."""
        return None if self.choice is None else self.choice.tokens_per_second

    @property
    def memory_headings(self) -> tuple[str, ...]:
        """`MEMORY`, with "host" where a candidate keeps something in host memory: a device's part of it."""
        return (*MEMORY, HOST) if any(self._on_host) else MEMORY

    @property
    def _on_host(self) -> list[int]:
        offloaded = [0 if estimate.memory is None else estimate.memory.host for estimate in self.estimates]
        return [
            count if each.host is None else each.host.total // each.host.devices
            for count, each in zip(offloaded, self.estimates, strict=True)
        ]

    def memory_table(self) -> list[tuple[str, ...]]:
        """Return a row for each estimate, under `memory_headings`: bytes per device."""
        rows, held = [_memory_row(estimate) for estimate in self.estimates], self._on_host
        return [(*row, format_bytes(count)) for row, count in zip(rows, held, strict=True)] if any(held) else rows

    @property
    def speed_headings(self) -> tuple[str, ...]:
        """`SPEED`, with what the batch is counted in."""
        return tuple(heading.replace("tokens", self.unit) for heading in SPEED)

    def speed_table(self) -> list[tuple[str, ...]]:
        """Return a row for each estimate, under `speed_headings`: traffic and time of a step, per device."""
        return [_speed_row(estimate) for estimate in self.estimates]

    @property
    def sentences(self) -> list[str]:
        """What is said below the tables: why, the smallest cluster, the bill, the notes, the largest batch."""
        hosts = {each.name: each.host.words for each in self.estimates if each.host is not None}
        if len({*hosts.values()}) > 1:
            hosts = {name: f"{name}: {words}" for name, words in hosts.items()}
        notes = [f"Note: {note}" for note in (*dict.fromkeys(hosts.values()), *self.notes)]
        also = [str(each) for each in (self.smallest, self.bill) if each is not None]
        return [*self.why, *also, *notes, *([] if self.max_batch is None else [str(self.max_batch)])]

    def __repr__(self) -> str:
        of = f"{len(self.estimates)} candidates for {self.target}, {self.devices} devices"
        return f"<PlanReport of {of}: {self.verdict} print() says all>"

    def __str__(self) -> str:
        tables = [
            *align_columns([self.memory_headings, *self.memory_table()]),
            "",
            *align_columns([self.speed_headings, *self.speed_table()]),
        ]
        goodput = [] if self.goodput is None else ["", str(self.goodput)]
        return "\n".join([f"{self.devices} devices, {self.target}", *tables, "", *self.sentences, *goodput])

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp plan --json` prints; `max_batch`, `goodput`, `bill`, `axes` where asked for."""
        largest = {} if self.max_batch is None else {"max_batch": self.max_batch.to_json()}
        goodput = {} if self.goodput is None else {"goodput": self.goodput.to_json()}
        return {
            "target": self.target,
            "devices": self.devices,
            "strategies": [estimate.to_json() for estimate in self.estimates],
            "choice": None if self.choice is None else self.choice.strategy,
            "choice_accumulate": None if self.choice is None else self.choice.accumulate,
            "choice_remat": None if self.choice is None else self.choice.remat,
            "choice_mesh": None if self.choice is None or self.choice.axes is None else dict(self.choice.axes),
            "why": " ".join(self.why),
            "notes": list(self.notes),
            **largest,
            **goodput,
            **({} if self.bill is None else {"bill": self.bill.to_json()}),
            **({} if self.axes is None else {"axes": self.axes.to_json()}),
            "smallest": None if self.smallest is None else self.smallest.to_json(),
        }


def _memory_row(estimate: Estimate) -> tuple[str, ...]:
    memory = estimate.memory
    if memory is None:
        return (estimate.name, "no", "did not compile", *([""] * (len(MEMORY) - 3)))
    classes = (memory.parameters, memory.gradients, memory.optimizer, memory.working, memory.activations)
    formula = estimate.closed_form_bytes or 0
    held = map(format_bytes, (memory.total, *classes, memory.total - sum(classes), formula))
    return (estimate.name, estimate.fits_in_words, *held)


def _speed_row(estimate: Estimate) -> tuple[str, ...]:
    report = estimate.report
    if report is None:
        return (estimate.name, *([""] * (len(SPEED) - 1)))
    ratio = f"{report.ratio:.3f}" if report.theory_wire_bytes_per_device else "–"
    traffic = (
        estimate.partitioning or "",
        format_bytes(report.wire_bytes_per_device),
        ratio if report.kept else f"{ratio} BREAKS",
    )
    unknown = "–" if estimate.fits is False else "?"
    efficiency = unknown if estimate.efficiency is None else f"{estimate.efficiency:.3f}"
    return (estimate.name, *traffic, *estimate.speed_cells, efficiency)
