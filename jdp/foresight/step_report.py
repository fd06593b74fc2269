"""The report of one compiled step, of jdp's or of anyone's: what it holds, sends and waits for, and whether it may.

A step of jdp's is a step whose parameters are known, so that its report (`verify.Report`) compares more. All are
printed and drawn by the code below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_percent, format_seconds
from jdp.core.sharding.axes import factors
from jdp.foresight.memory import Headroom, Memory
from jdp.foresight.timing.timeline import Timeline
from jdp.foresight.traffic.sends import Sent, sent_table


@dataclass(frozen=True, kw_only=True, repr=False)
class StepReport:
    """What a compiled step holds, sends and waits for.

    Attributes:
        name: the step's: its strategy, or its function's name.
        kept: it sends at most 1.02 times what it may; None where nothing is judged.
        target, mesh: the devices' name; axis -> size.
        wire_bytes_per_device: what a device sends a step; compared with a strategy, along the batch's axes only.
        bound_wire_bytes_per_device: what it may send; None where nothing is compared.
        bound_words: whose bytes these are.
        ratio: bytes sent over those that may be sent; None where nothing is compared, or nothing may be sent.
        memory: bytes per device by class and argument.
        headroom: whether a device can hold it; None where the device's memory is not known.
        sent: tensors by collective and source line, most bytes first.
        timeline: the simulated schedule; None where the device's rates are not known, and of what does not fit, which
            takes no time as it cannot run.
        breaches: why it is not kept, a sentence each; empty when it is kept.
        strays: what is sent besides and belongs to no parameter, a sentence each.
        symptoms: signs of something unintended, a sentence each (`traffic/symptoms.py`); they break no contract.
        notes: what the numbers rest on.
    """

    name: str
    kept: bool | None
    target: str
    mesh: dict[str, int]
    wire_bytes_per_device: float
    bound_wire_bytes_per_device: float | None = None
    bound_words: str = ""
    ratio: float | None = None
    memory: Memory = field(default_factory=Memory)
    headroom: Headroom | None = None
    sent: tuple[Sent, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    breaches: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    symptoms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """What was compiled, in words: "step on data=8 for h100:1x8"."""
        split = {name: count for name, count in self.mesh.items() if count > 1} or self.mesh
        return f"{self.name} on {factors(split)} for {self.target}"

    @property
    def verdict(self) -> str:
        """What a device sends, in a sentence, and whether it is too much."""
        if self.bound_wire_bytes_per_device is None:
            return f"{self.sends[0].upper()}{self.sends[1:]}."
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of "
        bound = format_bytes(self.bound_wire_bytes_per_device)
        return f"{'Kept' if self.kept else 'BROKEN'}: {self.sends}, {ratio}the {bound} {self.bound_words}."

    @property
    def sends(self) -> str:
        """The part of a sentence that all verdicts have."""
        return f"a device sends {format_bytes(self.wire_bytes_per_device)} a step"

    @property
    def schedule(self) -> list[str]:
        """A sentence on the time of a step; none where that is not simulated."""
        time = self.timeline
        if time is None:
            return []
        hidden = format_percent(1 - time.exposed_fraction)
        sent = f"{format_seconds(time.communication_seconds)} of communication, {hidden} of it hidden"
        computing = f"{format_seconds(time.compute_seconds)} of computing"
        return [f"A step takes {format_seconds(time.step_seconds)}: {computing}, {sent}."]

    def comparison(self) -> list[list[str]]:
        """Return the paragraphs in which more is compared; none of a step that jdp did not make."""
        return []

    def __str__(self) -> str:
        held = [f"It {self.headroom.words}."] if self.headroom is not None else []
        paragraphs = [[self.heading, self.verdict, *self.schedule, *held], *self.comparison()]
        paragraphs += [align_columns(self.memory.table())] if self.memory.total else []
        paragraphs += [align_columns(sent_table(self.sent))] if self.sent else []
        lists = {"Breaches": self.breaches, "Sent besides": self.strays, "Symptoms": self.symptoms, "Notes": self.notes}
        paragraphs += [[f"{title}:", *(f"- {each}" for each in found)] for title, found in lists.items() if found]
        return "\n\n".join("\n".join(lines) for lines in paragraphs)

    def __repr__(self) -> str:
        sentences = [f"{self.heading}.", self.verdict, *(self.schedule or self.breaches[:1])]
        return f"<{type(self).__name__} of {' '.join(sentences)} print() says all>"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain objects."""
        seconds = ("step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds")
        headroom = None if self.headroom is None else asdict(self.headroom)
        return {
            **self._as_json("kept name target mesh wire_bytes_per_device bound_wire_bytes_per_device ratio"),
            "memory": {**self.memory.to_json(), "headroom": headroom, "host": self.memory.host},
            "sent": [asdict(each) for each in self.sent],
            "schedule": None if self.timeline is None else {name: getattr(self.timeline, name) for name in seconds},
            **self._as_json("breaches strays symptoms notes"),
        }

    def _as_json(self, names: str) -> dict[str, Any]:
        """Return attributes by name, tuples as lists."""
        values = {name: getattr(self, name) for name in names.split()}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}


CPU_PROGRAM = (
    "this is XLA:CPU's program, which makes no reduce-scatter of a sharding constraint and has its own dtypes; what "
    "GPUs will send is judged with the target h100:1x8"
)
"""The note on a report of a program for CPUs."""


def caveats_on(sent: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Yield a note for each reason why more may be sent than was counted: of (kind of collective, caveats)."""
    for caveat in dict.fromkeys(caveat for _, caveats in sent for caveat in caveats):
        kinds = dict.fromkeys(kind for kind, caveats in sent if caveat in caveats)
        yield f"{', '.join(kinds)} {caveat}, so it may send more than is reported here"
