"""`jdp.verify`: compile a training step and hold it against the communication contract.

1. The step and its operands as abstract values on the target's devices (`relocate`).
2. Compiled; every collective read off the program, with the mesh axes and the loop it runs in (`contract.sent`).
3. Held against theory (`contract.judge`), which for zero3 is what the step's own trace gathers (`gathering`).
4. Where it breaks, the reasons (`breach`); what belongs to no parameter in any case.
5. What else the program tells (`symptoms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdp.core.disk_cache import Cache
from jdp.core.formatting import align_columns, format_bytes
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.foresight.program.compiled import Compiled, compile_step
from jdp.foresight.targets.chips import XLA_TYPES
from jdp.foresight.targets.relocate import Relocated, abstract_on
from jdp.foresight.targets.resolve import Target
from jdp.foresight.targets.this_machine import fingerprint, target_of
from jdp.foresight.traffic.breaches import breaches, strays
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, Row, Sent, Theory, judge, sent, theory
from jdp.foresight.traffic.gathering import Gathering, gathering
from jdp.foresight.traffic.origin import Sites
from jdp.foresight.traffic.symptoms import symptoms


def verify(
    step: Step, state: TrainState, batch: Batch, target: str | Target | None = None, *, cache: bool = True
) -> Report:
    """Compile a training step, and hold what it sends against its strategy's contract. Nothing runs.

    Args:
        step: a training step (`jdp.make_train_step`).
        state, batch: real or abstract (`jdp.abstract_state`, `jax.ShapeDtypeStruct`); the batch is the global one.
        target: devices to compile for, such as "h100:8x8"; None: those that `state` lies on.
        cache: keep compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp) and use them.

    Returns:
        A `Report`: `.kept`, `.breaches`; `print(report)` is a table.

    Raises:
        ValueError: an evaluation step, a bad target, a step that does not compile; without a target, a batch that does
            not divide (for a target its rows are raised, and the notes say so).
    """
    if not step.train:
        raise ValueError(
            "The contract is about training: jdp.verify takes a step of jdp.make_train_step; got an evaluation step."
        )
    relocated = abstract_on(step, state, batch, target)
    return verify_relocated(relocated, target_of(target, relocated.state), cache=cache)


def verify_relocated(relocated: Relocated, target: Target, *, cache: bool = True) -> Report:
    """Compile a step that is on its target already, and compare what it sends with its strategy's contract.

    `jdp.verify` and `jdp verify` both end here; they differ in who makes the step and lays it on the target.

    Args:
        relocated: a training step and its abstract operands on the mesh of the target's devices.
        target: those devices.
        cache: keep compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp) and use them.

    Raises:
        ValueError: the step does not compile (`CompileError`), or does what these devices have no place for.
    """
    compiled = compile_step(relocated.lower(), cache=Cache.usual(cache), described=fingerprint(target))
    return report(relocated.step, relocated.state, compiled, str(target), notes=relocated.notes)


def report(step: Step, state: TrainState, compiled: Compiled, target_name: str, *, notes: Sequence[str] = ()) -> Report:
    """The report of a step that is compiled already.

    Args:
        step, state: as it was lowered: on the mesh it was compiled for, its partitioning settled.
        compiled: the result.
        target_name: what the devices are called.
        notes: more to tell.
    """
    promised = theory(
        step.plan,
        state.params,
        accumulate=step.accumulate,
        precision=step.precision,
        static=state.static,
        sync_batch_norm=step.sync_batch_norm or step.partitioning == "auto",
        gathered=None if step.sends is None else step.sends.gathered,
    )
    found = sent(compiled, step.plan.mesh, step.accumulate, promised.statistics)
    sites = Sites(compiled.program, step.accumulate)
    beside = strays(found, promised, sites, step, state)
    verdict = judge(found, promised, sum(stray.wire_bytes for stray in beside))
    why = breaches(found, promised, verdict, sites, step, state, beside)
    return Report(
        kept=verdict.kept,
        strategy=step.plan.strategy,
        partitioning=step.partitioning or "",
        why=step.why,
        target=target_name,
        mesh=dict(step.plan.mesh.shape),
        accumulate=step.accumulate,
        theory=promised,
        wire_bytes_per_device=verdict.wire_bytes,
        theory_wire_bytes_per_device=verdict.theory_wire_bytes,
        ratio=verdict.ratio,
        rows=verdict.rows,
        own=verdict.own,
        statistics=verdict.statistics,
        collectives=tuple(found),
        breaches=why,
        strays=tuple(stray.words for stray in beside if stray.words not in why),
        gathering=gathering(step, state),
        symptoms=symptoms(compiled, step.plan, state),
        notes=tuple(dict.fromkeys((*notes, *_whole(promised, verdict.rows), *_notes(step, found)))),
    )


def _whole(promised: Theory, rows: Iterable[Row]) -> Iterable[str]:
    """What is all-reduced whole by plan, where an all-reduce carries more than the slack."""
    whole, bound = promised.whole, promised.wire_bytes
    if whole.paths and any(row.kind == "all-reduce" and row.wire_bytes > SLACK * bound for row in rows):
        what = f"{len(whole.paths)} parameters" if len(whole.paths) > 1 else "1 parameter"
        verb = "are" if len(whole.paths) > 1 else "is"
        payload = format_bytes(whole.payload_bytes)
        yield (
            f"{what} of fewer than {whole.fewer_than} elements {verb} all-reduced whole: {payload} a step, as planned; "
            "theory counts them as if they were sharded"
        )


def _notes(step: Step, found: Iterable[Sent]) -> Iterable[str]:
    """What the numbers rest on: the dtype that gradients are reduced in, loops of unknown length, whose compiler."""
    counted = [s for s in found if s.over_batch]
    for caveat in dict.fromkeys(caveat for s in counted for caveat in s.collective.caveats):
        names = dict.fromkeys(s.collective.kind for s in counted if caveat in s.collective.caveats)
        yield f"{', '.join(names)} {caveat}, so it may send more than is told here"
    reductions = [s.collective for s in counted if s.collective.kind in ("all-reduce", "reduce-scatter")]
    total, asked = sum(c.wire_bytes for c in reductions), XLA_TYPES[step.precision.reduce]
    other = [c for c in reductions if c.dtype != asked]
    if sum(c.wire_bytes for c in other) > SLACK * total:
        got = ", ".join(sorted({c.dtype for c in other}))
        choose = "auto cannot choose it" if step.partitioning == "auto" else "the compiler chose otherwise"
        yield f"gradients are reduced in {got}, and precision.reduce is {step.precision.reduce}: {choose}"
    if counted and step.plan.mesh.devices.flat[0].platform == "cpu":
        yield (
            "this is XLA:CPU's program, which makes no reduce-scatter of a sharding constraint and has its own dtypes; "
            "what GPUs will send is judged with the target h100:1x8"
        )


@dataclass(frozen=True)
class Report:
    """What a compiled training step sends, against its contract.

    Attributes:
        kept: it sends no more than `contract.TOLERANCE` times what its strategy promises, and nothing else of weight.
        strategy, accumulate, mesh, target: what was compiled (K; axis -> size; the devices' name).
        partitioning, why: as the step settled it.
        theory: the promise.
        wire_bytes_per_device, theory_wire_bytes_per_device, ratio: a step, along the batch axes; the ratio is 0 where
            there is no other device.
        rows: one a kind of collective, found and promised.
        own: the same for what runs along the model's own axes, which the contract says nothing about.
        statistics: the same for the statistics of batch norms over all devices, which it leaves out too; None: none.
        collectives: each collective that sends something, in schedule order.
        breaches: why it is not kept, a sentence each, with parameter, source line and remedy; empty when it is kept.
        strays: what is sent besides and belongs to no parameter, a sentence each; those that break the contract are
            among `breaches`.
        gathering: under zero3, what is gathered where, by the step's own trace; else None.
        symptoms: signs of something unmeant, a sentence each (`foresight.symptoms`); they break no contract.
        notes: what the numbers rest on.
    """

    kept: bool
    strategy: str
    partitioning: str
    why: str
    target: str
    mesh: dict[str, int]
    accumulate: int
    theory: Theory
    wire_bytes_per_device: float
    theory_wire_bytes_per_device: float
    ratio: float
    rows: tuple[Row, ...]
    own: tuple[Row, ...]
    collectives: tuple[Sent, ...] = field(repr=False)
    statistics: Row | None = None
    breaches: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    gathering: Gathering | None = field(default=None, repr=False)
    symptoms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def like_zero2(self) -> str:
        """Under zero3, a sentence where it holds most of its weights whole all the same; else empty."""
        return "" if self.gathering is None else self.gathering.like_zero2()

    def to_json(self) -> dict[str, Any]:
        """The object that `jdp verify --json` prints."""
        return {
            "kept": self.kept,
            "strategy": self.strategy,
            "target": self.target,
            "wire_bytes_per_device": self.wire_bytes_per_device,
            "theory_wire_bytes_per_device": self.theory_wire_bytes_per_device,
            "ratio": self.ratio,
            "collectives": [s.to_json() for s in self.collectives],
            "breaches": list(self.breaches),
            "accumulate": self.accumulate,
            "mesh": self.mesh,
            "partitioning": self.partitioning,
            "why": self.why,
            "rows": [row.to_json() for row in self.rows],
            "model_axes": [row.to_json() for row in self.own],
            "batch_statistics": None if self.statistics is None else self.statistics.to_json(),
            "strays": list(self.strays),
            "gathers": None if self.gathering is None else self.gathering.to_json(),
            "gathers_at_most_bytes": None if self.gathering is None else self.theory.most_gathered_bytes,
            "like_zero2": self.like_zero2 or None,
            "symptoms": list(self.symptoms),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        axes = " × ".join(f"{name}={count}" for name, count in self.mesh.items())
        head = f"{self.strategy} on {axes} for {self.target}, K={self.accumulate}, {self.partitioning}: {self.why}"
        parts = [[head, self._verdict(), *filter(None, [self.like_zero2])]]
        if self.rows:
            parts.append(align_columns([_HEADERS, *map(_cells, self.rows)]))
        if self.gathering is not None and self.gathering.gathered:
            most = format_bytes(self.theory.most_gathered_bytes)
            title = f"What the step itself gathers, which is what is expected; zero3 promises 2·K·c·Ψ = {most} at most:"
            parts.append([title, *self.gathering.table()])
        if self.own:
            title = "Along the model's own axes, which the contract leaves to the model:"
            parts.append([title, *align_columns([_HEADERS, *map(_cells, self.own)])])
        if self.statistics is not None:
            title = "Statistics of batch norms over all devices, which the contract leaves out:"
            parts.append([title, *align_columns([_HEADERS, _cells(self.statistics)])])
        if self.collectives:
            parts.append(align_columns([_LISTED, *_grouped(self.collectives)]))
        lists = {
            "Breaches": self.breaches,
            "Sent besides": self.strays,
            "Symptoms": self.symptoms,
            "Notes": self.notes,
        }
        for title, lines in lists.items():
            if lines:
                parts.append([f"{title}:", *(f"- {line}" for line in lines)])
        return "\n\n".join("\n".join(part) for part in parts)

    def _verdict(self) -> str:
        if not self.theory_wire_bytes_per_device:
            return "Kept: one shard of the batch, so nothing is sent."
        said = (
            f"a device sends {format_bytes(self.wire_bytes_per_device)} a step, {self.ratio:.3f} of theory's "
            f"{format_bytes(self.theory_wire_bytes_per_device)}"
        )
        if self.kept:
            return f"Kept: {said}."
        return f"BROKEN: {said}, {self._rule()}."

    def _rule(self) -> str:
        """Which rule of the contract is broken."""
        if self.ratio > TOLERANCE:
            return f"over {TOLERANCE}"
        over = [row for row in self.rows if not row.kept and not row.expected_bytes]
        gathers = next((row for row in self.rows if row.kind == "all-gather"), None)
        if gathers is not None and gathers.expected_bytes and not gathers.kept and self.gathering is not None:
            return f"in all within {TOLERANCE}; but its gathers are over {TOLERANCE} of those that its own trace has"
        if not over:
            most = format_bytes(SLACK * self.theory_wire_bytes_per_device)
            return f"in all within {TOLERANCE}; but what belongs to no parameter may take {SLACK:.0%} of it, {most}"
        sent = ", ".join(f"{row.kind} {format_bytes(row.wire_bytes)}" for row in over)
        planned = self.theory.whole.wire_bytes if any(row.kind == "all-reduce" for row in over) else 0
        beside = f" beside the {format_bytes(planned)} of parameters that are whole by plan" if planned else ""
        most = format_bytes(SLACK * self.theory_wire_bytes_per_device)
        return (
            f"in all within {TOLERANCE}; but a kind of collective that {self.strategy} does not promise may send at "
            f"most {SLACK:.0%} of theory's, {most}{beside}: {sent}"
        )


_HEADERS = ("kind", "expected", "found", "ratio", "in the microbatch loop", "wire a device", "")
_LISTED = ("collective", "dtype", "payload", "times", "axes", "loop", "wire a device", "")


def _cells(row: Row) -> tuple[str, ...]:
    looped = "no"
    if row.in_loop_bytes:
        looped = "yes" if row.in_loop_bytes == row.found_bytes else f"{format_bytes(row.in_loop_bytes)} of it"
    expected, ratio = ("–", "–") if row.ratio is None else (format_bytes(row.expected_bytes), f"{row.ratio:.3f}")
    return (
        row.kind,
        expected,
        format_bytes(row.found_bytes),
        ratio,
        looped,
        format_bytes(row.wire_bytes),
        "" if row.kept else "<-",
    )


def _grouped(collectives: Iterable[Sent]) -> Iterable[tuple[str, ...]]:
    """A row for each set of collectives that differ in nothing shown."""
    groups: dict[tuple[str, ...], list[Sent]] = {}
    for s in collectives:
        c = s.collective
        key = (
            c.kind,
            c.dtype,
            format_bytes(c.payload_bytes),
            ", ".join(s.axes),
            "in" if s.in_accumulation_loop else "out",
        )
        groups.setdefault((*key, _apart(s)), []).append(s)
    for (kind, dtype, payload, axes, loop, apart), same in groups.items():
        times = sum(s.collective.count for s in same)
        wire = sum(s.collective.wire_bytes for s in same)
        yield kind, dtype, payload, str(times), axes, loop, format_bytes(wire), apart


def _apart(s: Sent) -> str:
    if s.statistics_bytes:
        return "batch statistics" + (" among others" if s.payload_bytes else "")
    return "" if s.over_batch else "the model's own"
