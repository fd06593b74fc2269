"""From an experiment file to what foresight compiles: its step on a target's devices, every way that is asked for.

An assembly on the target's devices gives the step and its abstract operands; from there `jdp plan` and `jdp verify` go
through the same functions as `jdp.foresee` and `jdp.verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jdp.core.disk_cache import Cache
from jdp.core.types import Batch
from jdp.experiment.assembly import Assembly
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.forecast import Estimate
from jdp.foresight.foresee import Candidate, compile_candidate, ways
from jdp.foresight.max_batch import MaxBatch, max_batch
from jdp.foresight.memory.peak import Memory, memory
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets.resolve import Target


def candidates_of(
    experiment: Experiment,
    target: Target,
    *,
    strategies: Sequence[str],
    accumulate: Sequence[int],
    remat: str | None = None,
) -> list[Candidate]:
    """Return the experiment's step under each strategy and number of microbatches, on the target's devices.

    Args:
        experiment: validated. A batch size that does not divide over the target's devices and microbatches is rounded
            up, which the candidates' notes report.
        target: the devices.
        strategies: names of strategies.
        accumulate: numbers of microbatches a step.
        remat: the rematerialisation policy that the experiment was loaded with, to name the candidates; None: its own.

    Raises:
        ExperimentError: the experiment's mesh does not fit the number of the target's devices.
        ValueError: an unknown strategy, or a batch that is rounded up to 2^31 rows or more.
    """
    assembly = Assembly.on_devices(experiment, list(target.devices))
    state, batch = assembly.abstract_state(), assembly.abstract_batch()
    found = ways(assembly.train_step, state, batch, target, strategies=strategies, accumulate=accumulate)
    return [replace(candidate, remat=remat) for candidate in found]


@dataclass(frozen=True)
class BatchSize:
    """The size of a global batch.

    Attributes:
        text: such as "64 × 2048 tokens", "64 images of 224×224×3" or "64 × 20 features".
        count: how many units it has.
        unit: what speed is counted in: "tokens" or "examples".
    """

    text: str
    count: int
    unit: str


def batch_size_of(batch: Batch) -> BatchSize:
    """Return the size of a global batch of one of an experiment's three kinds of data."""
    if "tokens" in batch:
        rows, length = batch["tokens"].shape
        return BatchSize(f"{rows} × {length} tokens", rows * length, "tokens")
    if "images" in batch:
        rows, *shape = batch["images"].shape
        return BatchSize(f"{rows} images of {'×'.join(map(str, shape))}", rows, "examples")
    rows, features = batch["features"].shape
    return BatchSize(f"{rows} × {features} features", rows, "examples")


def largest_batch(
    experiment: Experiment, target: Target, chosen: Estimate, *, cache: bool, progress: Callable[[int], None]
) -> MaxBatch:
    """Find the largest batch that fits the target under the strategy and microbatches of an estimate, by compiling.

    Args:
        experiment: validated.
        target: devices whose memory is known.
        chosen: an estimate for them.
        cache: whether to keep compiled results on disk and use them.
        progress: called with the number of rows a device that is compiled next.

    Raises:
        ValueError: memory does not grow with the rows.
    """
    available, count = chosen.available_bytes, chosen.accumulate
    assert available is not None, "the target's memory is known"
    store, measured = Cache.usual(cache), dict[int, Memory]()
    (candidate,) = candidates_of(experiment, target, strategies=[chosen.strategy], accumulate=[count])
    per_row = candidate.moved.step.plan.batch_shards * count

    def needed(rows: int) -> int:
        progress(rows)
        train = experiment.train.model_copy(update={"batch_size": rows * per_row})
        sized = experiment.model_copy(update={"train": train})
        (candidate,) = candidates_of(sized, target, strategies=[chosen.strategy], accumulate=[count])
        try:
            compiled = compile_candidate(candidate, target, store)
        except CompileError:  # XLA gives up on what is far too large
            return available + 1
        measured[rows] = memory(compiled, candidate.moved.step, candidate.moved.state)
        return measured[rows].total

    start = max(experiment.train.batch_size // per_row, 1)
    largest = max_batch(needed, available, per_row=per_row, start=start)
    if not largest.rows or not target.memory_bytes:
        return largest
    fit = measured[largest.rows].fits(target.memory_bytes)
    return largest if fit.fraction is None else replace(largest, advice=fit.words)
