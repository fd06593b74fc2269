"""The progress of a run: its record in each checkpoint, and the report of a visit.

A visit has first and last lines, and at the end of the run a summary, one JSON object.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
from jax.sharding import Mesh
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from jdp.base.formatting import finite_or_none
from jdp.checkpoint import CheckpointError
from jdp.core.compiling.persistent_cache import kept_in
from jdp.experiment.assembly import Assembly
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.make import folder_of
from jdp.experiment.schema.tables import Train
from jdp.guard.time_account import account
from jdp.launch.events import EVENT_LOGS, read
from jdp.run.evaluation import Best
from jdp.run.outputs import clock

_NaN = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass
class Record:
    """A checkpoint's record of a run's progress, in which NaN and infinities are null."""

    done: int = 0  # batches consumed
    samples: int = 0  # in these batches; visits may have batches of different sizes
    skipped: int = 0  # steps whose gradients or updates were not finite
    loss: float | None = None  # at the last row of metrics, in nats
    evals: dict[str, _NaN] = field(default_factory=dict[str, float])  # of the last evaluation
    evaluated: int = 0  # step of the last evaluation
    fingerprint: str = ""  # of the data
    experiment: str = ""  # every key, as TOML
    watched: Best = field(default_factory=lambda: Best("eval_loss"))  # for early stopping
    kept: Best | None = None  # the best evaluation with a checkpoint; None without `train.keep_best`


@dataclass
class Progress(Record):
    """The progress of a run: what a checkpoint records, and this visit's counts."""

    resumed_from: int = 0  # batches consumed before this visit
    seconds: float = 0.0  # of this visit's loop
    waited: float = 0.0  # seconds for data, by this visit's steps without compilation and evaluation
    steady_seconds: float = 0.0  # of these steps
    steady_units: int = 0  # tokens or examples of these steps
    steady_at_peak: float = 0.0  # seconds that these steps would take at the devices' peak, if known
    skips_in_a_row: int = 0  # up to the last step whose metrics were read
    skips_seen: int = 0

    def stops_early(self, experiment: Experiment) -> bool:
        """Return True if `train.stop_after` evaluations have passed without improvement."""
        return 0 < experiment.train.stop_after <= self.watched.waiting

    def finished(self, experiment: Experiment) -> bool:
        """Return True if all steps are done, or the run stops early."""
        return self.done >= experiment.train.steps or self.stops_early(experiment)

    def record(self) -> dict[str, Any]:
        return json.loads(_RECORD.dump_json(self))

    @staticmethod
    def of(settings: Train, record: Record) -> Progress:
        """Return the progress from a checkpoint's record, or of a run that has not begun."""
        progress = Progress(**vars(record), resumed_from=record.done)
        progress.watched = Best.resumed(settings.best_metric, record.watched)
        progress.kept = Best.resumed(settings.best_metric, record.kept) if settings.keep_best else None
        return progress


_RECORD = TypeAdapter(Record)


def checked_record(record: dict[str, Any], folder: Path) -> Record:
    """Return a checkpoint's record, which must be a valid result of `Progress.record` at this step."""
    problems = [f"{name} is missing" for name in Record.__annotations__ if name not in record]
    try:
        found = _RECORD.validate_json(json.dumps(record), strict=True)
        problems += [] if found.done == int(folder.name) else [f"done is {found.done}"]
    except ValidationError as error:
        found, first = Record(), error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        problems += [f"{name} is missing" if first["type"] == "missing" else f"{name} is {first['input']!r}"]
    if problems:
        raise CheckpointError(
            f"{folder / 'record'} is damaged, or not from a run of jdp train: {problems[0]}. Move {folder} away: the "
            "run then resumes from the previous checkpoint, or starts from the beginning without one."
        )
    return found


def introduction(assembly: Assembly, coverage: str | None) -> list[str | None]:
    """Return the first lines of a visit: model and plan, data, `coverage` of evaluations, compiled programs."""
    experiment, training = assembly.experiment, assembly.training
    first = f"{experiment.name}: {training.parameter_count:,} parameters, {training.plan}"
    if experiment.train.wrt is not None:
        first += f"; {training.trained_count:,} are trained, the others frozen"
    kept = f"compiled programs are kept in {folder} (--no-cache: not)" if (folder := kept_in()) else None
    plugin = None
    if experiment.plugin is not None:
        tables = (experiment.model, experiment.data, experiment.loss, experiment.optimizer)
        used = ", ".join(table.make for table in tables if table.make is not None) or "nothing of it is used"
        plugin = f"plug-in {experiment.plugin} ({folder_of(experiment.plugin)}): {used}"
    return [first, plugin, str(assembly.inputs.data), coverage, kept]


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
    chosen, evals, training, steady = assembly.experiment, progress.evals, assembly.training, progress.steady_seconds
    has_mfu = steady and assembly.seconds_at_peak is not None
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
        f"{assembly.inputs.unit}_per_second": progress.steady_units / steady if steady else None,
        **({"mfu": progress.steady_at_peak / steady} if has_mfu else {}),
        "data_wait_fraction": progress.waited / steady if steady else None,
        "devices": assembly.mesh.devices.size,
        "processes": jax.process_count(),
        "strategy": chosen.strategy,
        "partitioning": training.step.partitioning,
        "parameters": training.parameter_count,
        "trained_parameters": training.trained_count,
        "skipped": progress.skipped,
        "resumed_from": progress.resumed_from,
        "goodput": account(read(folder / EVENT_LOGS / "rank-00000.jsonl")).as_summary(),
        "folder": str(folder),
    }
