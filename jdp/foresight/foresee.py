"""`jdp.foresee`: compile a step under every strategy, and report the memory, traffic and time of each.

The report of a plan has an `Estimate` for each candidate, the choice among them, and the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import jax

from jdp.base.chips import XLA_TYPES
from jdp.base.disk_cache import Cache
from jdp.base.errors import public
from jdp.base.formatting import align_columns, format_bytes, format_percent, format_rate, format_seconds
from jdp.base.tree_paths import path_of
from jdp.core.batch import batch_rows
from jdp.core.init.train_state import report_placements
from jdp.core.sharding.strategy import STRATEGIES, strategy
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.foresight.any_step.forecast import forecast
from jdp.foresight.memory import CPU_PROGRAM, RESERVED_BYTES, Headroom, HostMemory, Memory, StepReport, json_values
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets.relocate import Candidate, abstract_on, candidate_name
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.timing.model_flops import model_flops
from jdp.foresight.timing.timeline import Timeline
from jdp.foresight.traffic.contract import TOLERANCE
from jdp.foresight.verify import Report, operands, report

OnProgress = Callable[[int, int, str], None]
"""Called with (compilations done, compilations in all, name of the next)."""


@overload
def foresee(step: Step, *arguments: Any, target: str | Target | None = None, **other: Any) -> PlanReport: ...
@overload
def foresee(
    step: Callable[..., Any], *arguments: Any, target: str | Target | None = None, **other: Any
) -> StepReport: ...
@public()
def foresee(step: Any, *arguments: Any, target: str | Target | None = None, cache: bool = True, **other: Any) -> Any:
    """Compile a step for `target`, and predict its memory, traffic and time; a jdp step under every strategy.

        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> report = jdp.foresee(train_step, state, batch, "cpu:2", strategies=["zero3"])
        >>> [(each.strategy, each.memory.total > 0) for each in report.estimates]
        [('zero3', True)]

    Nothing runs, and no accelerator is needed: the real compiler makes the real program. Any jitted step works:
    `jdp.foresee(jitted, model, optimizer, x, y, target="h100:8x8")`.

    Args:
        step: a training step (`jdp.make_train_step`); its own strategy is only one of the candidates. Or any jitted
            function (`jax.jit`, `nnx.jit`, `eqx.filter_jit`), compiled unchanged.
        arguments: its positional arguments, real or abstract (`jdp.abstract_state`, `jax.ShapeDtypeStruct`). A jdp step
            takes the state and the global batch, and optionally the target. Rows that do not divide are rounded up.
        target: the devices to compile for, such as "h100:8x8", on this machine or not; None: those of the arguments.
        cache: reuse compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp). False: compile again, to measure the
            time of compilation.
        other: for a jdp step. `strategies`: the strategies to try. `accumulate`: the microbatches a step to try; None:
            the step's own. `tokens`: tokens of a global batch, for `tokens_per_second`; None: the elements of its leaf
            named "tokens", else its rows, as examples. `progress`: called before each compilation and at the end. For
            any other step, `mesh`: axis -> size on the target, as for `jdp.verify`.

    Returns:
        A `PlanReport` for a jdp step: `.choice`, `.estimates`, `.why`; `print(report)` is two tables and the reasons.
        For any other step a `StepReport`: memory by argument, traffic by source line, the schedule.

    Raises:
        ValueError: an evaluation step; or a target, a strategy, or a batch and microbatches that do not work. For a
            step that jdp did not make, the errors of `jdp.verify`.
    """
    if not isinstance(step, Step):
        return forecast(step, arguments, target=target, cache=cache, **other)
    tried = {name: other.pop(name) for name in ("strategies", "accumulate") if name in other}
    settings = {name: other.pop(name) for name in ("tokens", "progress") if name in other}
    state, batch, target = operands("foresee", step, arguments, target, other)
    devices = target_of(target, state)
    ways = candidates(step, state, batch, devices, **tried)
    return make_plan_report(ways, devices, cache=cache, **settings)


def candidates(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: Target,
    *,
    strategies: Sequence[str] = tuple(STRATEGIES),
    accumulate: Sequence[int] | None = None,
) -> list[Candidate]:
    """Return the step under each strategy and number of microbatches, with as many rows, rounded up, for all."""
    counts = tuple(accumulate or (step.settings.accumulate,))
    plans = [replace(step.plan, strategy=strategy(name).name) for name in strategies]
    steps = [step.changed(plan=plan, accumulate=count) for count in counts for plan in plans]
    return [abstract_on(each, state, batch, target, microbatches=math.lcm(*counts)) for each in steps]


def make_plan_report(
    candidates: Sequence[Candidate],
    target: Target,
    *,
    tokens: int | None = None,
    cache: bool = True,
    progress: OnProgress | None = None,
) -> PlanReport:
    progress = progress or (lambda done, total, name: None)
    store, estimates = Cache.usual(cache), list[Estimate]()
    count, unit = (tokens, "tokens") if tokens else count_batch(candidates[0].batch)
    for done, candidate in enumerate(candidates):
        progress(done, len(candidates), candidate.name)
        estimates.append(estimate(candidate, target, tokens=count, cache=store))
    progress(len(candidates), len(candidates), "")
    return PlanReport(str(target), len(target.devices), tuple(estimates), _notes(candidates, estimates), unit)


def estimate(candidate: Candidate, target: Target, *, tokens: int, cache: Cache | None = None) -> Estimate:
    """Compile one candidate for `target`, and read memory, traffic and time from the program."""
    step, state, batch = candidate.step, candidate.state, candidate.batch
    named = Estimate(step.plan.strategy, step.settings.accumulate)
    report_placements(step.plan, state)
    try:
        compiled = candidate.compile(target, cache)
    except CompileError as error:
        return replace(named, error=str(error))
    peaks = {} if target.chip is None else target.chip.matmul_flops
    return replace(
        named,
        report=report(step, state, compiled, target),
        model_flops=model_flops(step, state, batch),
        peak_flops=peaks.get(XLA_TYPES[step.settings.precision.compute]),
        tokens=tokens,
        compile_seconds=0.0 if compiled.cached else compiled.seconds,
        cached=compiled.cached,
    )


def count_batch(batch: Batch) -> tuple[int, str]:
    """Return the size of a batch and its unit: elements of a leaf called "tokens", else rows as "examples"."""
    named = (leaf for path, leaf in jax.tree.leaves_with_path(batch) if path_of(path).rpartition("/")[2] == "tokens")
    return next(((leaf.size, "tokens") for leaf in named), (batch_rows(batch), "examples"))


def _notes(candidates: Sequence[Candidate], estimates: Sequence[Estimate]) -> tuple[str, ...]:
    notes = [note for candidate in candidates for note in candidate.notes]
    notes += [caveat for e in estimates if e.timeline is not None for caveat in e.timeline.caveats]
    if {("zero1", 1), ("zero2", 1)} <= {(e.strategy, e.accumulate) for e in estimates}:
        notes.append("with one microbatch zero1 and zero2 reduce gradients at the same time: they are the same program")
    if any(e.report is not None and e.report.kept is None and (e.report.ratio or 0) > TOLERANCE for e in estimates):
        notes.append(CPU_PROGRAM)
    notes += [f"{e.name}: {e.error}" for e in estimates if e.error is not None]
    return tuple(dict.fromkeys(notes))


# The report.

CLOSE = 0.01
"""Step times within 1 % count as equal, because the model of time is no more precise. Then less memory decides."""


@dataclass(frozen=True)
class Estimate:
    """One candidate's compiled program, and how well it uses the devices."""

    strategy: str
    accumulate: int  # microbatches, K
    report: Report | None = None  # its memory, traffic and schedule; None, as what follows from it, if not compiled
    host: HostMemory | None = None  # the host's memory, if the state is copied into it
    model_flops: float = 0.0  # of the step's mathematics over the global batch (`timing.model_flops`)
    peak_flops: float | None = None  # of one device in the step's compute dtype, FLOP/s; None if unknown
    tokens: int = 0  # tokens (or examples) of a global batch
    compile_seconds: float = 0.0  # 0 if the cache had it (`cached`)
    cached: bool = False
    error: str | None = None  # why the step did not compile

    @property
    def name(self) -> str:
        """Strategy and microbatches, such as "zero1 K=4"."""
        return candidate_name(self.strategy, self.accumulate)

    @property
    def memory(self) -> Memory | None:
        return None if self.report is None else self.report.memory

    @property
    def headroom(self) -> Headroom | None:
        return None if self.report is None else self.report.headroom

    @property
    def timeline(self) -> Timeline | None:
        return None if self.report is None else self.report.timeline

    @property
    def fits(self) -> bool | None:
        """Whether it compiled and a device can hold it; None if the device's memory is unknown."""
        if self.error is not None or (self.host is not None and not self.host.fits):
            return False
        return None if self.headroom is None else self.headroom.fits

    @property
    def available_bytes(self) -> int | None:
        return None if self.headroom is None else self.headroom.available

    @property
    def bytes_per_device(self) -> int | None:
        return None if self.memory is None else self.memory.total

    @property
    def step_seconds(self) -> float | None:
        return None if self.timeline is None else self.timeline.step_seconds

    @property
    def step_range(self) -> tuple[float, float] | None:
        """(least, most) seconds of a step, given the error on published runs; None if unknown."""
        if self.timeline is None or self.timeline.error is None:
            return None
        factor = 1 + self.timeline.error
        return self.timeline.step_seconds / factor, self.timeline.step_seconds * factor

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: model FLOPs / (seconds × devices × peak) (Chowdhery et al. 2022, appendix B)."""
        if self.report is None or not self.step_seconds or self.peak_flops is None:
            return None
        return self.model_flops / (self.step_seconds * math.prod(self.report.mesh.values()) * self.peak_flops)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or examples) a second on all devices together."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency T(1)/T(N): the time of a step without communication over the time with it."""
        if self.timeline is None or not self.timeline.step_seconds:
            return None
        return (self.timeline.compute_seconds + self.timeline.host_wait_seconds) / self.timeline.step_seconds

    @property
    def fits_in_words(self) -> str:
        return {None: "?", True: "yes", False: "no"}[self.fits]

    @property
    def speed_cells(self) -> tuple[str, ...]:
        """Cells of a table: communication hidden, waiting, step, MFU, tokens a second; "–" if it cannot run."""
        timeline = self.timeline
        if timeline is None:
            return ("–" if self.fits is False else "?",) * 5
        return (
            format_percent(1 - timeline.exposed_fraction) if timeline.communication_seconds else "–",
            format_seconds(timeline.exposed_seconds),
            format_seconds(timeline.step_seconds),
            "?" if self.mfu is None else format_percent(self.mfu),
            format_rate(self.tokens_per_second or 0),
        )

    def to_json(self) -> dict[str, Any]:
        report, memory, line = self.report, self.memory, self.timeline
        names = "strategy accumulate fits bytes_per_device available_bytes step_seconds mfu error tokens_per_second"
        return {
            **json_values(self, f"{names} efficiency compile_seconds cached"),
            **json_values(report, "partitioning wire_bytes_per_device theory_wire_bytes_per_device"),
            **json_values(line, "exposed_fraction exposed_seconds host_seconds host_wait_seconds"),
            "memory": None if memory is None else memory.by_class(),
            "host_bytes": 0 if memory is None else memory.host,
            "memory_advice": None if self.headroom is None else self.headroom.words,
            "keeps_contract": None if report is None else report.kept,
            "like_zero2": None if report is None else report.like_zero2 or None,
            "step_seconds_range": self.step_range and [*self.step_range],
            "compute_parts": None if line is None else dict(line.parts),
            "tokens_per_step": self.tokens,
            "parameters": 0 if report is None else report.theory.parameters,
            "partitioning_why": "" if report is None else report.why,
            **({} if self.host is None else {"host": self.host.to_json()}),
        }


