"""Why a program breaks the contract: which collective, which parameter, which line, and what to do about it.

Each tensor of each collective along the batch axes, of a kind that goes beyond its promise, is held against it:
1. no parameter has its shape: something else is moved;
2. the row does not name the kind: a leaf that could not be sharded, or a gradient that is reduced whole;
3. it runs for every microbatch, and is promised once a step;
4. its parameters' part of the promise is used up: its elements are wider than promised, or it is sent too often.
What is alike is one sentence; the sentences are in the order of the bytes they explain. What is no parameter's (1) is
looked for in every program (`strays`), whether it keeps its contract or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jdp.core.formatting import format_bytes
from jdp.core.sharding.mesh import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.foresight.program.module import bits
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, Promise, Sent, Theory, Verdict
from jdp.foresight.traffic.origin import Parameters, Piece, Sites, users_line

_MENTIONED = 0.002  # of theory: what explains less is not worth a sentence, unless nothing explains more
_TINY = 256  # bytes: sums of no parameter's shape up to here are counts and metrics, and not worth one either


@dataclass(frozen=True)
class Fault:
    """What is wrong with a tensor: the reason in words, the share of its bytes that is too much, the remedy."""

    reason: str
    share: float
    remedy: str
    whole_bytes: int = 0  # of a leaf that could not be sharded: what it takes at rest on every device


@dataclass
class Group:
    """Tensors with the same fault, of the same kind and line."""

    sent: Sent
    dtype: str
    line: str | None
    fault: Fault
    paths: dict[str, None] = field(default_factory=dict[str, None])
    payload_bytes: int = 0
    excess: float = 0.0

    def __str__(self) -> str:
        c = self.sent.collective
        often = "" if c.count == 1 else f", {c.count} times a step"
        what = f" for {listed(self.paths)} (by shape)" if self.paths else ""
        where = f", at {self.line}" if self.line else ""
        whole = self.fault.whole_bytes
        held = f"It rests whole on every device, {format_bytes(whole)} and so does its optimizer state. "
        excess = held if whole else f"{format_bytes(self.excess)} a device too much. "
        return (
            f"{c.kind} of {format_bytes(self.payload_bytes)} {self.dtype}{often}{what}{where}: {self.fault.reason}. "
            f"{excess}{self.fault.remedy}"
        )


@dataclass(frozen=True)
class Stray:
    """What belongs to no parameter, sent from one line by one kind of collective.

    Attributes:
        kind: of collective.
        wire_bytes: what each device sends of it, a step.
        words: the same in a sentence, with the line and the remedy.
    """

    kind: str
    wire_bytes: float
    words: str


def strays(found: Iterable[Sent], promised: Theory, sites: Sites, step: Step, state: TrainState) -> tuple[Stray, ...]:
    """What runs along the batch axes and has no parameter's shape: activations, parts of the batch; most bytes first.

    Not among them are the statistics of batch norms, as far as they are planned, and what is no larger than counts and
    metrics are.
    """
    judge = _judge(promised, step, state)
    counted = [s for s in found if s.over_batch]
    unknown = [(s, piece) for s, piece in _pieces(counted, promised, sites) if not judge.parameters.like(piece.dims)]
    groups = sorted(_groups(unknown, judge), key=lambda group: -group.excess)
    return tuple(
        Stray(group.sent.collective.kind, group.excess, str(group)) for group in groups if group.payload_bytes > _TINY
    )


def breaches(
    found: Iterable[Sent],
    promised: Theory,
    verdict: Verdict,
    sites: Sites,
    step: Step,
    state: TrainState,
    beside: Sequence[Stray] = (),
) -> tuple[str, ...]:
    """Why the contract is not kept, one sentence a reason; empty when it is. `beside`: what `strays` found."""
    if verdict.kept:
        return ()
    blamed = {row.kind for row in verdict.rows if not row.kept}
    if sum(stray.wire_bytes for stray in beside) > SLACK * promised.wire_bytes:
        blamed |= {stray.kind for stray in beside}
    blamed = blamed or {row.kind for row in verdict.rows}
    counted = [s for s in found if s.over_batch and s.collective.kind in blamed]
    pieces = sorted(_pieces(counted, promised, sites), key=lambda pair: bits(pair[1].dtype))
    ordered = sorted(_groups(pieces, _judge(promised, step, state)), key=lambda group: -group.excess)
    told = [group for group in ordered if group.paths or group.payload_bytes > _TINY]
    told = told or ([] if promised.whole.paths else ordered)
    said = [group for group in told if group.excess >= _MENTIONED * promised.wire_bytes] or told[:1]
    return tuple(map(str, said)) or (_in_all(promised, verdict),)


def _judge(promised: Theory, step: Step, state: TrainState) -> _Judge:
    places: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    return _Judge(step, promised, Parameters(tuple(places), dict(step.plan.mesh.shape)))


def _pieces(counted: Iterable[Sent], promised: Theory, sites: Sites) -> Iterator[tuple[Sent, Piece]]:
    """The tensors of collectives, without batch statistics."""
    for s in counted:
        for piece in sites.pieces(s.collective):
            if not (s.statistics_bytes and promised.statistics.fits(piece)):
                yield s, piece


def _groups(pieces: Iterable[tuple[Sent, Piece]], judge: _Judge) -> list[Group]:
    """What is at fault, the alike together; the promises are used up in the order given."""
    groups: dict[tuple[object, ...], Group] = {}
    for s, piece in pieces:
        like = judge.parameters.like(piece.dims)
        fault = judge.fault(s, piece, like)
        if fault is None:
            continue
        line = piece.line if like else judge.line(s, piece)
        key = (s.collective.kind, piece.dtype, s.collective.loops, s.in_accumulation_loop, line, fault.reason)
        group = groups.setdefault(key, Group(s, piece.dtype, line, fault))
        group.paths |= dict.fromkeys(place.path for place in like)
        group.payload_bytes += piece.payload_bytes
        group.excess += fault.share * _wire(s, piece)
    return list(groups.values())


def _in_all(promised: Theory, verdict: Verdict) -> str:
    """Where no tensor is at fault: what is all-reduced whole by plan may send more than theory has for it."""
    bound = format_bytes(promised.wire_bytes)
    said = f"a device sends {format_bytes(verdict.wire_bytes)} a step where {bound} are promised."
    if not promised.whole.paths:
        return said
    return (
        f"{said} {listed(promised.whole.paths)}, of fewer than {promised.whole.fewer_than} elements, are "
        f"all-reduced whole by plan: {format_bytes(promised.whole.wire_bytes)}, more than scattered and gathered in "
        "this precision. Lower Plan(min_shard_size=...), or take the strategy ddp for a model this small."
    )


def _wire(s: Sent, piece: Piece) -> float:
    """The piece's share of its collective's bytes on the wire."""
    return s.collective.wire_bytes * piece.payload_bytes / max(s.collective.payload_bytes, 1)


def listed(paths: Iterable[str]) -> str:
    """ "embed/tokens, layers/mlp/up/kernel, layers/mlp/down/kernel and 3 more"."""
    names = list(paths)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Judge:
    """The promises, and what is left of each parameter's part of them."""

    def __init__(self, step: Step, promised: Theory, parameters: Parameters) -> None:
        self.step, self.promised, self.parameters = step, promised, parameters
        self._left: dict[tuple[str, tuple[str, ...]], float] = {}

    def line(self, s: Sent, piece: Piece) -> str | None:
        """Where a tensor that belongs to no parameter is sent: where the trace has one like it, the line is exact."""
        issued = self.step.sends.issued if self.step.sends is not None else ()
        alike = [each for each in issued if each.kind == s.collective.kind and each.dims == piece.dims]
        lines = dict.fromkeys(line for each in alike if (line := users_line(each.source_lines)) is not None)
        return next(iter(lines)) if len(lines) == 1 else piece.line

    def fault(self, s: Sent, piece: Piece, like: tuple[Placement, ...]) -> Fault | None:
        """What is wrong with a piece; None where the promise covers it."""
        promise = self.promised.promise(s.collective.kind)
        if not like:
            return Fault(
                "no parameter has this shape, so it is activations or a part of the batch", 1.0, self._keep_local()
            )
        if s.collective.kind == "all-reduce" and all(place.path in self.promised.whole.paths for place in like):
            return self._planned(s, piece, like)
        if promise is None:
            return self._unnamed(s, like)
        if s.in_accumulation_loop and promise.rounds == 1:
            promised_once = 1 - 1 / max(self.step.accumulate, 1)
            return Fault("sent for every microbatch, and promised once a step", promised_once, self._manual())
        return self._used_up(s, piece, promise, like)

    def _unnamed(self, s: Sent, like: tuple[Placement, ...]) -> Fault:
        """A kind that the row does not have."""
        row = self.step.plan.row
        if s.collective.kind != "all-reduce" or not row.shard_state:
            reason = f"{row.name} promises no {s.collective.kind}"
            return Fault(reason, 1.0, self._keep_local())
        whole = [place for place in like if place.dim is None]
        if whole:
            devices = self.step.plan.mesh.shape[DATA]
            remedy = (
                f"Make a dimension divide by {devices} (another size in [model], or padding), or lay the devices as "
                "replica × data ([mesh] replica = ...)."
            )
            if "min_shard_size" in whole[0].reason:
                remedy = "Lower Plan(min_shard_size=...), so that it is sharded."
            return Fault(
                f"cannot be sharded, so its gradient is summed on every device; it is {whole[0].reason}",
                1.0,
                remedy,
                sum(place.bytes_per_device for place in whole),
            )
        remedy = self._manual()
        if self.step.plan.mesh.devices.flat[0].platform == "cpu":
            remedy = (
                "XLA:CPU makes no reduce-scatter of a sharding constraint, XLA:GPU does: judge the GPU's program "
                f"(target='h100:1x8'). Here: {remedy}"
            )
        return Fault("reduced whole on every device, where a shard would do", 1.0, remedy)

    def _planned(self, s: Sent, piece: Piece, like: tuple[Placement, ...]) -> Fault | None:
        """Parameters too small to shard, whose all-reduce is planned as often and as wide as `Whole` says."""
        step, sizes = self.step, [math.prod(self.parameters.local(place)) for place in like]
        rounds = step.accumulate if step.plan.row.reduce_each_microbatch else 1
        size, key = piece.payload_bytes * s.collective.count, ("whole", tuple(place.path for place in like))
        whole = rounds * step.precision.reduce_dtype.itemsize * sum(sizes)
        left = self._left.get(key, whole)
        self._left[key] = left - size
        if size <= left:
            return None
        return Fault("sent more often, or wider, than planned", 1 - max(left, 0) / size, self._manual())

    def _used_up(self, s: Sent, piece: Piece, promise: Promise, like: tuple[Placement, ...]) -> Fault | None:
        """More bytes than the parameters' part of the promise still allows."""
        kind, size = s.collective.kind, piece.payload_bytes * s.collective.count
        key = (kind, tuple(place.path for place in like))
        counted = [place for place in like if place.trained or kind == "all-gather"]  # frozen ones have no gradients
        elements = sum(math.prod(self.parameters.local(place)) for place in counted)
        whole = promise.payload_bytes * elements / promise.parameters
        if kind == "all-gather" and self.promised.gathered is not None:
            whole = self._traced_bytes({place.path for place in like})
        left = self._left.get(key, whole)
        self._left[key] = left - size
        if size <= left + (TOLERANCE - 1) * whole:
            return None
        excess, wide = 1 - max(left, 0.0) / size, bits(piece.dtype) // 8
        if wide > promise.itemsize:
            reason = f"sent in {wide} bytes an element, and {promise.itemsize} are promised"
            return Fault(reason, excess, self._narrow(kind))
        return Fault("sent more often than promised", excess, self._shared() or self._manual())

    def _shared(self) -> str:
        """The remedy where the step itself asks for more gathers than zero3 promises; else empty."""
        asked = sum(each.payload_bytes for each in self.promised.gathered or ())
        if asked <= TOLERANCE * self.promised.most_gathered_bytes:
            return ""
        return (
            "The step itself asks for it: a weight that is given to several layers or layer loops is gathered, and its "
            "gradient reduced, in each. Use it outside of jdp.scan_layers, where both are done once a microbatch, or "
            "take zero2."
        )

    def _traced_bytes(self, paths: set[str]) -> float:
        """What the step's own trace gathers of these parameters, as far as zero3 promises it."""
        gathered = self.promised.gathered or ()
        share = min(1.0, self.promised.most_gathered_bytes / max(sum(each.payload_bytes for each in gathered), 1))
        return share * sum(each.payload_bytes for each in gathered if each.path in paths)

    # Remedies.

    def _manual(self) -> str:
        """How to get each device to sum by itself first."""
        if self.step.partitioning == "manual":
            return "The step is partitioned by hand already, so the loss itself asks for it: look at that line."
        if self.step.requested is None and "jdp.Loss" in self.step.why:
            return "Return jdp.Loss(total, weight) from the loss: then partitioning=None picks manual."
        return "Use partitioning='manual': each device sums its own first, and they synchronise once."

    def _keep_local(self) -> str:
        if self.step.partitioning == "manual":
            return "The loss asks for it: leave that collective out, or take its traffic as the loss' own."
        return (
            "Keep it on its device: constrain it to the batch's sharding at that line (jax.lax.with_sharding_constraint"
            "), or use partitioning='manual'."
        )

    def _narrow(self, kind: str) -> str:
        compute, reduce = self.step.precision.compute, self.step.precision.reduce
        if kind == "all-gather":
            return f"Cast it to {compute} before it is gathered, or use the working copy that the loss gets."
        return f"precision.reduce is {reduce}; partitioning='manual' reduces in it."
