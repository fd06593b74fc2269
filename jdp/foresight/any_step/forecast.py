"""`jdp.foresee` and `jdp.verify` of any jitted step: compiled for a target, and everything read off that in one report.

1. The function is traced and its program moved onto the target's mesh (`traced.py`, `relocate.py`).
2. It is compiled, or found in the cache.
3. What it holds, sends and waits for is read off the program (`read.py`, `timing/timeline.py`).
4. What it sends is compared with a strategy's row, or with given bytes (`against.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jdp.base.disk_cache import Cache
from jdp.base.formatting import align_columns, format_bytes, format_percent, format_seconds, listed
from jdp.base.toml import described
from jdp.core.sharding.axes import factors
from jdp.foresight.any_step.against import Bound, bound, chosen
from jdp.foresight.any_step.read import HeldArgument, Sent, StepMemory, memory_of, reading_of, sent_by, signs
from jdp.foresight.any_step.relocate import move
from jdp.foresight.step_report import CPU_PROGRAM, StepReport, caveats_on
from jdp.foresight.targets.resolve import Target, check_target, target_of
from jdp.foresight.targets.resolve import target as named
from jdp.foresight.timing.timeline import Timeline, timeline
from jdp.foresight.traffic.contract import TOLERANCE


def forecast(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    target: str | Target | None = None,
    mesh: Mapping[str, int] | None = None,
    against: str | float | None = None,
    params: int | str | Sequence[str] | None = None,
    cache: bool = True,
) -> StepForecast:
    """Compile any jitted step for a target, and report what it holds, sends and waits for. Nothing runs."""
    check_target(target)
    if not callable(function):
        raise ValueError(
            f"The first argument is a step, jdp.verify(step, state, batch); given {described(function)}. Write the "
            "arguments in this order."
        )
    devices = named(target) if isinstance(target, str) else target
    moved = move(function, arguments, devices, mesh)
    devices = devices or target_of(None, [each.abstract() for each in moved.traced.arguments])
    parameters = chosen(params, moved.traced.arguments)
    limit = None if against is None else bound(against, parameters, moved)
    compiled = moved.compile(devices, Cache.usual(cache))
    known = parameters or [each for each in moved.traced.arguments if each.number not in moved.batch]
    reading = reading_of(compiled, moved, known)
    sent = sent_by(reading)
    counted = [each for each in sent if each.over_batch or limit is None or not limit.over_batch]
    wire = sum(each.wire_bytes for each in counted)
    kept = None if limit is None else wire <= TOLERANCE * limit.wire_bytes
    return StepForecast(
        kept=kept,
        name=moved.traced.name,
        target=str(devices),
        mesh=dict(moved.mesh.shape),
        wire_bytes_per_device=wire,
        ratio=wire / limit.wire_bytes if limit and limit.wire_bytes else None,
        breaches=() if limit is None or kept else _breaches(counted, wire - limit.wire_bytes),
        batch_axes=moved.batch_axes,
        memory=memory_of(compiled, moved, devices),
        sent=sent,
        timeline=timeline(compiled.program, devices) if devices.chip is not None else None,
        bound=limit,
        symptoms=signs(reading, moved, sent),
        notes=tuple(dict.fromkeys((*moved.notes, *_notes(sent, devices, limit)))),
    )


def _breaches(sent: Iterable[Sent], excess: float) -> tuple[str, ...]:
    """Return what is sent, most bytes first, until what is left is no longer too much."""
    sentences = list[str]()
    for each in sent:
        if excess <= 0 or len(sentences) == _LISTED:
            break
        sentences.append(str(each))
        excess -= each.wire_bytes
    return tuple(sentences)


def _notes(sent: Iterable[Sent], target: Target, limit: Bound | None) -> Iterable[str]:
    """Yield what the numbers rest on."""
    yield from caveats_on([(each.kind, each.caveats) for each in sent])
    if limit is not None and limit.over_batch:
        yield "a strategy's row is for one microbatch, gradients and gathered weights in the parameters' own dtype"
    if target.devices[0].platform == "cpu":
        yield CPU_PROGRAM


@dataclass(frozen=True, kw_only=True, repr=False)
class StepForecast(StepReport):
    """What a jitted step will hold, send and wait for; more in `StepReport`.

    Attributes:
        name: the function's.
        batch_axes: those that rows of a batch are split over.
        memory: bytes per device, by argument.
        sent: tensors by collective and source line, most bytes first.
        timeline: the schedule, simulated; None for devices whose rates are not known.
        bound: what was compared with; None: nothing.
    """

    name: str
    batch_axes: tuple[str, ...]
    memory: StepMemory
    sent: tuple[Sent, ...]
    timeline: Timeline | None = None
    bound: Bound | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain objects."""
        seconds = ("step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds")
        return {
            **self._as_json("kept name target mesh wire_bytes_per_device"),
            "bound_wire_bytes_per_device": None if self.bound is None else self.bound.wire_bytes,
            "ratio": self.ratio,
            "memory": asdict(self.memory),
            "sent": [asdict(each) for each in self.sent],
            "schedule": None if self.timeline is None else {name: getattr(self.timeline, name) for name in seconds},
            **self._as_json("breaches symptoms notes"),
        }

    def paragraphs(self) -> list[list[str]]:
        """Return the verdict, and tables of what is held and sent."""
        paragraphs = [[self.heading, self.verdict, *self.schedule], align_columns(self.held_table())]
        return [*paragraphs, align_columns(self.sent_table())] if self.sent else paragraphs

    @property
    def heading(self) -> str:
        """What was compiled, in words: "step on data=8 for h100:1x8"."""
        split = {name: count for name, count in self.mesh.items() if count > 1} or self.mesh
        return f"{self.name} on {factors(split)} for {self.target}"

    @property
    def verdict(self) -> str:
        """What a device sends, in a sentence, and whether it is too much."""
        if self.bound is None:
            return f"{self.sends[0].upper()}{self.sends[1:]}."
        of = f"the {format_bytes(self.bound.wire_bytes)} of {self.bound.words}"
        if self.bound.words == "given":
            of = f"the {format_bytes(self.bound.wire_bytes)} that were given"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of "
        return f"{'Kept' if self.kept else 'BROKEN'}: {self.sends}, {ratio}{of}."

    @property
    def schedule(self) -> list[str]:
        """A sentence on the time of a step; none where the devices' rates are not known."""
        time = self.timeline
        if time is None:
            return []
        hidden = format_percent(1 - time.exposed_fraction)
        sent = f"{format_seconds(time.communication_seconds)} of communication, {hidden} of it hidden"
        computing = f"{format_seconds(time.compute_seconds)} of computing"
        return [f"A step takes {format_seconds(time.step_seconds)}: {computing}, {sent}."]

    def held_table(self) -> list[tuple[str, ...]]:
        """Return headings, and a row for each of the largest arguments and for each other part of the memory."""
        memory = self.memory
        largest = sorted(memory.arguments, key=lambda each: -each.bytes)
        rest = sum(each.bytes for each in largest[_LISTED:])
        rows = [(each.path, format_bytes(each.bytes), _given_up(each)) for each in largest[:_LISTED]]
        rows += [(f"{len(largest) - _LISTED} other arguments", format_bytes(rest), "")] if rest else []
        rows += [("results in memory of their own", format_bytes(memory.results), "")]
        rows += [("temporaries", format_bytes(memory.temporaries), "")]
        rows += [("compiled code", format_bytes(memory.code), "")]
        rows += [("in the host's memory", format_bytes(memory.host), "")] if memory.host else []
        fits = memory.headroom.words if memory.headroom is not None else ""
        rows += [("total a device", format_bytes(memory.total), fits)]
        return [("held on a device", "bytes", ""), *rows]

    def sent_table(self) -> list[tuple[str, ...]]:
        """Return headings, and a row for each of the tensors that send most."""
        rest = sum(each.wire_bytes for each in self.sent[_LISTED:])
        others = [("others", "", "", "", format_bytes(rest), "", "")] if rest else []
        return [_SENT, *map(_row, self.sent[:_LISTED]), *others]


_LISTED = 12
_SENT = ("collective", "tensor", "times", "axes", "wire a device", "at", "the shape of")


def _row(each: Sent) -> tuple[str, ...]:
    tensor, like = f"{each.dtype}{list(each.dims)}", listed(each.like, 2) or "no argument"
    wire, axes = format_bytes(each.wire_bytes), ", ".join(each.axes)
    return each.kind, tensor, str(each.count), axes, wire, each.source or "", like


def _given_up(each: HeldArgument) -> str:
    if not each.donated:
        return ""
    return "updated in place" if each.in_place else "donated, not updated in place"