MEMORY = ("candidate", "fits", "holds", "parameters", "optimizer", "temporaries", "other", "host")
"""Headings of the table of memory; the last appears if a candidate keeps something in host memory."""
SPEED = ("candidate", "partitioning", "sends", "of theory", "hidden", "waits", "step", "MFU", "tokens/s", "T(1)/T(N)")


@dataclass(frozen=True)
class PlanReport:
    """The estimates of all candidates, and the choice among them."""

    target: str  # the devices' name, such as "h100:8x8"
    devices: int  # their number
    estimates: tuple[Estimate, ...]  # of the candidates, in the requested order
    notes: tuple[str, ...] = ()  # assumptions, and changes to the arguments
    unit: str = "tokens"  # of `Estimate.tokens`: "tokens" or "examples"

    @property
    def choice(self) -> Estimate | None:
        """The fastest candidate that fits; within `CLOSE` of it, one that keeps its contract, then the least memory."""
        fitting = self._fitting
        fastest = min((estimate.step_seconds or math.inf for estimate in fitting), default=math.inf)
        close = [estimate for estimate in fitting if (estimate.step_seconds or math.inf) <= (1 + CLOSE) * fastest]
        return min(close, key=lambda x: (not (x.report and x.report.kept), x.bytes_per_device or 0), default=None)

    @property
    def _fitting(self) -> list[Estimate]:
        return [estimate for estimate in self._compiled if estimate.fits is not False]

    @property
    def _compiled(self) -> list[Estimate]:
        return [estimate for estimate in self.estimates if estimate.memory is not None]

    @property
    def why(self) -> tuple[str, ...]:
        """Sentences: the candidates that fit, and the reason for the choice."""
        compiled, choice = self._compiled, self.choice
        if not compiled:
            return ("No candidate compiled.",)
        alike = (estimate.report.like_zero2 for estimate in compiled if estimate.report is not None)
        sentences = [_what_fits(compiled), *[words for words in alike if words][:1]]
        if choice is None:
            least = min(compiled, key=lambda estimate: estimate.bytes_per_device or 0)
            return (*sentences, f"{least.name} needs the least, {format_bytes(least.bytes_per_device or 0)}.")
        sentences.append(_why_fastest(choice, self._fitting))
        if choice.headroom is not None and choice.headroom.fraction is not None:
            sentences.append(f"{choice.name} {choice.headroom.words}.")
        return (*sentences, *(_with_narrow_gradients(choice.report) if choice.report else ()))

    @property
    def verdict(self) -> str:
        if self.choice is not None:
            return f"Take {self.choice.name}."
        return "No candidate fits." if self._compiled else "No candidate compiled."

    def memory_table(self) -> list[tuple[str, ...]]:
        """Return headings, and a row for each estimate."""
        rows = [MEMORY, *map(_memory_row, self.estimates)]
        return rows if any(row[-1] not in ("", "0 B") for row in rows[1:]) else [row[:-1] for row in rows]

    def speed_table(self) -> list[tuple[str, ...]]:
        """Return headings, and a row for each estimate."""
        return [tuple(heading.replace("tokens", self.unit) for heading in SPEED), *map(_speed_row, self.estimates)]

    @property
    def sentences(self) -> list[str]:
        hosts = {each.name: each.host.words for each in self.estimates if each.host is not None}
        if len({*hosts.values()}) > 1:
            hosts = {name: f"{name}: {words}" for name, words in hosts.items()}
        notes = [f"Note: {note}" for note in (*dict.fromkeys(hosts.values()), *self.notes)]
        return [*self.why, *notes]

    def __repr__(self) -> str:
        candidates = f"{len(self.estimates)} candidates for {self.target}, {self.devices} devices"
        return f"<PlanReport of {candidates}: {self.verdict} print() shows all>"

    def __str__(self) -> str:
        tables = [*align_columns(self.memory_table()), "", *align_columns(self.speed_table())]
        return "\n".join([f"{self.devices} devices, {self.target}", *tables, "", *self.sentences])

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "devices": self.devices,
            "strategies": [estimate.to_json() for estimate in self.estimates],
            "choice": None if self.choice is None else self.choice.strategy,
            "choice_accumulate": None if self.choice is None else self.choice.accumulate,
            "why": " ".join(self.why),
            "notes": list(self.notes),
        }


