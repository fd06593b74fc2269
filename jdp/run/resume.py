"""Where a run stands: at its beginning, at another model's weights, or after the steps of its newest checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax

from jdp.checkpoint import CheckpointError, Checkpoints
from jdp.core.formatting import finite_or_none
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment
from jdp.run.evaluation import Best, Row
from jdp.run.folder import CHECKPOINTS
from jdp.run.initial_weights import load_parameters

SAVED = ("done", "skipped", "loss", "evals", "evaluated", "fingerprint")


@dataclass
class Progress:
    """How far a run is. The first eight are saved with each checkpoint.

    Attributes:
        done: batches consumed.
        skipped: of these, steps skipped because of gradients that were not finite.
        loss: at the last row of metrics, in nats.
        evals: the metrics of the last evaluation.
        evaluated: the step of that evaluation.
        fingerprint: of the data.
        watched: the best evaluation by `train.stop_metric`, for early stopping.
        kept: the best one with a checkpoint, by `train.keep_best`; None: none is kept.
        resumed_from: batches consumed before this visit.
        seconds: of this visit's loop.
        waited, steady_seconds, steady_units: of this visit's steps, compilation and evaluation left out; units are
            tokens, or examples.
        skips_in_a_row, skips_seen: up to the step that was looked at last.
    """

    done: int = 0
    skipped: int = 0
    loss: float | None = None
    evals: Row = field(default_factory=dict[str, float])
    evaluated: int = 0
    fingerprint: str = ""
    watched: Best = field(default_factory=lambda: Best("eval_loss"))
    kept: Best | None = None
    resumed_from: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    steady_seconds: float = 0.0
    steady_units: int = 0
    skips_in_a_row: int = 0
    skips_seen: int = 0

    def add_times(self, seconds: float, waited: float, units: int) -> None:
        self.steady_seconds += seconds
        self.waited += waited
        self.steady_units += units

    def stops_early(self, experiment: Experiment) -> bool:
        """Whether enough evaluations have passed without improvement."""
        return 0 < experiment.train.stop_after <= self.watched.waiting

    def finished(self, experiment: Experiment) -> bool:
        return self.done >= experiment.train.steps or self.stops_early(experiment)

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON has no NaN."""
        kept = {name: getattr(self, name) for name in SAVED}
        kept["loss"] = finite_or_none(self.loss)
        kept["evals"] = {name: finite_or_none(value) for name, value in self.evals.items()}
        return {**kept, "watched": self.watched.record(), "kept": self.kept.record() if self.kept else None}

    @staticmethod
    def of(experiment: Experiment, record: dict[str, Any]) -> Progress:
        """As it was when `record` was made, `{}` at the beginning."""
        settings = experiment.train
        known = {name.name for name in fields(Progress)}
        progress = Progress(**{name: value for name, value in record.items() if name in known})
        progress.watched = Best.resumed(settings.stop_metric, record.get("watched"))
        progress.kept = Best.resumed(settings.best_metric, record.get("kept")) if settings.best_metric else None
        evals: dict[str, float | None] = record.get("evals", {})
        progress.evals = {name: math.nan if value is None else value for name, value in evals.items()}
        progress.resumed_from = progress.done
        return progress


def open_checkpoints(experiment: Experiment, folder: Path) -> Checkpoints:
    """The run's checkpoints, kept as [train] says."""
    settings = experiment.train
    more: dict[str, Any] = {}
    if settings.best_metric:
        more = {"best": settings.best_metric, "mode": Best(settings.best_metric).mode}
    return Checkpoints(folder / CHECKPOINTS, keep=settings.keep_checkpoints, keep_every=settings.keep_every, **more)


def start(assembly: Assembly, saved: Checkpoints) -> tuple[TrainState, Progress, str | None]:
    """A fresh state, with the weights of `train.init_from` if that is given, or the newest checkpoint's on this plan.

    Returns:
        The state, how far the run is, and what was read into a fresh state, in words.

    Raises:
        ExperimentError: the data is not that of the checkpoint.
        ValueError: a checkpoint or file that does not fit the model; CheckpointError, a damaged one.
    """
    experiment, fingerprint = assembly.experiment, assembly.data.fingerprint
    if saved.latest is None:
        progress = Progress.of(experiment, {"fingerprint": fingerprint})
        if experiment.train.init_from is None:
            return assembly.state(), progress, None
        state, words = load_parameters(assembly.state(), experiment, assembly.plan)
        return state, progress, words
    newest = saved.directory / str(saved.latest)
    state, record = saved.restore(assembly.abstract_state())
    _check_record(record, newest)
    if record["fingerprint"] != fingerprint:
        raise ExperimentError(
            f"{saved.directory.parent} was trained on other data (fingerprint {record['fingerprint']}, now "
            f"{fingerprint}): restore [data] as it was, or choose another `name`. The standard library's text "
            "differs between Python versions."
        )
    progress = Progress.of(experiment, record)
    progress.skipped = progress.skips_seen = int(jax.device_get(state.skipped))
    return state, progress, None


_NUMBER, _COUNT = (int, float), (int,)
_KINDS = {"done": _COUNT, "skipped": _COUNT, "evaluated": _COUNT, "loss": (*_NUMBER, type(None)), "fingerprint": (str,)}
_BEST = {"metric": (str,), "value": (*_NUMBER, type(None)), "step": _COUNT, "waiting": _COUNT}


def _check_record(record: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless it is what `Progress.record` made of the run at this step."""
    evals, bests = record.get("evals"), {name: record.get(name) for name in ("watched", "kept")}
    found = _odd(record, _KINDS, "")
    if not found and not (
        isinstance(evals, dict) and not _odd(evals, dict.fromkeys(evals, (*_NUMBER, type(None))), "")
    ):
        found = f"evals is {evals!r}"
    for name, best in bests.items():
        known = {**_BEST, "to_beat": _BEST["value"]} if isinstance(best, dict) and "to_beat" in best else _BEST
        if not found and best is not None:
            fits = isinstance(best, dict) and best.keys() <= known.keys()
            found = _odd(best, known, f"{name}.") if fits else f"{name} is {best!r}"
    if not found and record["done"] != int(folder.name):
        found = f"done is {record['done']}"
    if found:
        raise CheckpointError(
            f"{folder / 'record'} is damaged, or not that of a run of jdp train: {found}. Move {folder} away: the run "
            "then resumes from the checkpoint before, or starts afresh where there is none."
        )


def _odd(table: dict[str, Any], kinds: dict[str, tuple[type, ...]], where: str) -> str:
    """The first of these keys that is missing or of another type, in words."""
    for name, kind in kinds.items():
        if name not in table:
            return f"{where}{name} is missing"
        if not isinstance(table[name], kind) or isinstance(table[name], bool):
            return f"{where}{name} is {table[name]!r}"
    return ""
