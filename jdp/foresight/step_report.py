"""The report of one compiled step, from jdp or not; that of a jdp step (`verify.Report`) compares more."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_percent, format_seconds
from jdp.core.sharding.axes import factors
from jdp.foresight.memory import Headroom, Memory
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.timeline import Timeline, timeline
from jdp.foresight.traffic.contract import Sent, sent_table


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