def _what_fits(compiled: Sequence[Estimate]) -> str:
    available = compiled[0].available_bytes
    needs = ", ".join(f"{each.name} {format_bytes(each.bytes_per_device or 0)}" for each in compiled)
    if available is None:
        return f"A device holds: {needs}. Its memory is not known here."
    fitting = [each.name for each in compiled if each.fits]
    verdict = "all fit" if len(fitting) == len(compiled) else f"{', '.join(fitting)} fit" if fitting else "none fits"
    beside = f"beside {format_bytes(RESERVED_BYTES)} for CUDA and NCCL"
    return f"A device has {format_bytes(available)} for a step ({beside}); they need: {needs}; {verdict}."


def _why_fastest(choice: Estimate, fitting: Sequence[Estimate]) -> str:
    if choice.step_seconds is None:
        return f"{choice.name} holds the least; the time of a step is unknown for this target."
    longer = [(each, (each.step_seconds or 0.0) / choice.step_seconds - 1) for each in fitting if each is not choice]
    clauses = [f"Take {choice.name}: a step takes {format_seconds(choice.step_seconds)}"]
    clauses += [f"{each.name} takes as long" for each, share in longer if share <= CLOSE]
    slower = sorted((share, each.name) for each, share in longer if share > CLOSE)
    clauses += [f"{name} takes {format_percent(share)} longer" for share, name in slower[:1]]
    return f"{'; '.join(clauses)}."


