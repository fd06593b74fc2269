"""`jdp.foresee` and `jdp.verify` of any jitted step: compiled for a target, and everything read off that in one report.

1. The function is traced and its program moved onto the target's mesh (`traced.py`, `relocate.py`).
2. It is compiled, or found in the cache.
3. What it holds, sends and waits for is read off the program (`read.py`, `timing/timeline.py`).
4. What it sends is compared with a strategy's row, or with given bytes (`against.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from jdp.base.disk_cache import Cache
from jdp.base.formatting import align_columns, format_bytes, format_percent, format_seconds
from jdp.base.notebook import Drawn
from jdp.foresight.any_step.against import Bound, bound, chosen
from jdp.foresight.any_step.read import HeldArgument, Sent, StepMemory, memory_of, sent_by, shapes_of, signs
from jdp.foresight.any_step.relocate import Moved, lowering, move
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.targets.cudnn import answered_for, version_in
from jdp.foresight.targets.relocate import explaining_what_cannot_be_lowered
from jdp.foresight.targets.resolve import Target
from jdp.foresight.targets.resolve import target as named
from jdp.foresight.targets.this_machine import target_of
from jdp.foresight.timing.timeline import Timeline, timeline
from jdp.foresight.traffic.contract import TOLERANCE
from jdp.foresight.traffic.origin import Sites


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
    devices = named(target) if isinstance(target, str) else target
    moved = move(function, arguments, devices, mesh)
    devices = devices or target_of(None, [each.abstract() for each in moved.traced.arguments])
    parameters = chosen(params, moved.traced.arguments)
    limit = None if against is None else bound(against, parameters, moved)
    compiled = _compile(moved, devices, Cache.usual(cache))
    shapes = shapes_of(moved, parameters or [e for e in moved.traced.arguments if e.number not in moved.batch])
    sites = Sites(compiled.program)
    sent = sent_by(compiled, sites, moved, shapes)
    timed = devices.chip is not None or devices.kind == "cpu"
    return StepForecast(
        name=moved.traced.name,
        target=str(devices),
        mesh=dict(moved.mesh.shape),
        batch_axes=moved.batch_axes,
        memory=memory_of(compiled, moved, devices),
        sent=sent,
        timeline=timeline(compiled.program, devices) if timed else None,
        bound=limit,
        symptoms=signs(compiled, sites, moved, shapes, sent),
        notes=tuple(dict.fromkeys((*moved.notes, *_notes(sent, devices, limit)))),
    )


def _compile(moved: Moved, target: Target, cache: Cache | None) -> Compiled:
    """Compile a moved step. Raises ValueError: it cannot be lowered for the target, or XLA refuses it."""
    described = nullcontext() if target.config is None else answered_for(target.devices[0], version_in(target.config))
    with warnings.catch_warnings(), explaining_what_cannot_be_lowered(), lowering(moved), described:
        # Which arguments were not donated is read off the program, with their paths.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = moved.traced.lower()
    options = [f"{name}={value!r}" for name, value in sorted(moved.traced.options.items())]
    return compile_step(lowered, cache=cache, described="\n".join([target.fingerprint, *options]))


def _notes(sent: Iterable[Sent], target: Target, limit: Bound | None) -> Iterable[str]:
    """Yield what the numbers rest on."""
    for caveat in dict.fromkeys(caveat for each in sent for caveat in each.caveats):
        kinds = dict.fromkeys(each.kind for each in sent if caveat in each.caveats)
        yield f"{', '.join(kinds)} {caveat}, so it may send more than is reported here"
    if limit is not None and limit.over_batch:
        yield "a strategy's row is for one microbatch, gradients and gathered weights in the parameters' own dtype"
    if target.devices[0].platform == "cpu":
        yield (
            "this is XLA:CPU's program, which makes no reduce-scatter of a sharding constraint and has its own dtypes; "
            "what GPUs will send is judged with the target h100:1x8"
        )


@dataclass(frozen=True)
class StepForecast(Drawn):
    """What a jitted step will hold, send and wait for.

    Attributes:
        name: the function's.
        target, mesh: the devices' name; axis -> size.
        batch_axes: those that rows of a batch are split over.
        memory: bytes per device, by argument.
        sent: tensors by collective and source line, most bytes first.
        timeline: the schedule, simulated; None for devices whose rates are not known.
        bound: what was compared with; None: nothing.
        symptoms: signs of something unmeant, a sentence each.
        notes: what the numbers rest on.
    """

    name: str
    target: str
    mesh: dict[str, int]
    batch_axes: tuple[str, ...]
    memory: StepMemory
    sent: tuple[Sent, ...]
    timeline: Timeline | None = field(default=None, repr=False)
    bound: Bound | None = None
    symptoms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def wire_bytes_per_device(self) -> float:
        """What a device sends a step; against a strategy's row, along the batch's axes only."""
        over_batch = self.bound is not None and self.bound.over_batch
        return sum(each.wire_bytes for each in self.sent if each.over_batch or not over_batch)

    @property
    def ratio(self) -> float | None:
        """Bytes sent over those that may be; None where nothing is compared, or nothing may be sent."""
        return self.wire_bytes_per_device / self.bound.wire_bytes if self.bound and self.bound.wire_bytes else None

    @property
    def kept(self) -> bool | None:
        """Whether a device sends at most 1.02 times what it may; None where nothing is compared."""
        return None if self.bound is None else self.wire_bytes_per_device <= TOLERANCE * self.bound.wire_bytes

    @property
    def breaches(self) -> tuple[str, ...]:
        """Where the bound is not kept, what is sent: a sentence a line, most bytes first, until what is left fits."""
        if self.bound is None or self.kept:
            return ()
        sentences, left = list[str](), self.wire_bytes_per_device
        for each in self.sent:
            if left <= self.bound.wire_bytes or len(sentences) == _LISTED:
                break
            if each.over_batch or not self.bound.over_batch:
                sentences.append(str(each))
                left -= each.wire_bytes
        return tuple(sentences)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain objects."""
        seconds = ("step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds")
        return {
            "kept": self.kept,
            "name": self.name,
            "target": self.target,
            "mesh": self.mesh,
            "wire_bytes_per_device": self.wire_bytes_per_device,
            "bound_wire_bytes_per_device": None if self.bound is None else self.bound.wire_bytes,
            "ratio": self.ratio,
            "memory": asdict(self.memory),
            "sent": [asdict(each) for each in self.sent],
            "schedule": None if self.timeline is None else {name: getattr(self.timeline, name) for name in seconds},
            "breaches": list(self.breaches),
            "symptoms": list(self.symptoms),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<StepForecast of {' '.join([f'{self.heading}.', self.verdict, *self.schedule])} print() says all>"

    def __str__(self) -> str:
        largest = [f"  {each}" for each in self.memory.largest[:3]]
        paragraphs = [[self.heading, self.verdict, *self.schedule], [*align_columns(self.held_table()), *largest]]
        if self.sent:
            paragraphs.append(align_columns(self.sent_table()))
        lists = {"Breaches": self.breaches, "Symptoms": self.symptoms, "Notes": self.notes}
        for title, sentences in lists.items():
            if sentences:
                paragraphs.append([f"{title}:", *(f"- {sentence}" for sentence in sentences)])
        return "\n\n".join("\n".join(lines) for lines in paragraphs)

    @property
    def heading(self) -> str:
        """What was compiled, in words: "step on data=8 for h100:1x8"."""
        split = {name: count for name, count in self.mesh.items() if count > 1} or self.mesh
        axes = " × ".join(f"{name}={count}" for name, count in split.items())
        return f"{self.name} on {axes} for {self.target}"

    @property
    def verdict(self) -> str:
        """What a device sends, in a sentence, and whether it is too much."""
        sends = f"a device sends {format_bytes(self.wire_bytes_per_device)} a step"
        if self.bound is None:
            return f"{sends[0].upper()}{sends[1:]}."
        of = f"the {format_bytes(self.bound.wire_bytes)} of {self.bound.words}"
        if self.bound.words == "given":
            of = f"the {format_bytes(self.bound.wire_bytes)} that were given"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of "
        return f"{'Kept' if self.kept else 'BROKEN'}: {sends}, {ratio}{of}."

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
        peak = f"most of them at {memory.at}" if memory.at else ""
        rows += [("temporaries", format_bytes(memory.temporaries), peak)]
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
    like = ", ".join(each.like[:2]) + (f" and {len(each.like) - 2} more" if len(each.like) > 2 else "")
    tensor = f"{each.dtype}{list(each.dims)}"
    wire, axes = format_bytes(each.wire_bytes), ", ".join(each.axes)
    return each.kind, tensor, str(each.count), axes, wire, each.source or "", like or "no argument"


def _given_up(each: HeldArgument) -> str:
    if not each.donated:
        return ""
    return "updated in place" if each.in_place else "donated, not updated in place"
