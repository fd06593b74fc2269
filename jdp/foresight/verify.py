"""`jdp.verify`: compile a training step and compare what it sends with the communication contract.

1. The step and its operands become abstract values on the target's devices (`targets/relocate.py`).
2. The step is compiled, and every collective read from the program, with the mesh axes and the loop it runs in
   (`contract.collectives_on`).
3. They are compared with theory (`contract.compare`), which for zero3 is what the step's own trace gathers.
4. Where the contract is broken, the reasons (`breaches`); in any case what belongs to no parameter (`strays`), and
   other signs of something unintended (`symptoms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import jax

from jdp.base.chips import XLA_TYPES
from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.base.formatting import align_columns, format_bytes
from jdp.base.public import public
from jdp.core.batch import check_state
from jdp.core.sharding.axes import factors
from jdp.core.sharding.traced_mesh import batch_axes
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.core.update.muon import exchanged
from jdp.foresight.any_step.forecast import forecast
from jdp.foresight.memory import memory
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.step_report import CPU_PROGRAM, StepReport, caveats_on
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import Target, check_target, target_of
from jdp.foresight.timing.timeline import timeline
from jdp.foresight.traffic.breaches import breaches, strays
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, MeshCollective, Row, collectives_on, compare
from jdp.foresight.traffic.origin import Parameters, Reading
from jdp.foresight.traffic.sends import Gather, gathers, like_zero2, sent_by
from jdp.foresight.traffic.symptoms import donated_state, symptoms
from jdp.foresight.traffic.theory import Theory, theory


@overload
def verify(step: Step, *arguments: Any, target: str | Target | None = None, **other: Any) -> Report: ...
@overload
def verify(
    step: Callable[..., Any], *arguments: Any, target: str | Target | None = None, **other: Any
) -> StepReport: ...
@public()
def verify(step: Any, *arguments: Any, target: str | Target | None = None, cache: bool = True, **other: Any) -> Any:
    """Compile a training step, and compare what it sends with its strategy's contract, or with given bytes.

        >>> train_step = jdp.make_train_step(loss_fn, plan, partitioning="manual")
        >>> report = jdp.verify(train_step, state, batch)  # or for devices that you do not have: target="h100:8x8"
        >>> print(report.verdict)
        Not judged, as XLA:CPU sends what XLA:GPU does not: a device sends ...

    Nothing runs, and no accelerator is needed. A step of jdp's on CPU devices is counted, not judged: `kept` is None.
    Any jitted step works: `jdp.verify(jitted, model, optimizer, x, y, target="h100:8x8", against="zero3",
    params="model")`.

    Args:
        step: a training step (`jdp.make_train_step`), or any function that is jitted (`jax.jit`, `nnx.jit`,
            `eqx.filter_jit`).
        arguments: its positional arguments, real or abstract (`jdp.abstract_state`, `jax.ShapeDtypeStruct`). Of a step
            of jdp's: the state and the global batch, and perhaps the target. Those of another step are on one mesh, or
            the function was jitted with shardings: each `PartitionSpec` stays as it is, on the target's mesh.
        target: devices to compile for, such as "h100:8x8", for devices that you do not have. None: those of the
            arguments.
        cache: keep compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp) and use them. False: compile anew, to
            measure the time of compilation.
        other: for a step that jdp did not make. `against`: a strategy's name, or the bytes that a device may send a
            step; without it nothing is compared. `params`: which arguments are the parameters, for a strategy's row:
            the number of one, or patterns of paths, such as "model" or "state/params/*". `mesh`: axis -> size on the
            target; without it one axis takes the devices that the others leave: `data`, else the largest that the batch
            is split over.

    Returns:
        A `Report` of a step of jdp's, else a `StepReport`. Both have `.kept`, `.breaches` and `.symptoms`, and
        `print(report)` shows tables.

    Raises:
        ValueError: an evaluation step of jdp's, a bad target, a step that does not compile. Without a target, a batch
            that does not divide; for a target its rows are rounded up, and the notes report it. Of another step: it is
            not jitted, its arguments are on no mesh or on two, or the axes do not fit the target. Or a `shard_map` over
            a mesh of its own would have to change its size.
    """
    if not isinstance(step, Step):
        return forecast(step, arguments, target=target, cache=cache, **other)
    state, batch, target = operands("verify", arguments, target, other)
    if not step.settings.train:
        raise UserError(
            "The contract is about training: jdp.verify takes a step of jdp.make_train_step; given an evaluation "
            "step. Pass the training step."
        )
    candidate = abstract_on(step, state, batch, target)
    devices = target_of(target, candidate.state)
    compiled = candidate.compile(devices, Cache.usual(cache))
    notes, judge = candidate.notes, devices.kind != "cpu"
    return report(candidate.step, candidate.state, compiled, devices, notes=notes, judge=judge)


def operands(
    name: str, arguments: tuple[Any, ...], target: str | Target | None, other: Mapping[str, Any]
) -> tuple[TrainState, Batch, str | Target | None]:
    """Return (state, batch, target) of a call of `jdp.<name>` with a step of jdp's."""
    keywords = {**other, **({} if target is None else {"target": target})}

    def bind(state: TrainState, batch: Batch, target: str | Target | None = None) -> Any:
        return state, batch, target

    try:
        state, batch, target = bind(*arguments, **keywords)
    except TypeError:
        words = f"{len(arguments)} arguments" + "".join(f", {key}=" for key in other)
        raise UserError(
            f"jdp.{name} takes a step of jdp.make_train_step with its state and batch; given {words}. Call "
            f"jdp.{name}(step, state, batch, target)."
        ) from None
    check_state(state, f"jdp.{name}(step, state, batch)", batch)
    check_target(target)
    return state, batch, target


