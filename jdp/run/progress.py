"""The progress of a run, and its record in each checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jdp.base.formatting import finite_or_none
from jdp.checkpoint import CheckpointError
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.run.evaluation import Best, Row

_SAVED = ("done", "samples", "skipped", "loss", "evals", "evaluated", "fingerprint", "experiment")


@dataclass
class Progress:
    """The progress of a run. A checkpoint records the first ten attributes.

    Attributes:
        done: batches consumed.
        samples: the samples in them; visits may have batches of different sizes.
        skipped: steps skipped because gradients or updates were not finite.
        loss: the loss at the last row of metrics, in nats.
        evals: the metrics of the last evaluation.
        evaluated: the step of that evaluation.
        fingerprint: fingerprint of the data.
        experiment: hash of this visit's resolved experiment.
        watched: the best evaluation, for early stopping.
        kept: the best evaluation with a checkpoint; None without `train.keep_best`.
        resumed_from: batches consumed before this visit.
        seconds: duration of this visit's loop.
        waited, steady_seconds, steady_units: seconds that this visit's steps waited for data, their duration, and their
            tokens or examples, without compilation and evaluation.
        steady_at_peak: the seconds that these steps would take at the devices' peak, if known.
        skips_in_a_row, skips_seen: skipped steps up to the last step whose metrics were read.
    """

    done: int = 0
    samples: int = 0
    skipped: int = 0
    loss: float | None = None
    evals: Row = field(default_factory=dict[str, float])
    evaluated: int = 0
    fingerprint: str = ""
    experiment: str = ""
    watched: Best = field(default_factory=lambda: Best("eval_loss"))
    kept: Best | None = None
    resumed_from: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    steady_seconds: float = 0.0
    steady_units: int = 0
    steady_at_peak: float = 0.0
    skips_in_a_row: int = 0
    skips_seen: int = 0

    def stops_early(self, experiment: Experiment) -> bool:
        """Return True if `train.stop_after` evaluations have passed without improvement."""
        return 0 < experiment.train.stop_after <= self.watched.waiting

    def finished(self, experiment: Experiment) -> bool:
        """Return True if all steps are done, or the run stops early."""
        return self.done >= experiment.train.steps or self.stops_early(experiment)

    def record(self) -> dict[str, Any]:
        """Return the record for a checkpoint, with null in place of NaN and infinities."""
        kept = {name: getattr(self, name) for name in _SAVED}
        kept["loss"], kept["evals"] = (
            finite_or_none(self.loss),
            {name: finite_or_none(value) for name, value in self.evals.items()},
        )
        best = {"watched": asdict(self.watched), "kept": asdict(self.kept) if self.kept else None}
        return {**kept, **best}

    @staticmethod
    def of(settings: Train, toml: str, record: dict[str, Any]) -> Progress:
        """Return the progress from a checkpoint's record; `{}` for a run that has not begun."""
        known = {name.name for name in fields(Progress)}
        progress = Progress(**{name: value for name, value in record.items() if name in known})
        progress.watched = Best.resumed(settings.best_metric, record.get("watched"))
        progress.kept = Best.resumed(settings.best_metric, record.get("kept")) if settings.keep_best else None
        evals: dict[str, float | None] = record.get("evals", {})
        progress.evals = {name: math.nan if value is None else value for name, value in evals.items()}
        progress.experiment = hashlib.sha256(toml.encode()).hexdigest()[:16]
        progress.resumed_from = progress.done
        return progress


@dataclass
class _Record:
    """The checked values of a record, and their types."""

    done: int
    samples: int
    skipped: int
    evaluated: int
    loss: float | None
    evals: dict[str, float | None]
    fingerprint: str
    watched: Best | None
    kept: Best | None


def check_record(record: dict[str, Any], folder: Path) -> None:
    """Check that a checkpoint's record is a valid result of `Progress.record` at this step."""
    try:
        TypeAdapter(_Record).validate_json(json.dumps(record), strict=True)
        problem = "" if record["done"] == int(folder.name) else f"done is {record['done']}"
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        problem = f"{name} is missing" if first["type"] == "missing" else f"{name} is {first['input']!r}"
    if problem:
        raise CheckpointError(
            f"{folder / 'record'} is damaged, or not from a run of jdp train: {problem}. Move {folder} away: the run "
            "then resumes from the previous checkpoint, or starts from the beginning without one."
        )
