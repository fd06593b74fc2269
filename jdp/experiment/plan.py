"""From an experiment file to what foresight compiles: its step on a target's devices, in every way asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jdp.core.disk_cache import Cache
from jdp.core.sharding.mesh import DATA, REPLICA, make_mesh
from jdp.core.types import Batch
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, mesh_sizes
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.forecast import Estimate
from jdp.foresight.foresee import Candidate, compile_candidate
from jdp.foresight.max_batch import MaxBatch, max_batch
from jdp.foresight.memory.peak import Memory, memory
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets.relocate import Relocated
from jdp.foresight.targets.resolve import Target


def candidates_of(
    experiment: Experiment, target: Target, *, strategies: Sequence[str], accumulate: Sequence[int], remat: str | None
) -> list[Candidate]:
    """The experiment's step under each strategy and number of microbatches, on the target's devices.

    A batch size that does not divide over the target's devices and microbatches is raised to the next that does, and
    the ways' notes say so: the plan of a file should not depend on the number of devices it was written for.

    Raises:
        ExperimentError: the experiment's mesh cannot be laid over the target's devices.
    """
    fitted, notes = with_whole_rows(experiment, target, accumulate)
    mesh = make_mesh(devices=list(target.devices), **fitted.mesh)
    found = list[Candidate]()
    for count in accumulate:
        for name in strategies:
            found.append(Candidate(_laid(changed(fitted, strategy=name, accumulate=count), mesh, notes), remat))
    return found


def _laid(experiment: Experiment, mesh: Mesh, notes: Sequence[str] = ()) -> Relocated:
    assembly = Assembly(experiment, mesh)
    return Relocated(assembly.train_step, assembly.abstract_state(), assembly.abstract_batch(), tuple(notes))


def with_whole_rows(experiment: Experiment, target: Target, accumulate: Sequence[int]) -> tuple[Experiment, list[str]]:
    """The experiment with a batch size that divides over the target's devices, and what was changed."""
    unit = batch_shards(experiment, target) * math.lcm(*accumulate)
    given = experiment.train.batch_size
    size = -(-given // unit) * unit
    if size == given:
        return experiment, []
    if size >= 2**31:
        raise ExperimentError(
            f"a batch has fewer than 2^31 rows; {given} does not divide by {unit} (devices that share it × "
            f"microbatches), and {size} would be taken: give fewer microbatches (--accumulate)"
        )
    shared = f"{unit} (devices that share it × microbatches)"
    return changed(experiment, batch_size=size), [
        f"train.batch_size={given} does not divide by {shared}: {size} is taken"
    ]


def batch_shards(experiment: Experiment, target: Target) -> int:
    """Into how many parts the target's devices cut a batch."""
    sizes = mesh_sizes(experiment.mesh, len(target.devices))
    return math.prod(sizes.get(axis, 1) for axis in (REPLICA, DATA))


def changed(experiment: Experiment, *, strategy: str | None = None, **train: int) -> Experiment:
    """The experiment with another strategy, or other values in [train]."""
    update = {"train": experiment.train.model_copy(update=train)} | ({"strategy": strategy} if strategy else {})
    return experiment.model_copy(update=update)


@dataclass(frozen=True)
class Counted:
    """A global batch in words, and what its speed is counted in."""

    words: str
    count: int
    unit: str


def described_batch(batch: Batch) -> Counted:
    """ "64 × 2048 tokens", "64 images of 224×224×3" or "64 × 20 features"; speed counts tokens, or examples."""
    if "tokens" in batch:
        rows, length = batch["tokens"].shape
        return Counted(f"{rows} × {length} tokens", rows * length, "tokens")
    if "images" in batch:
        rows, *shape = batch["images"].shape
        return Counted(f"{rows} images of {'×'.join(map(str, shape))}", rows, "examples")
    rows, features = batch["features"].shape
    return Counted(f"{rows} × {features} features", rows, "examples")


def largest_batch(
    experiment: Experiment, target: Target, chosen: Estimate, *, cache: bool, progress: Callable[[int], None]
) -> MaxBatch:
    """The largest batch that fits the target in the way `chosen`.

    Args:
        chosen: one of the target's, whose memory is known.
        progress: called with the rows a device that are compiled next.
    """
    assert chosen.available_bytes is not None, "the target's memory is known"
    available, store = chosen.available_bytes, Cache.usual(cache)
    shards, count = batch_shards(experiment, target), chosen.accumulate
    mesh = make_mesh(devices=list(target.devices), **experiment.mesh)

    held: dict[int, Memory] = {}

    def needs(rows: int) -> int:
        progress(rows)
        settings = changed(experiment, strategy=chosen.strategy, accumulate=count, batch_size=rows * shards * count)
        moved = _laid(settings, mesh)
        try:
            compiled = compile_candidate(Candidate(moved), target, store)
        except CompileError:  # XLA gives up on what is far too large
            return available + 1
        held[rows] = memory(compiled, moved.step, moved.state)
        return held[rows].total

    start = max(experiment.train.batch_size // (shards * count), 1)
    found = max_batch(needs, available, per_row=shards * count, start=start)
    room = held[found.rows].fits(target.memory_bytes) if found.rows and target.memory_bytes else None
    return found if room is None or room.fraction is None else replace(found, advice=room.words)
