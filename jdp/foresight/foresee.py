"""Know before you launch: compile a step every way it could run, and read off what each would hold, send and wait for.

1. `ways` lists the ways: strategies × microbatches, each with its step and abstract values on the target's devices.
2. Each is lowered and compiled for the target, or found in the cache, and read: memory by class, traffic against the
   contract, the schedule simulated. One that does not compile is an estimate with the reason.
3. `advise` chooses, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jdp.core.disk_cache import Cache
from jdp.core.sharding.mesh import DATA
from jdp.core.sharding.strategy import STRATEGIES, strategy
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.foresight.advice import advise
from jdp.foresight.forecast import Estimate, PlanReport, way_name
from jdp.foresight.memory.peak import memory
from jdp.foresight.program.compiled import Compiled, CompileError, compile_step
from jdp.foresight.targets.chips import XLA_TYPES
from jdp.foresight.targets.relocate import Relocated, abstract_on
from jdp.foresight.targets.resolve import Target
from jdp.foresight.targets.this_machine import fingerprint, target_of
from jdp.foresight.timing.model_flops import model_flops
from jdp.foresight.timing.timeline import timeline
from jdp.foresight.verify import report

Progress = Callable[[int, int, str], None]
"""Called with (ways done, ways in all, what is being compiled)."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the step: it and its abstract operands on the target's devices.

    Attributes:
        moved: step, state, batch, and notes on what was changed to lay them there.
        remat: the rematerialisation policy that tells it from the others; None where the model's own was left.
    """

    moved: Relocated
    remat: str | None = None

    @property
    def name(self) -> str:
        step = self.moved.step
        return way_name(step.plan.strategy, step.accumulate, self.remat)


def foresee(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: str | Target | None = None,
    *,
    strategies: Sequence[str] = tuple(STRATEGIES),
    accumulate: Sequence[int] | None = None,
    tokens: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> PlanReport:
    """Compile `step` for `target` under every strategy, and tell what each would hold, send and wait for.

    Nothing runs, and no accelerator is needed: the real compiler makes the real program.

    Args:
        step: a training step; its own strategy is only one of those tried.
        state, batch: real or abstract (`jdp.abstract_state`, `jax.ShapeDtypeStruct`); the batch is the global one.
        target: "h100:8x8" and the like (`jdp.foresight.targets`); None: the devices that `state` lies on.
        strategies: which to try.
        accumulate: microbatches a step, each to try; None: the step's own.
        tokens: what one global batch counts for in `tokens_per_second`; None: the elements of its first integer leaf
            of two dimensions or more, else its rows.
        cache: keep compiled results on disk ($JDP_CACHE_DIR, else ~/.cache/jdp) and use them.
        progress: called before each compilation and at the end.

    Raises:
        ValueError: the target, a strategy, or the batch under a number of microbatches does not work.
    """
    where = target_of(target, state)
    tried = ways(step, state, batch, where, strategies=strategies, accumulate=accumulate)
    return forecast(tried, where, tokens=tokens, cache=cache, progress=progress)


def ways(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: Target,
    *,
    strategies: Sequence[str] = tuple(STRATEGIES),
    accumulate: Sequence[int] | None = None,
) -> list[Candidate]:
    """The step under each strategy and number of microbatches, on the target's devices."""
    if not step.train:
        raise ValueError("jdp.foresee takes a training step (jdp.make_train_step); got an evaluation step.")
    found = list[Candidate]()
    counts = tuple(accumulate or (step.accumulate,))
    for count in counts:
        for name in strategies:
            plan = replace(step.plan, strategy=strategy(name).name)
            changed = replace(step, plan=plan, accumulate=count)
            found.append(Candidate(abstract_on(changed, state, batch, target, microbatches=math.lcm(*counts))))
    return found


def forecast(
    tried: Sequence[Candidate],
    target: Target,
    *,
    tokens: int | None = None,
    unit: str = "tokens",
    cache: bool = True,
    progress: Progress | None = None,
) -> PlanReport:
    """Compile every way and choose; `unit` is what `tokens` counts."""
    store = Cache.usual(cache)
    estimates = list[Estimate]()
    for done, way in enumerate(tried):
        if progress is not None:
            progress(done, len(tried), way.name)
        estimates.append(estimate(way, target, tokens=tokens, cache=store))
    if progress is not None:
        progress(len(tried), len(tried), "")
    choice, why = advise(estimates)
    return PlanReport(str(target), len(target.devices), tuple(estimates), choice, why, _notes(tried, estimates), unit)


def estimate(way: Candidate, target: Target, *, tokens: int | None = None, cache: Cache | None = None) -> Estimate:
    """Compile one way for `target`, and read what it tells."""
    step, state, batch = way.moved.step, way.moved.state, way.moved.batch
    named = Estimate(step.plan.strategy, step.accumulate, way.remat, devices=len(target.devices))
    try:
        compiled = compile_candidate(way, target, cache)
    except CompileError as error:
        return replace(named, error=str(error))
    held, held_to = memory(compiled, step, state), report(step, state, compiled, str(target))
    room = None if target.memory_bytes is None else held.fits(target.memory_bytes)
    chip = target.chip
    peak = None if chip is None else chip.matmul_flops.get(XLA_TYPES[step.precision.compute])
    return replace(
        named,
        partitioning=step.partitioning,
        partitioning_why=step.why,
        memory=held,
        room=room,
        parameters=held_to.theory.parameters,
        shards=step.plan.mesh.shape[DATA],
        report=held_to,
        timeline=timeline(compiled.program, target) if chip is not None or target.kind == "cpu" else None,
        model_flops=float(model_flops(step, state, batch)),
        peak_flops=peak,
        tokens=tokens or batch_tokens(batch),
        compile_seconds=0.0 if compiled.cached else compiled.seconds,
        cached=compiled.cached,
    )


def compile_candidate(way: Candidate, target: Target, cache: Cache | None = None) -> Compiled:
    """The way's program, from the compiler or from the cache. Raises CompileError."""
    return compile_step(way.moved.lower(), cache=cache, described=fingerprint(target))


def batch_tokens(batch: Batch) -> int:
    """Elements of the first integer leaf of two dimensions or more, else the rows."""
    leaves: list[Any] = jax.tree.leaves(batch)
    sequences = (leaf for leaf in leaves if leaf.ndim >= 2 and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer))
    return next((leaf.size for leaf in sequences), leaves[0].shape[0])


def _notes(tried: Iterable[Candidate], estimates: Sequence[Estimate]) -> tuple[str, ...]:
    said = [note for way in tried for note in way.moved.notes]
    said += [caveat for o in estimates if o.timeline is not None for caveat in o.timeline.caveats]
    names = {(o.strategy, o.accumulate) for o in estimates}
    if {("zero1", 1), ("zero2", 1)} <= names:
        said.append("zero1 and zero2 differ in when gradients are reduced: with one microbatch they are one program")
    said += [f"{o.name}: {o.error}" for o in estimates if o.error is not None]
    return tuple(dict.fromkeys(said))
