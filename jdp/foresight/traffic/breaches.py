"""Why a program breaks the contract: the collective, the parameter, the source line, and the fix.

If a kind of collective exceeds its promise, each of its tensors is compared with the promise. A tensor is at fault if
no parameter has its shape, or if the row does not name the kind. It is also at fault if it is sent for every microbatch
instead of once a step, or too often or too wide for the share of its parameters. Tensors with the same fault share one
sentence (`Fault`). Traffic that belongs to no parameter (`strays`) is reported even if the contract is kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jdp.base.formatting import format_bytes, listed
from jdp.core.reading.collectives import UPDATE, Issued
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.step import Step
from jdp.foresight.program.module import bits
from jdp.foresight.traffic.contract import SLACK, TINY, TOLERANCE, MeshCollective, Verdict
from jdp.foresight.traffic.origin import Parameters, Piece, Reading, is_own_line, users_line
from jdp.foresight.traffic.theory import Promise, Theory

_MENTIONED = 0.002  # of theory: a fault that explains less gets no sentence, unless none explains more

_COMPLETE = "Use an elementwise optimizer, or jdp.muon, which divides the matrices among the devices."


class Reason(NamedTuple):
    """The fault of a tensor."""

    words: str  # a clause
    remedy: str  # a sentence
    share: float = 1.0  # excess share of the tensor's bytes
    bytes_at_rest: int = 0  # bytes at rest on every device of a leaf that could not be sharded


@dataclass
class Fault:
    """Tensors sent by one kind of collective, in one dtype, from one source line, for the same reason."""

    reason: Reason  # of the first tensor, like `sent_by`
    sent_by: MeshCollective
    dtype: str  # of all tensors, like `source_line`
    source_line: str | None
    paths: dict[str, None] = field(default_factory=dict[str, None])  # of their parameters
    payload_bytes: int = 0  # of one execution, summed
    excess_bytes: float = 0.0  # excess of a device in a step, summed

    def __str__(self) -> str:
        c = self.sent_by.collective
        often = "" if c.count == 1 else f", {c.count} times a step"
        what = f" for {listed(self.paths)} (by shape)" if self.paths else ""
        at = f", at {self.source_line}" if self.source_line else ""
        excess = f"{format_bytes(self.excess_bytes)} a device too much."
        if self.reason.bytes_at_rest:
            held = format_bytes(self.reason.bytes_at_rest)
            excess = f"It is replicated on every device, {held}, and so is its optimizer state."
        sent = f"{c.kind} of {format_bytes(self.payload_bytes)} {self.dtype}{often}{what}{at}"
        return f"{sent}: {self.reason.words}. {excess} {self.reason.remedy}"


def strays(collectives: Iterable[MeshCollective], promised: Theory, reading: Reading, step: Step) -> list[Fault]:
    """Return traffic along the batch axes without a parameter's shape, most bytes first; not counts and metrics."""
    tensors = _tensors((each for each in collectives if each.over_batch), promised, reading)
    unknown = ((each, piece) for each, piece in tensors if not reading.parameters.like(piece.dims))
    faults = _Judge(promised, reading.parameters, step).faults(unknown)
    return [fault for fault in faults if fault.payload_bytes > TINY]


def breaches(
    collectives: Iterable[MeshCollective],
    promised: Theory,
    verdict: Verdict,
    reading: Reading,
    step: Step,
    stray: Sequence[Fault] = (),
) -> tuple[str, ...]:
    """Return why the contract is broken, a sentence for each reason. `stray`: the faults of `strays`."""
    if verdict.kept:
        return ()
    blamed = {row.kind for row in verdict.rows if not row.kept}
    if sum(fault.excess_bytes for fault in stray) > SLACK * promised.wire_bytes:
        blamed |= {fault.sent_by.collective.kind for fault in stray}
    blamed = blamed or {row.kind for row in verdict.rows}
    counted = [each for each in collectives if each.over_batch and each.collective.kind in blamed]
    tensors = sorted(_tensors(counted, promised, reading), key=lambda pair: bits(pair[1].dtype))
    faults, unsharded = _Judge(promised, reading.parameters, step).faults(tensors), promised.unsharded
    of_weight = [fault for fault in faults if fault.paths or fault.payload_bytes > TINY]
    of_weight = of_weight or ([] if unsharded.paths else faults)
    if of_weight:
        mentioned = [fault for fault in of_weight if fault.excess_bytes >= _MENTIONED * promised.wire_bytes]
        return tuple(map(str, mentioned or of_weight[:1]))
    # No tensor is at fault: parameters left unsharded by the plan may send more than theory allows for them.
    total, bound = format_bytes(verdict.wire_bytes), format_bytes(promised.wire_bytes)
    sentence = f"a device sends {total} a step where {bound} are promised."
    if unsharded.paths:
        sentence += (
            f" {listed(unsharded.paths)}, of fewer than {unsharded.fewer_than} elements, are all-reduced whole by "
            f"plan: {format_bytes(unsharded.wire_bytes)}, more than scattered and gathered in this precision. "
            "Lower Plan(min_shard_size=...), or take the strategy ddp for a model this small."
        )
    return (sentence,)