def report(
    step: Step,
    state: TrainState,
    compiled: Compiled,
    target: str | Target,
    *,
    notes: Sequence[str] = (),
    judge: bool = True,
) -> Report:
    """Compare a step that is compiled already with its strategy's contract.

    Args:
        step: the step.
        state: its state, abstract or real.
        compiled: its program.
        target: the devices that it is compiled for; by name alone, no time is simulated.
        notes: sentences that the report begins its notes with.
        judge: False for a program of XLA:CPU, which sends other bytes than XLA:GPU's: there is no verdict.
    """
    mesh, offloads, donated = step.plan.mesh, step.plan.offload is not None, donated_state(compiled.program)
    parameters = Parameters.of(step.plan, state)
    reading = Reading(compiled, mesh, batch_axes(mesh), parameters, donated, offloads, step.settings.accumulate)
    promised = _promised(step, state, reading)
    collectives = collectives_on(reading, promised.statistics)
    stray = strays(collectives, promised, reading, step)
    verdict = compare(collectives, promised, sum(each.excess_bytes for each in stray))
    judged = judge or not verdict.theory_wire_bytes
    reasons = breaches(collectives, promised, verdict, reading, step, stray) if judged else ()
    held, devices = memory(compiled, step, state), target if isinstance(target, Target) else None
    room = None if devices is None or devices.memory_bytes is None else held.fits(devices.memory_bytes)
    timed = devices is not None and devices.chip is not None and (room is None or room.fits)
    return Report(
        name=step.plan.strategy,
        kept=verdict.kept if judged else None,
        partitioning=step.partitioning or "",
        why=step.why,
        target=str(target),
        mesh=dict(mesh.shape),
        accumulate=step.settings.accumulate,
        theory=promised,
        wire_bytes_per_device=verdict.wire_bytes,
        bound_wire_bytes_per_device=verdict.theory_wire_bytes,
        ratio=verdict.ratio,
        rows=verdict.rows,
        model_axes=verdict.model_axes,
        statistics=verdict.statistics,
        collectives=tuple(collectives),
        memory=held,
        headroom=room,
        sent=sent_by(reading, collectives),
        timeline=timeline(compiled.program, devices) if timed and devices is not None else None,
        breaches=reasons,
        strays=tuple(words for words in map(str, stray) if words not in reasons),
        gathers=gathers(step, state),
        symptoms=symptoms(reading),
        notes=tuple(dict.fromkeys((*notes, *_notes(step, promised, verdict.rows, collectives)))),
    )


def _promised(step: Step, state: TrainState, reading: Reading) -> Theory:
    return theory(
        step.plan,
        state.params,
        step.settings,
        static=state.static,
        gathered=None if step.sends is None else step.sends.gathered,
        metrics=_metrics(reading, state),
        exchanged=exchanged(step.plan, state),
    )


