"""`jdp.foresee`: compile a step under every strategy, and report the memory, traffic and time of each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import jax

from jdp.base.chips import XLA_TYPES
from jdp.base.disk_cache import Cache
from jdp.base.errors import public
from jdp.base.tree_paths import path_of
from jdp.core.batch import batch_rows
from jdp.core.sharding.strategy import STRATEGIES, strategy
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.foresight.any_step.forecast import forecast
from jdp.foresight.forecast import Estimate, PlanReport
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.step_report import CPU_PROGRAM, StepReport
from jdp.foresight.targets.relocate import Candidate, abstract_on
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.timing.model_flops import model_flops
from jdp.foresight.traffic.contract import TOLERANCE
from jdp.foresight.verify import operands, report

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

    def candidate(count: int, name: str) -> Candidate:
        other = step.changed(plan=replace(step.plan, strategy=strategy(name).name), accumulate=count)
        return abstract_on(other, state, batch, target, microbatches=math.lcm(*counts))

    return [candidate(count, name) for count in counts for name in strategies]


def make_plan_report(
    candidates: Sequence[Candidate],
    target: Target,
    *,
    tokens: int | None = None,
    cache: bool = True,
    progress: OnProgress | None = None,
) -> PlanReport:
    """Compile every candidate for `target`."""
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


_SAME_PROGRAM = "with one microbatch, zero1 and zero2 reduce gradients at the same time: they are the same program"


def _notes(candidates: Sequence[Candidate], estimates: Sequence[Estimate]) -> tuple[str, ...]:
    notes = [note for candidate in candidates for note in candidate.notes]
    notes += [caveat for e in estimates if e.timeline is not None for caveat in e.timeline.caveats]
    if {("zero1", 1), ("zero2", 1)} <= {(e.strategy, e.accumulate) for e in estimates}:
        notes.append(_SAME_PROGRAM)
    if any(e.report is not None and e.report.kept is None and (e.report.ratio or 0) > TOLERANCE for e in estimates):
        notes.append(CPU_PROGRAM)
    notes += [f"{e.name}: {e.error}" for e in estimates if e.error is not None]
    return tuple(dict.fromkeys(notes))
