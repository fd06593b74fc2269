"""`jdp.verify`: compile a training step for a target, and compare its traffic with the communication contract."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import jax

from jdp.base.chips import XLA_TYPES
from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError, public
from jdp.base.formatting import align_columns, format_bytes
from jdp.core.batch import check_state
from jdp.core.sharding.axes import factors
from jdp.core.sharding.mesh import batch_axes
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.core.update.muon import exchanged
from jdp.foresight.any_step.forecast import forecast
from jdp.foresight.memory import CPU_PROGRAM, StepReport, caveats_on, json_values, memory, on_target
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.traffic.contract import (
    SLACK,
    TOLERANCE,
    Gather,
    MeshCollective,
    Row,
    collectives_on,
    compare,
    gathers,
    like_zero2,
    sent_by,
)
from jdp.foresight.traffic.faults import breaches, donated_state, strays, symptoms
from jdp.foresight.traffic.origin import Parameters, Reading
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
        >>> report = jdp.verify(train_step, state, batch)  # for devices that you do not have: target="h100:8x8"
        >>> print(report.verdict)
        Not judged, as XLA:CPU sends what XLA:GPU does not: a device sends ...

    Nothing runs, and no accelerator is needed. A jdp step on CPU devices is counted, not judged: `kept` is None. Any
    jitted step works: `jdp.verify(jitted, model, x, y, target="h100:8x8", against="zero3", params="model")`.

    Args:
        step: a training step (`jdp.make_train_step`), or any jitted function (`jax.jit`, `nnx.jit`, `eqx.filter_jit`).
        arguments: its positional arguments, real or abstract (`jdp.abstract_state`, `jax.ShapeDtypeStruct`). A jdp step
            takes the state and the global batch, and optionally the target. For any other step, all arguments are on
            one mesh, or the function was jitted with shardings.
        target: the devices to compile for, such as "h100:8x8"; this machine need not have them. None: the devices of
            the arguments.
        cache: reuse compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp). False: compile again, to measure the
            time of compilation.
        other: for a step that jdp did not make. `against`: a strategy's name, or the bytes that a device may send a
            step; None: compare nothing. `params`: the arguments that are parameters, for a strategy's row: a position,
            or path patterns such as "model" or "state/params/*". `mesh`: axis -> size on the target; None: one axis
            takes the remaining devices: `data`, else the largest axis of the batch.

    Returns:
        A `Report` for a jdp step, else a `StepReport`. Both have `.kept`, `.breaches` and `.symptoms`;
        `print(report)` shows tables.

    Raises:
        ValueError: an evaluation step, a bad target, or a step that does not compile. Without a target, a batch that
            does not divide; for a target its rows are rounded up, and a note reports it. For a step that jdp did not
            make: it is not jitted, its arguments are on no mesh or on two, or its axes do not fit the target. Or a
            `shard_map` over its own mesh would have to change its size.
    """
    if not isinstance(step, Step):
        return forecast(step, arguments, target=target, cache=cache, **other)
    state, batch, target = operands("verify", step, arguments, target, other)
    candidate = abstract_on(step, state, batch, target)
    devices = target_of(target, candidate.state)
    compiled = candidate.compile(devices, Cache.usual(cache))
    return report(candidate.step, candidate.state, compiled, devices, candidate.notes)


def operands(
    name: str, step: Step, arguments: tuple[Any, ...], target: str | Target | None, other: Mapping[str, Any]
) -> tuple[TrainState, Batch, str | Target | None]:
    """Return (state, batch, target) from the arguments of `jdp.<name>` after a jdp step, which must be for training."""
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
    if not step.settings.train:
        raise UserError(
            f"jdp.{name} takes a training step (jdp.make_train_step); given an evaluation step. Pass the training step."
        )
    return state, batch, target


def report(
    step: Step, state: TrainState, compiled: Compiled, target: str | Target, notes: Sequence[str] = ()
) -> Report:
    """Compare a compiled step with its contract; a `Target` of CPUs is not judged: XLA:CPU sends other bytes."""
    mesh, offloads, donated = step.plan.mesh, step.plan.offload is not None, donated_state(compiled.program)
    parameters = Parameters.of(step.plan, state)
    reading = Reading(compiled, mesh, batch_axes(mesh), parameters, donated, offloads, step.settings.accumulate)
    promised = theory(
        step.plan,
        state.params,
        step.settings,
        static=state.static,
        sends=step.sends,
        metrics=_metrics(reading, state),
        exchanged=exchanged(step.plan, state),
    )
    collectives = collectives_on(reading, promised.statistics)
    stray = strays(collectives, promised, reading, step)
    verdict = compare(collectives, promised, sum(each.excess_bytes for each in stray))
    judged = isinstance(target, str) or target.kind != "cpu" or not verdict.theory_wire_bytes
    reasons = breaches(collectives, promised, verdict, reading, step, stray) if judged else ()
    return Report(
        **on_target(memory(compiled, step, state), compiled, target),
        name=step.plan.strategy,
        kept=verdict.kept if judged else None,
        partitioning=step.partitioning or "",
        why=step.why,
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
        sent=sent_by(reading, collectives),
        breaches=reasons,
        strays=tuple(words for words in map(str, stray) if words not in reasons),
        gathers=gathers(step, state),
        symptoms=symptoms(reading),
        notes=tuple(dict.fromkeys((*notes, *_notes(step, promised, verdict.rows, collectives)))),
    )