def _with_narrow_gradients(report: Report) -> list[str]:
    """Return a sentence about the bytes that gradients in 16 bits would save, if weights are gathered in 16 bits."""
    promises, sent = report.theory.promises, report.wire_bytes_per_device
    reductions = [promise for promise in promises if promise.kind in ("reduce-scatter", "all-reduce")]
    saved = sum(promise.wire_bytes / 2 for promise in reductions if promise.itemsize == 4)
    gathers_narrow = any(promise.kind == "all-gather" and promise.itemsize == 2 for promise in promises)
    if report.partitioning != "manual" or not saved or not gathers_narrow:
        return []
    wide = f"Gradients are summed in float32, {format_bytes(2 * saved)} of the {format_bytes(sent)} sent"
    return [f'{wide}; with reduce = "bf16" a device sends {format_bytes(sent - saved)}.']


def _memory_row(estimate: Estimate) -> tuple[str, ...]:
    memory = estimate.memory
    if memory is None:
        return (estimate.name, "no", "did not compile", *([""] * (len(MEMORY) - 3)))
    classes = (memory.parameters, memory.optimizer, memory.temporaries)
    host = memory.host if estimate.host is None else estimate.host.total // estimate.host.devices
    held = map(format_bytes, (memory.total, *classes, memory.total - sum(classes), host))
    return (estimate.name, estimate.fits_in_words, *held)


def _speed_row(estimate: Estimate) -> tuple[str, ...]:
    report = estimate.report
    if report is None:
        return (estimate.name, *([""] * (len(SPEED) - 1)))
    ratio = f"{report.ratio:.3f}" if report.theory_wire_bytes_per_device else "–"
    traffic = format_bytes(report.wire_bytes_per_device), ratio + " BREAKS" * (report.kept is False)
    unknown = "–" if estimate.fits is False else "?"
    efficiency = unknown if estimate.efficiency is None else f"{estimate.efficiency:.3f}"
    return (estimate.name, report.partitioning, *traffic, *estimate.speed_cells, efficiency)