def _tensors(
    collectives: Iterable[MeshCollective], promised: Theory, reading: Reading
) -> Iterator[tuple[MeshCollective, Piece]]:
    """Yield each collective with each tensor that it sends, without batch statistics."""
    for each in collectives:
        for piece in reading.sites.pieces(each.collective):
            if not (each.statistics_bytes and promised.statistics.fits(piece)):
                yield each, piece


class _Judge:
    """Compares tensors with the promises, and tracks the unused part of each parameter's share."""

    def __init__(self, promised: Theory, parameters: Parameters, step: Step) -> None:
        self.promised, self.parameters, self.step = promised, parameters, step
        self._left: dict[tuple[str, tuple[str, ...]], float] = {}

    def faults(self, tensors: Iterable[tuple[MeshCollective, Piece]]) -> list[Fault]:
        """Return the faults, most excess bytes first; tensors use up the promises in order."""
        faults: dict[tuple[object, ...], Fault] = {}
        for sent_by, piece in tensors:
            c, parameters = sent_by.collective, self.parameters.like(piece.dims)
            reason, line = self._reason(sent_by, piece, parameters), piece.source_line
            if reason is None:
                continue
            if not parameters:
                # If the step's trace has a collective like this one, its source line is exact.
                issued = self._issued(c.kind, piece)
                lines = {written for each in issued if (written := users_line(each.source_lines)) is not None}
                line = lines.pop() if len(lines) == 1 else line
            key = (c.kind, piece.dtype, c.loops, sent_by.in_accumulation_loop, line, reason.words)
            fault = faults.setdefault(key, Fault(reason, sent_by, piece.dtype, line))
            fault.paths |= dict.fromkeys(placement.path for placement in parameters)
            fault.payload_bytes += piece.payload_bytes
            fault.excess_bytes += reason.share * (c.wire_bytes * piece.payload_bytes / max(c.payload_bytes, 1))
        return sorted(faults.values(), key=lambda fault: -fault.excess_bytes)

    def _reason(self, sent_by: MeshCollective, piece: Piece, parameters: tuple[Placement, ...]) -> Reason | None:
        """Return the fault of a tensor with these parameters' shape; None if the promise covers it."""
        c, step, row = sent_by.collective, self.step, self.step.plan.row
        promises, size = self.promised.of_kind(c.kind), piece.payload_bytes * c.count
        if c.kind == "all-reduce" and row.shard_state:  # ddp's promise covers leaves that no dimension divides
            whole = bool(parameters) and all(each.is_indivisible for each in parameters)
            promises = [each for each in promises if (each.axes == step.plan.batch_axes) == whole]
        promise = next(iter(promises), None)
        packed = self.promised.packed.get(c.kind, 0)  # codes, or parts of matrices, of any shape
        counts = packed and (not parameters or c.kind == "all-to-all")
        if counts and size <= TOLERANCE * self._use_up(("packed", (c.kind,)), packed, size):
            return None
        # XLA may join an update's collective with that of the working copy, which is narrower.
        if UPDATE in (c.op_name or "") and bits(piece.dtype) >= 32 and piece.payload_bytes > TINY:
            return Reason("the optimizer's update computes with complete arrays", _COMPLETE)
        if not parameters:
            words = "no parameter has this shape, so these are activations or parts of the batch"
            return Reason(words, self._keep_local())
        paths, remedy = tuple(placement.path for placement in parameters), self._manual(c.kind, piece)
        if c.kind == "all-reduce" and all(path in self.promised.unsharded.paths for path in paths):
            rounds = step.settings.accumulate if row.reduce_each_microbatch else 1
            elements = rounds * self.parameters.working_elements(parameters)
            planned = step.settings.precision.reduce_dtype.itemsize * elements
            left = self._use_up(("unsharded", paths), planned, size)
            if size <= left:
                return None
            return Reason("sent more often, or wider, than planned", remedy, 1 - max(left, 0) / size)
        if promise is None:
            return self._unpromised(c.kind, parameters, remedy)
        if sent_by.in_accumulation_loop and promise.rounds == 1:
            words = "sent for every microbatch, but promised once a step"
            return Reason(words, remedy, 1 - 1 / max(step.settings.accumulate, 1))
        allowance = self._allowance(promise, parameters)
        left = self._use_up((c.kind, paths), allowance, size)
        if size <= left + (TOLERANCE - 1) * allowance:
            return None
        excess, itemsize = 1 - max(left, 0.0) / size, bits(piece.dtype) // 8
        if itemsize > promise.itemsize:
            remedy = f"precision.reduce is {step.settings.precision.reduce}; partitioning='manual' reduces in it."
            if c.kind == "all-gather":
                compute = step.settings.precision.compute
                remedy = f"Cast it to {compute} before it is gathered, or use the working copy that the loss gets."
            words = f"sent in {itemsize} bytes an element, but {promise.itemsize} are promised"
            return Reason(words, remedy, excess)
        requested = sum(each.payload_bytes for each in self.promised.gathered or ())
        if requested > TOLERANCE * self.promised.most_gathered_bytes:
            remedy = (
                "The step itself requests it: a weight shared by several layers or layer loops is gathered, and its "
                "gradient reduced, in each. Use the weight outside jdp.scan_layers, where both happen once a "
                "microbatch, or use zero2."
            )
        return Reason("sent more often than promised", remedy, excess)

    def _unpromised(self, kind: str, parameters: tuple[Placement, ...], remedy: str) -> Reason:
        """Return the fault of a kind that the strategy's row does not name; `remedy` comes from `_manual`."""
        plan = self.step.plan
        if kind != "all-reduce" or not plan.row.shard_state:
            return Reason(f"{plan.row.name} promises no {kind}", self._keep_local())
        if unsharded := [placement for placement in parameters if placement.dim is None]:
            remedy = f"Name {DATA} in its rule."
            if "min_shard_size" in unsharded[0].reason:
                remedy = "Lower Plan(min_shard_size=...), so that it is sharded."
            words = f"is not sharded, so its gradient is summed on every device; it is {unsharded[0].reason}"
            return Reason(words, remedy, bytes_at_rest=sum(placement.bytes_per_device for placement in unsharded))
        return Reason("reduced whole on every device, although a shard would do", remedy)

    def _allowance(self, promise: Promise, parameters: tuple[Placement, ...]) -> float:
        if promise.kind == "all-gather" and self.promised.gathered is not None:
            gathered, paths = self.promised.gathered, {placement.path for placement in parameters}
            total = sum(each.payload_bytes for each in gathered)
            share = min(1.0, self.promised.most_gathered_bytes / max(total, 1))  # as far as zero3 promises it
            return share * sum(each.payload_bytes for each in gathered if each.path in paths)
        # Frozen parameters have no gradients.
        counted = [each for each in parameters if each.trained or promise.kind == "all-gather"]
        return promise.payload_bytes * self.parameters.working_elements(counted) / max(promise.parameters, 1)

    def _use_up(self, key: tuple[str, tuple[str, ...]], allowance: float, size: float) -> float:
        left = self._left.get(key, allowance)
        self._left[key] = left - size
        return left

    def _issued(self, kind: str, piece: Piece) -> list[Issued]:
        sizes = [size for size in piece.dims if size > 1]
        issued = self.step.sends.issued if self.step.sends is not None else ()
        return [each for each in issued if each.kind == kind and [size for size in each.dims if size > 1] == sizes]

    def _manual(self, kind: str, piece: Piece) -> str:
        """Return the remedy: have each device sum its own gradients first."""
        if self.step.partitioning == "manual":
            innermost = [line for each in self._issued(kind, piece) for line in each.source_lines[:1]]
            if innermost and all(map(is_own_line, innermost)):
                return "jdp sends it, not the loss: please report this bug."
            return "The step uses partitioning='manual' already, so the loss requests it: check that line."
        return "Use partitioning='manual': each device sums its own gradients first, and all synchronise once."

    def _keep_local(self) -> str:
        if self.step.partitioning == "manual":
            return "The loss requests it: remove that collective, or accept its traffic as part of the loss."
        return (
            "Keep it on its device: constrain it to the batch's sharding at that line (jax.lax.with_sharding_constraint"
            "), or use partitioning='manual'."
        )