def _metrics(reading: Reading, state: TrainState) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the metrics that are arrays of no parameter's shape: a step's results are state, metrics."""
    program = reading.compiled.program
    results = next((each.shapes for each in program[program.entry] if each.is_root), ())
    found = (dims for _, dims in results[len(jax.tree.leaves(state)) :])
    return tuple(dims for dims in found if math.prod(dims) > 1 and not reading.parameters.like(dims))


def _notes(step: Step, promised: Theory, rows: Iterable[Row], collectives: Iterable[MeshCollective]) -> Iterable[str]:
    """Yield what the numbers rest on: gradients all-reduced by plan, loops of unknown length, dtypes, compiler."""
    unsharded, count = promised.unsharded, len(promised.unsharded.paths)
    if count and any(row.kind == "all-reduce" and row.wire_bytes > SLACK * promised.wire_bytes for row in rows):
        yield (
            f"{count} parameter{'s' * (count > 1)} of fewer than {unsharded.fewer_than} elements "
            f"{'are' if count > 1 else 'is'} all-reduced whole: {format_bytes(unsharded.payload_bytes)} a step, as "
            "planned; theory counts them as if they were sharded"
        )
    counted = [each.collective for each in collectives if each.over_batch]
    yield from caveats_on([(c.kind, c.caveats) for c in counted])
    reductions = [c for c in counted if c.kind in ("all-reduce", "reduce-scatter")]
    total, requested = sum(c.wire_bytes for c in reductions), XLA_TYPES[step.settings.precision.reduce]
    other = [c for c in reductions if c.dtype != requested]
    if sum(c.wire_bytes for c in other) > SLACK * total:
        dtypes = ", ".join(sorted({c.dtype for c in other}))
        choose = "auto cannot choose it" if step.partitioning == "auto" else "the compiler chose otherwise"
        yield f"gradients are reduced in {dtypes}, and precision.reduce is {step.settings.precision.reduce}: {choose}"
    if counted and step.plan.mesh.devices.flat[0].platform == "cpu":
        yield CPU_PROGRAM


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(StepReport):
    """What a compiled training step of jdp's sends, compared with its contract; more in `StepReport`.

    Attributes:
        kept: it sends at most 1.02 times what its strategy promises, and hardly anything else (`contract.py`); None on
            CPU devices, where it is not judged.
        ratio: bytes sent over those of theory; 0 where there is no other device.
        accumulate: microbatches, K.
        partitioning, why: what the step settled on, and the reason.
        theory: the promise, whose bytes are `bound_wire_bytes_per_device`.
        rows: one a kind of collective, found and promised.
        model_axes: one a kind of what runs along the model's own axes only, about which nothing is promised.
        statistics: one for the statistics of batch norms over all devices, and metrics that are arrays, which the
            contract leaves out too; None: there are none.
        collectives: each collective that sends something, in schedule order.
        gathers: under zero3, what the step's own trace gathers and where; else None.
    """

    partitioning: str
    why: str
    accumulate: int
    theory: Theory
    rows: tuple[Row, ...]
    model_axes: tuple[Row, ...]
    collectives: tuple[MeshCollective, ...]
    statistics: Row | None = None
    gathers: tuple[Gather, ...] | None = None

    @property
    def like_zero2(self) -> str:
        """Under zero3, a sentence if most of its weights are gathered at the top of the step; else empty."""
        return like_zero2(self.gathers or (), self.accumulate)

    @property
    def strategy(self) -> str:
        """The step's strategy."""
        return self.name

    @property
    def theory_wire_bytes_per_device(self) -> float:
        """What the strategy promises that a device sends a step."""
        return self.bound_wire_bytes_per_device or 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp verify --json` prints."""
        first = "kept strategy target wire_bytes_per_device theory_wire_bytes_per_device ratio"
        return {
            **self._as_json(first),
            "judged": self.kept is not None,
            "collectives": [each.to_json() for each in self.collectives],
            **self._as_json("breaches accumulate mesh partitioning why"),
            "rows": [row.to_json() for row in self.rows],
            "model_axes": [row.to_json() for row in self.model_axes],
            "batch_statistics": None if self.statistics is None else self.statistics.to_json(),
            "gathers": None if self.gathers is None else [asdict(each) for each in self.gathers],
            "gathers_at_most_bytes": None if self.gathers is None else self.theory.most_gathered_bytes,
            "like_zero2": self.like_zero2 or None,
            **super().to_json(),
        }

    def comparison(self) -> list[list[str]]:
        """Return a table of what is sent and promised, by kind of collective."""
        rows = [("kind", "expected", "found", "ratio", "in the microbatch loop", "wire a device", "")]
        rows += [(*row.cells(), "<-" if self.kept is not None and not row.kept else "") for row in self.rows]
        rows += [
            (*row.cells(), "the model's own axes, which the contract leaves to the model") for row in self.model_axes
        ]
        if self.statistics is not None:
            rows.append(
                (*self.statistics.cells(), "Statistics of batch norms, and metrics, which the contract leaves out")
            )
        paragraphs = [[self.like_zero2] if self.like_zero2 else [], align_columns(rows) if len(rows) > 1 else []]
        return [*filter(None, paragraphs)]

    @property
    def heading(self) -> str:
        """What was compiled, in words: "zero3 on data=8 for h100:1x8, K=1, manual: ..."."""
        on = f"{self.name} on {factors(self.mesh)} for {self.target}"
        return f"{on}, K={self.accumulate}, {self.partitioning}: {self.why}"

    @property
    def verdict(self) -> str:
        """Whether the contract is kept, in a sentence, and which of its rules is broken."""
        if not self.theory_wire_bytes_per_device:
            return "Kept: one shard of the batch, so nothing is sent."
        sends = f"{self.sends}, {self.ratio:.3f} of theory's {format_bytes(self.theory_wire_bytes_per_device)}"
        if self.kept is None:
            return f"Not judged, as XLA:CPU sends what XLA:GPU does not: {sends}. Give a target, such as h100:1x8."
        if self.kept:
            return f"Kept: {sends}."
        if (self.ratio or 0) > TOLERANCE:
            return f"BROKEN: {sends}, over {TOLERANCE}."
        kinds = ", ".join(f"{row.kind} {format_bytes(row.wire_bytes)}" for row in self.rows if not row.kept)
        beside = f" beside the {format_bytes(self.theory.unsharded.wire_bytes)} of parameters that are whole by plan"
        return (
            f"BROKEN: {sends}, in all within {TOLERANCE}; but a kind of collective that {self.name} does not promise "
            f"may send at most {SLACK:.0%} of theory's, {format_bytes(SLACK * self.theory_wire_bytes_per_device)}"
            f"{beside if self.theory.unsharded.paths else ''}: {kinds or 'what belongs to no parameter sends more'}."
        )
