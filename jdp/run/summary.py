"""What a visit reports: its first lines, and at the end of the run its summary, one JSON object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jdp.base.by_step import ByStep
from jdp.base.formatting import finite_or_none
from jdp.core.compiling.persistent_cache import kept_in
from jdp.experiment.assembly import Assembly
from jdp.experiment.optimizer import peak_rate, peak_rates
from jdp.experiment.phases import batch_shapes, lengths, phases
from jdp.experiment.plugins import folder_of, names_used
from jdp.experiment.schema.experiment import Experiment
from jdp.guard.flight_recorder import FLIGHT, read
from jdp.guard.time_account import account
from jdp.run.evaluation import coverage
from jdp.run.progress import Progress


def introduction(assembly: Assembly) -> list[str | None]:
    """Return the first lines of a visit: model and plan, data, evaluations, learning rate, compiled programs."""
    experiment = assembly.experiment
    first = f"{experiment.name}: {assembly.parameter_count:,} parameters, {assembly.plan}"
    if experiment.train.wrt is not None:
        first += f"; {assembly.trained_count:,} are trained, the others frozen"
    kept = f"compiled programs are kept in {folder} (--no-cache: not)" if (folder := kept_in()) else None
    course = [_phases(experiment), _never(experiment), coverage(assembly), _scaled_rate(experiment)]
    return [first, _plugin(experiment), str(assembly.data), *course, kept]


def _plugin(experiment: Experiment) -> str | None:
    """Return the line about a run's plug-in: its folder, and the names it registered that the run uses."""
    if experiment.plugin is None:
        return None
    used = [f"{key} {name}" for key, name in names_used(experiment).items()]
    return f"plug-in {experiment.plugin} ({folder_of(experiment.plugin)}): {', '.join(used) or 'nothing of it is used'}"


def _scaled_rate(experiment: Experiment) -> str | None:
    """Return the line about a peak learning rate that is scaled to the batch size."""
    chosen, sizes = experiment.optimizer, experiment.train.sizes
    if chosen.lr_scaling == "none":
        same = 'learning rate: the same for all batch sizes (optimizer.lr_scaling = "none")'
        return same if sizes.changes else None
    rates = ", then ".join(f"{rate:.4g}" for rate in peak_rates(experiment).values)
    batches = ", then ".join(map(str, sizes.values))
    return (
        f"learning rate {rates}: {chosen.lr:.4g} for {chosen.base_batch_size} samples a step, scaled to {batches} "
        f"({chosen.lr_scaling})"
    )


def _phases(experiment: Experiment) -> str | None:
    """Return the line about batches that change during the run."""
    found = phases(experiment)
    text = experiment.kind == "text"
    sizes = [
        f"{rows} × {length} tokens" if text else f"{rows} examples" for rows, length in batch_shapes(experiment).values
    ]
    words = [f"{size} (steps {phase.steps})" for size, phase in zip(sizes, found, strict=True)]
    return f"batches of {', '.join(words)}" if len(found) > 1 else None


def _never(experiment: Experiment) -> str | None:
    """Return the line about changes that the run ends before."""
    given: dict[str, ByStep[Any]] = {"train.batch_size": experiment.train.sizes, "data.length": lengths(experiment)}
    parts = experiment.data.mixture.items()
    given |= {f"data.mixture.{name}.weight": ByStep[float].of(part.weight) for name, part in parts}
    steps = experiment.train.steps
    late = [f"{key} after {by.starts[-1]:,}" for key, by in given.items() if by.starts[-1] >= steps]
    return f"not reached in {steps:,} steps: the last change of {', '.join(late)}" if late else None


def summary(assembly: Assembly, progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the run as one JSON object; `final_…` come from the last row of metrics and the last evaluation.

    "mfu" covers this visit's steps; it is missing where the devices' peak is not known. "goodput" is process 0's over
    all visits: the useful share of all time, and seconds by kind (`jdp.guard.time_account`).
    """
    chosen, evals, at_peak = assembly.experiment, progress.evals, assembly.seconds_at_peak
    speed = progress.steady_units / progress.steady_seconds if progress.steady_seconds else None
    waited = progress.waited / progress.steady_seconds if progress.steady_seconds else None
    names = ("loss", "bits_per_token", "accuracy", *chosen.evaluate.metrics)
    own = {name: evals[name] for name in (f"eval_{metric}" for metric in dict.fromkeys(names)) if name in evals}
    best = progress.watched
    return {
        "name": chosen.name,
        "steps": progress.done,
        "of_steps": chosen.train.steps,
        "stopped_early": progress.stops_early(chosen),
        "final_loss": progress.loss,
        **{f"final_{name}": finite_or_none(value) for name, value in own.items()},
        "eval_sets": {name: finite_or_none(value) for name, value in evals.items() if name not in own},
        "best": {"metric": best.metric, "value": best.value, "step": best.step} if best.step else None,
        "best_checkpoint": progress.kept.step if progress.kept and progress.kept.step else None,
        "lr": peak_rate(chosen),
        "seconds": progress.seconds,
        f"{assembly.unit}_per_second": speed,
        **({} if at_peak is None or speed is None else {"mfu": progress.steady_at_peak / progress.steady_seconds}),
        "data_wait_fraction": waited,
        "devices": assembly.mesh.devices.size,
        "processes": jax.process_count(),
        "strategy": chosen.strategy,
        "partitioning": assembly.train_step.partitioning,
        "parameters": assembly.parameter_count,
        "trained_parameters": assembly.trained_count,
        "skipped": progress.skipped,
        "left_out": sum(step <= progress.done for step in progress.bad.left_out),
        "resumed_from": progress.resumed_from,
        "goodput": account(read(folder / FLIGHT / "rank-00000.jsonl")).as_summary(),
        "folder": str(folder),
    }
