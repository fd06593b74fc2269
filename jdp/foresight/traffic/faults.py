"""Why a program breaks the contract: the collective, the parameter, the source line, and the fix.

If a kind of collective exceeds its promise, each of its tensors is compared with the promise. A tensor is at fault if
no parameter has its shape, or if the row does not name the kind. It is also at fault if it is sent for every microbatch
instead of once a step, or too often or too wide for the share of its parameters. Tensors with the same fault share one
sentence (`Fault`). Traffic that belongs to no parameter (`strays`) is reported even if the contract is kept.

Also signs that a step does something unintended (`symptoms`): a tensor is copied whole to every device because XLA
could not go from one sharding to another. The step waits for the host. A donated leaf is not updated in place, so it is
held twice.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jdp.base.formatting import format_bytes, listed
from jdp.core.reading import UPDATE
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement
from jdp.core.step import Step
from jdp.foresight.memory import path_of_name
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.program.module import HOST_MEMORY, Instruction, Program, array_bytes, bits, shapes
from jdp.foresight.traffic.contract import SLACK, TINY, TOLERANCE, MeshCollective, Verdict
from jdp.foresight.traffic.origin import Parameters, Piece, Reading, line_of, users_line
from jdp.foresight.traffic.theory import Promise, Theory

_MENTIONED = 0.002  # of theory: a fault that explains less gets no sentence, unless none explains more


class Reason(NamedTuple):
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
    """Compares tensors with the promises, whose unused part it tracks for each parameter."""

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
            if not parameters and self.step.sends is not None:
                # If the step's trace has a collective like this one, its source line is exact.
                sizes = [size for size in piece.dims if size > 1]
                issued = [each for each in self.step.sends.issued if each.kind == c.kind]
                alike = [each for each in issued if [size for size in each.dims if size > 1] == sizes]
                lines = {users_line(each.source_lines) for each in alike} - {None}
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
            remedy = "Use an elementwise optimizer, or jdp.muon, which divides the matrices among the devices."
            return Reason("the optimizer's update computes with complete arrays", remedy)
        if not parameters:
            words = "no parameter has this shape, so these are activations or parts of the batch"
            return Reason(words, self._keep_local())
        paths = tuple(placement.path for placement in parameters)
        remedy = "Use partitioning='manual': each device sums its own gradients first, and all synchronise once."
        if step.partitioning == "manual":
            remedy = "The step uses partitioning='manual' already: check that line."
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
        """Return the fault of a kind that the strategy's row does not name."""
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
        if promise.axes == (DATA,):
            counted = [each for each in counted if each.path not in self.promised.looked_up]
        return promise.payload_bytes * self.parameters.working_elements(counted) / max(promise.parameters, 1)

    def _use_up(self, key: tuple[str, tuple[str, ...]], allowance: float, size: float) -> float:
        left = self._left.get(key, allowance)
        self._left[key] = left - size
        return left

    def _keep_local(self) -> str:
        if self.step.partitioning == "manual":
            return "The loss requests it: remove that collective, or accept its traffic as part of the loss."
        return (
            "Keep it on its device: constrain it to the batch's sharding at that line (jax.lax.with_sharding_constraint"
            "), or use partitioning='manual'."
        )


# Signs of something unintended, which break no contract.

AS_PLANNED = "its placement differs from the plan's. Place the state by the plan (jdp.init_state, jdp.restore)."
"""Why a leaf of a training step's state is not updated in place, and the fix."""


def symptoms(reading: Reading, placing: str = AS_PLANNED) -> tuple[str, ...]:
    """Return every sign once, a sentence each; `placing`: why a donated argument may be held twice."""
    program = reading.compiled.program
    sentences = [
        *_resharded(reading.compiled, reading.parameters),
        *_host(program, offloads=reading.offloads),
        *_held_twice(program, reading.donated, placing),
    ]
    return tuple(dict.fromkeys(sentences))


def _at(line: str | None) -> str:
    return f" ({line})" if line else ""


_OPERATION = re.compile(r"HLO operation:? %?[\w.\-]+ = (\S+)(?:.*?op_name=\"((?:[^\"\\]|\\.)*)\")?")
_CHANGE = re.compile(r"from sharding (\{.*\}) to (\{.*\}) (?:without|efficiently)")
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_MESH = re.compile(r"mesh\[(.*?)\], \[(.*)\]")