def _metrics(reading: Reading, state: TrainState) -> tuple[tuple[int, ...], ...]:
    program = reading.compiled.program
    results = next((each.shapes for each in program[program.entry] if each.is_root), ())
    found = (dims for _, dims in results[len(jax.tree.leaves(state)) :])
    return tuple(dims for dims in found if math.prod(dims) > 1 and not reading.parameters.like(dims))


def _notes(step: Step, promised: Theory, rows: Iterable[Row], collectives: Iterable[MeshCollective]) -> Iterable[str]:
    unsharded, count = promised.unsharded, len(promised.unsharded.paths)
    if count and any(row.kind == "all-reduce" and row.wire_bytes > SLACK * promised.wire_bytes for row in rows):
        plural, verb = ("s", "are") if count > 1 else ("", "is")
        yield (
            f"{count} parameter{plural} of fewer than {unsharded.fewer_than} elements {verb} all-reduced whole: "
            f"{format_bytes(unsharded.payload_bytes)} a step, as planned; theory counts them as if they were sharded"
        )
    counted = [each.collective for each in collectives if each.over_batch]
    yield from caveats_on([(c.kind, c.caveats) for c in counted])
    reductions = [c for c in counted if c.kind in ("all-reduce", "reduce-scatter")]
    total, requested = sum(c.wire_bytes for c in reductions), XLA_TYPES[step.settings.precision.reduce]
    other = [c for c in reductions if c.dtype != requested]
    if sum(c.wire_bytes for c in other) > SLACK * total:
        dtypes = ", ".join(sorted({c.dtype for c in other}))
        choose = "auto cannot choose the dtype" if step.partitioning == "auto" else "the compiler chose another dtype"
        yield f"gradients are reduced in {dtypes}, and precision.reduce is {step.settings.precision.reduce}: {choose}"
    if counted and step.plan.mesh.devices.flat[0].platform == "cpu":
        yield CPU_PROGRAM


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(StepReport):
    """The traffic of a compiled jdp training step, compared with its contract; more in `StepReport`.

    `kept`: it sends at most 1.02 times what its strategy promises, and hardly anything else (`contract.py`); None on
    CPU devices, which are not judged. `ratio`: bytes sent / bytes in theory; 0 on a single device.
    """

    partitioning: str = ""  # of the step
    why: str = ""  # the reason for it
    accumulate: int = 1  # microbatches, K
    theory: Theory  # the promise, whose bytes are `bound_wire_bytes_per_device`
    rows: tuple[Row, ...] = ()  # by kind of collective, sent and promised
    model_axes: tuple[Row, ...] = ()  # kinds along the model's own axes only, where the contract promises nothing
    collectives: tuple[MeshCollective, ...] = ()  # all that send something, in schedule order
    statistics: Row | None = None  # batch norm statistics and array metrics, which the contract leaves out
    gathers: tuple[Gather, ...] | None = None  # under zero3, those of the step's trace, with their places

    @property
    def like_zero2(self) -> str:
        """Under zero3, a sentence if most of its weights are gathered at the top of the step; else empty."""
        return like_zero2(self.gathers or (), self.accumulate)

    @property
    def strategy(self) -> str:
        return self.name

    @property
    def theory_wire_bytes_per_device(self) -> float:
        return self.bound_wire_bytes_per_device or 0.0

    def to_json(self) -> dict[str, Any]:
        first = "kept strategy target wire_bytes_per_device theory_wire_bytes_per_device ratio"
        return {
            **json_values(self, first),
            "judged": self.kept is not None,
            "collectives": [each.to_json() for each in self.collectives],
            **json_values(self, "breaches accumulate mesh partitioning why"),
            "rows": [row.to_json() for row in self.rows],
            "model_axes": [row.to_json() for row in self.model_axes],
            "batch_statistics": None if self.statistics is None else self.statistics.to_json(),
            "gathers": None if self.gathers is None else [asdict(each) for each in self.gathers],
            "gathers_at_most_bytes": None if self.gathers is None else self.theory.most_gathered_bytes,
            "like_zero2": self.like_zero2 or None,
            **super().to_json(),
        }

    def comparison(self) -> list[list[str]]:
        remarks = [(row, "<-" if self.kept is not None and not row.kept else "") for row in self.rows]
        remarks += [(row, "the model's own axes, which the contract leaves to the model") for row in self.model_axes]
        if self.statistics is not None:
            words = "Statistics of batch norms, and metrics, which the contract leaves out"
            remarks.append((self.statistics, words))
        headings = ("kind", "expected", "found", "ratio", "in the microbatch loop", "wire a device", "")
        table = [align_columns([headings, *((*row.cells(), words) for row, words in remarks)])] if remarks else []
        return [*([[self.like_zero2]] if self.like_zero2 else []), *table]

    @property
    def heading(self) -> str:
        on = f"{self.name} on {factors(self.mesh)} for {self.target}"
        return f"{on}, K={self.accumulate}, {self.partitioning}: {self.why}"

    @property
    def verdict(self) -> str:
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
        beside = f" beside the {format_bytes(self.theory.unsharded.wire_bytes)} of parameters left whole by the plan"
        return (
            f"BROKEN: {sends}, in all within {TOLERANCE}; but a kind of collective that {self.name} does not promise "
            f"may send at most {SLACK:.0%} of theory's, {format_bytes(SLACK * self.theory_wire_bytes_per_device)}"
            f"{beside if self.theory.unsharded.paths else ''}: "
            f"{kinds or 'collectives that belong to no parameter send more'}."
        )
