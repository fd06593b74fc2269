"""The summary of a run: one JSON object at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jdp.base.formatting import finite_or_none
from jdp.base.notices import shown
from jdp.experiment.assembly import Assembly
from jdp.experiment.optimizer import peak_rate
from jdp.guard.flight_recorder import FLIGHT, read
from jdp.guard.time_account import account
from jdp.run.progress import Progress


def summary(assembly: Assembly, progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the run as one JSON object; `final_…` are of the last row of metrics and of the last evaluation.

    "mfu" is that of this visit's steps; it is left out where the devices' peak is not known. "goodput" is process 0's,
    over all visits: the useful share of all time, and seconds by kind (`jdp.guard.time_account`).
    """
    chosen, evals, at_peak = assembly.experiment, progress.evals, assembly.seconds_at_peak
    speed = progress.steady_units / progress.steady_seconds if progress.steady_seconds else None
    waited = progress.waited / progress.steady_seconds if progress.steady_seconds else None
    own = {
        name: value for name, value in evals.items() if name in ("eval_loss", "eval_bits_per_token", "eval_accuracy")
    }
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
        **({} if at_peak is None or speed is None else {"mfu": at_peak * speed / assembly.units_per_step}),
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
        "folder": shown(str(folder)),
    }