def _resharded(compiled: Compiled, parameters: Parameters) -> Iterator[str]:
    for warning in compiled.warnings:
        operation = _OPERATION.search(warning)
        if "ematerializ" not in warning or operation is None:
            continue
        [(dtype, local), *_] = shapes(operation[1]) or [("", ())]
        change = _CHANGE.search(warning)
        dims = _global_dims(local, change[1] if change else "")
        like = parameters.like(dims)
        named = f" (the shape of {listed(placement.path for placement in like)})" if like else ""
        shardings = f" to go from {change[1]} to {change[2]}" if change else ""
        line = _copied_at(dims, operation[2] or "", compiled)
        yield (
            f"Resharding: a tensor {dtype}{list(dims)}{named} is copied whole to every device{shardings}{_at(line)}. "
            "Constrain it to one sharding on both sides, or change one dimension at a time."
        )


def _global_dims(local: tuple[int, ...], sharding: str) -> tuple[int, ...]:
    """Return a shard's dimensions times the tiles of its sharding, printed as by jax 0.10 (`devices=`) or 0.12."""
    if tiles := _TILES.search(sharding):
        counts = [int(tile) for tile in tiles[1].split(",")]
    elif mesh := _MESH.search(sharding):
        sizes = {axis: int(count) for axis, count in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        named = (re.findall(r"'(\w+)'", axes) for axes in re.findall(r"\{([^}]*)\}", mesh[2]))
        counts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in named]
    else:
        counts = list[int]()
    return tuple(size * (counts[dim] if dim < len(counts) else 1) for dim, size in enumerate(local))


def _copied_at(dims: tuple[int, ...], op_name: str, compiled: Compiled) -> str | None:
    """Return the line of a collective that makes the whole tensor; the warning's own is invalid in the program."""
    parent = op_name.rpartition("/")[0]
    same_shape = [c for c in compiled.collectives if any(sorted(shape) == sorted(dims) for _, shape in c.shapes)]
    exact = [c for c in same_shape if c.op_name == op_name]
    siblings = [c for c in same_shape if (c.op_name or "").rpartition("/")[0] == parent]
    lines = (line_of(c.source_lines) for c in (*exact, *siblings, *same_shape))
    return next((line for line in lines if line), None)


_CALLBACK = re.compile(r'custom_call_target="([^"]*callback[^"]*)"')
_TRANSFERS = ("infeed", "outfeed", "send", "recv")


def _host(program: Program, *, offloads: bool) -> Iterator[str]:
    """Yield a sentence for each transfer to or from the host in the step; with `offloads`, copies are intended."""
    for step in (step for steps in program.computations.values() for step in steps):
        if callback := _CALLBACK.search(step.line):
            operation = (step.op_name or step.name).rpartition("/")[2]
            yield (
                f"The host: {operation} calls back into Python ({callback[1]}){_line(program, step)}, and the step "
                "waits. Remove it, or return its values as metrics."
            )
        elif step.opcode in _TRANSFERS and ("feed" in step.opcode or "is_host_transfer=true" in step.line):
            moved = format_bytes(step.result_bytes)
            yield f"The host: {step.opcode} moves {moved} to or from it inside the step{_line(program, step)}."
        elif step.opcode in ("copy", "copy-start") and HOST_MEMORY in step.type and not offloads:
            copied = max(array_bytes(dtype, dims) for dtype, dims in step.shapes)
            moved, line = format_bytes(copied), _line(program, step)
            yield f"The host: {moved} are copied to or from its memory inside the step{line}."


def _line(program: Program, step: Instruction) -> str:
    return _at(line_of(program.source_lines(step)))


_MENTIONED_BYTES = 1024


def donated_state(program: Program) -> dict[int, str]:
    """Return number -> path of the leaves of a training step's state, which are all donated."""
    named = program.argument_bytes.items()
    return {number: path_of_name(name) for number, (name, _) in named if name.startswith("state.")}


def _held_twice(program: Program, donated: Mapping[int, str], placing: str) -> Iterator[str]:
    held, large = donated.keys() - {number for _, number, _ in program.written_into}, dict[str, int]()
    for step in program[program.entry]:
        number = step.parameter_number
        if number is not None and number in held and step.result_bytes >= _MENTIONED_BYTES:
            large[donated[number]] = step.result_bytes
    if large:
        first = sorted(large, key=lambda path: -large[path])
        yield (
            f"Donation: {listed(first)} ({format_bytes(sum(large.values()))} a device) cannot be updated in place "
            f"and is held twice while the step runs: {placing}"
        )
