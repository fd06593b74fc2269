"""Weights & Biases and MLflow, for those who use them: a copy of the metrics in the run's own folder.

The folder's trackers.json has the tracker's name for this run, so a run that resumes continues the same curves. A
tracker starts before the first step, and a failure then is an error. Later it only gets rows, on a thread of its own,
so a slow network delays no step. A failure is reported once, and the run goes on with its local files. Both packages
are imported only if they are asked for.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import jax

from jdp.base.notices import warn

FILE = "trackers.json"
WAITING_ROWS = 10_000
"""Rows that may wait for a slow tracker; with more it has failed."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for rows that are still to be sent."""
_MLFLOW_STATUS = {0: "FINISHED", 75: "KILLED", 130: "KILLED"}  # 75 and 130: stopped by a signal, to be resumed
_MLFLOW_BATCH, _MLFLOW_LENGTH = 100, 6000  # parameters a request, characters a value: limits of MLflow's servers


class Tracker(Protocol):
    """Takes rows of metrics; its methods may raise anything, or take long."""

    id: str

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """Take one row: steps done, Unix time in seconds, name -> value."""
        ...

    def close(self, exit_code: int) -> None:
        """End this visit; `exit_code` is 0 if it succeeded."""
        ...


def check_installed(**wanted: str | None) -> None:
    """Check that the trackers' packages are installed; only process 0 needs them."""
    for name in [name for name, project in wanted.items() if project is not None and jax.process_index() == 0]:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # W&B's own folder `wandb` beside the program is no package
            raise ValueError(
                f"track.{name} needs the package {name}, which is not installed: pip install 'jdp[{name}]'"
            )


def start(
    folder: Path, config: Mapping[str, Any], *, resumed_step: int = 0, **wanted: str | None
) -> list[BackgroundTracker]:
    """Start the trackers, or continue their runs. On processes other than 0 there are none."""
    started: list[BackgroundTracker] = []
    if jax.process_index() != 0:
        return started
    known = _read_ids(folder)
    for name, project in wanted.items():
        key = f"{name}:{project}"
        try:
            if project is not None:
                tracker = _KINDS[name](folder, project, config, known.get(key))
                known[key] = tracker.id
                fresh = folder / f"{FILE}.new"
                fresh.write_text(json.dumps(known) + "\n", encoding="utf-8")
                fresh.replace(folder / FILE)
                started.append(BackgroundTracker(name, tracker, folder))
        except Exception as error:
            if key in known and resumed_step:
                warn(f"{name} did not go on with its run ({_first_line(error)}): metrics are in {folder} only")
                continue
            for tracker in started:
                tracker.close(1)
            raise ValueError(
                f"track.{name} = {project!r} did not start: {_first_line(error)} ({_HELP[name]})"
            ) from error
    return started


class BackgroundTracker:
    """A tracker on a thread of its own; an exception of its ends the tracking, not the run."""

    def __init__(self, name: str, tracker: Tracker, folder: Path) -> None:
        self._name, self._tracker, self._folder = name, tracker, folder
        self._rows: queue.Queue[tuple[int, float, Mapping[str, float]] | None] = queue.Queue(WAITING_ROWS)
        self._failed, self._exit_code = False, 0
        self._thread = threading.Thread(target=self._work, name=f"{name} tracker", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a row; returns at once."""
        try:
            if not self._failed:
                self._rows.put_nowait((step, time.time(), dict(values)))
        except queue.Full:
            self._fail(f"{WAITING_ROWS} rows behind")

    def close(self, exit_code: int = 0) -> None:
        """Send the queued rows, for `CLOSE_SECONDS` at most, and end this visit in the tracker."""
        self._exit_code = exit_code
        if self._failed:
            return
        try:
            self._rows.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._fail(f"still sending {CLOSE_SECONDS:.0f} seconds after the end")
        except queue.Full:
            self._fail(f"{WAITING_ROWS} rows behind")

    def _work(self) -> None:
        try:
            for row in iter(self._rows.get, None):
                if self._failed:
                    break
                self._tracker.write(*row)
            self._tracker.close(self._exit_code)
        except Exception as error:
            self._fail(_first_line(error))

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            warn(f"{self._name} failed ({reason}): this run goes on without it, metrics are in {self._folder}")


class WandB:
    """A run of Weights & Biases, its files in the run's folder.

    W&B takes steps in rising order only: after a resume it ignores the steps that it has, whose rows are the same.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], known: str | None) -> None:
        import wandb

        self.id = known or secrets.token_hex(4)
        entity, _, name = project.rpartition("/")
        self._run: Any = wandb.init(
            project=name,
            entity=entity or None,
            name=folder.name,
            id=self.id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            allow_val_change=True,  # a resumed run may have another strategy
            settings=wandb.Settings(console="off"),  # stdout is the command's: W&B would put itself in its place
        )

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MLflow:
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names.

    MLflow keeps both rows of a step that comes twice, so after a resume each metric continues after its last step.
    """

    def __init__(self, folder: Path, experiment: str, config: Mapping[str, Any], known: str | None) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._last: dict[str, int] = {}
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            for name in self._client.get_run(known).data.metrics:
                self._last[name] = max(point.step for point in self._client.get_metric_history(known, name))
            return
        existing = self._client.get_experiment_by_name(experiment)
        group = existing.experiment_id if existing else self._client.create_experiment(experiment)
        self.id = self._client.create_run(group, run_name=folder.name).info.run_id
        self._log_config(config)

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        self._client.log_batch(self.id, metrics=[Metric(n, float(v), round(1000 * now), step) for n, v in new.items()])

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self.id, status=_MLFLOW_STATUS.get(exit_code, "FAILED"))

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_MLFLOW_LENGTH]) for key, value in _flat(config)]
        for first in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self.id, params=params[first : first + _MLFLOW_BATCH])


_KINDS = {"wandb": WandB, "mlflow": MLflow}
_HELP = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline, or leave track.wandb out",
    "mlflow": "set MLFLOW_TRACKING_URI to the address of a server, or leave track.mlflow out",
}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. MLflow's names take letters, digits and _-./: only; a pattern's `*` becomes `_`."""
    for key, value in table.items():
        name = prefix + "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in str(key))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _read_ids(folder: Path) -> dict[str, str]:
    file = folder / FILE
    try:
        ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, RecursionError):
        ids = None
    if isinstance(ids, dict) and all(isinstance(one, str) for one in ids.values()):
        return ids
    warn(f"{file} cannot be read: the trackers start new runs")
    return {}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
