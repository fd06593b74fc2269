"""The report of a visit: its first lines, and at the end of the run its summary, one JSON object."""

from __future__ import annotations

import platform
import shlex
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jdp.base.formatting import finite_or_none
from jdp.core.compiling.persistent_cache import kept_in
from jdp.experiment.assembly import Assembly
from jdp.experiment.make import folder_of
from jdp.guard.flight_recorder import FLIGHT, read
from jdp.guard.time_account import account
from jdp.run.evaluation import coverage
from jdp.run.outputs.terminal import clock
from jdp.run.progress import Progress


def introduction(assembly: Assembly) -> list[str | None]:
    """Return the first lines of a visit: model and plan, data, evaluations, compiled programs."""
    experiment = assembly.experiment
    first = f"{experiment.name}: {assembly.parameter_count:,} parameters, {assembly.plan}"
    if experiment.train.wrt is not None:
        first += f"; {assembly.trained_count:,} are trained, the others frozen"
    kept = f"compiled programs are kept in {folder} (--no-cache: not)" if (folder := kept_in()) else None
    plugin = None
    if experiment.plugin is not None:
        tables = (experiment.model, experiment.data, experiment.loss, experiment.optimizer)
        used = ", ".join(table.make for table in tables if table.make is not None) or "nothing of it is used"
        plugin = f"plug-in {experiment.plugin} ({folder_of(experiment.plugin)}): {used}"
    return [first, plugin, str(assembly.data), coverage(assembly), kept]


def ending(assembly: Assembly, progress: Progress, folder: Path) -> list[str]:
    """Return the last lines of a run: the visit's duration, the run's folder, and the next commands."""
    experiment, place = assembly.experiment, shlex.quote(str(folder))
    taken = progress.done - progress.resumed_from
    steps = f"{taken:,} step{'s' * (taken != 1)} in {clock(progress.seconds)}; the" if taken else "the"
    plugin = "" if experiment.plugin is None else f" --plugin {experiment.plugin}"
    lines = [f"{steps} run is in {place}", f"next: jdp report {place}"]
    writes = experiment.kind == "text" and experiment.model.make is None and experiment.data.knows_text
    return [*lines, f'or:   jdp generate {place} --prompt "…"{plugin}'] if writes else lines


def devices_of(mesh: Mesh) -> dict[str, Any]:
    """Return the devices and versions of a visit."""
    devices = list(mesh.devices.flat)
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def summary(assembly: Assembly, progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the run as one JSON object; `final_…` come from the last row of metrics and the last evaluation.

    "mfu" covers this visit's steps; it is missing if the devices' peak is unknown. "goodput" is process 0's over all
    visits: the useful share of all time, and seconds by kind (`jdp.guard.time_account`).
    """
    chosen, evals, at_peak = assembly.experiment, progress.evals, assembly.seconds_at_peak
    speed = progress.steady_units / progress.steady_seconds if progress.steady_seconds else None
    waited = progress.waited / progress.steady_seconds if progress.steady_seconds else None
    names = ("loss", "bits_per_token", "accuracy", *chosen.train.eval_metrics)
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
        "lr": chosen.optimizer.lr,
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
        "resumed_from": progress.resumed_from,
        "goodput": account(read(folder / FLIGHT / "rank-00000.jsonl")).as_summary(),
        "folder": str(folder),
    }
