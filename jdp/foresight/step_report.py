"""What the reports of one compiled step share: `Report` of a step of jdp's, `StepForecast` of any other.

A step of jdp's is a step whose parameters are known, so its report compares more. Both have one shape and are printed
and drawn by the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_bytes


@dataclass(frozen=True, kw_only=True, repr=False)
class StepReport(ABC):
    """What a compiled step sends, compared with what it may send.

    Attributes:
        kept: it sends at most 1.02 times what it may; None where nothing is judged.
        target, mesh: the devices' name; axis -> size.
        wire_bytes_per_device: what a device sends a step; compared with a strategy, along the batch's axes only.
        ratio: bytes sent over those that may be sent; None where nothing is compared, or nothing may be sent.
        breaches: why it is not kept, a sentence each; empty when it is kept.
        strays: what is sent besides and belongs to no parameter, a sentence each.
        symptoms: signs of something unintended, a sentence each (`traffic/symptoms.py`); they break no contract.
        notes: what the numbers rest on.
    """

    kept: bool | None
    target: str
    mesh: dict[str, int]
    wire_bytes_per_device: float
    ratio: float | None
    breaches: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    symptoms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    @abstractmethod
    def heading(self) -> str:
        """What was compiled, in words."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """What a device sends, in a sentence, and whether it is too much."""

    @abstractmethod
    def paragraphs(self) -> list[list[str]]:
        """Return the lines of the printed report, before the lists of sentences."""

    @property
    def schedule(self) -> list[str]:
        """A sentence on the time of a step; none where that is not simulated."""
        return []

    @property
    def sends(self) -> str:
        """The part of a sentence that all verdicts have."""
        return f"a device sends {format_bytes(self.wire_bytes_per_device)} a step"

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the report as plain objects."""

    def _as_json(self, names: str) -> dict[str, Any]:
        """Return attributes by name, tuples as lists."""
        values = {name: getattr(self, name) for name in names.split()}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}

    def __repr__(self) -> str:
        sentences = [f"{self.heading}.", self.verdict, *(self.schedule or self.breaches[:1])]
        return f"<{type(self).__name__} of {' '.join(sentences)} print() says all>"

    def __str__(self) -> str:
        lists = {"Breaches": self.breaches, "Sent besides": self.strays, "Symptoms": self.symptoms, "Notes": self.notes}
        listed = [[f"{title}:", *(f"- {each}" for each in found)] for title, found in lists.items() if found]
        return "\n\n".join("\n".join(lines) for lines in [*self.paragraphs(), *listed])


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
