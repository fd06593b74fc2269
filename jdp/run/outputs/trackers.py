"""Weights & Biases (optional): a copy of the metrics in the run's folder.

The folder's trackers.json has the tracker's name for this run, so a resumed run continues the same curves. The tracker
starts before the first step, and a failure then is an error. Later it only gets rows, on its own thread, so a slow
network delays no step. A failure is reported once, and the run continues with its local files. The package is imported
only on request.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from jdp.base.errors import UserError
from jdp.base.notices import warn

FILE = "trackers.json"
WAITING_ROWS = 10_000
"""Rows that may wait for a slow tracker before it counts as failed."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for unsent rows."""


def check_installed(wandb: str | None) -> None:
    """Check that the package of a requested tracker is installed; only process 0 needs it."""
    if wandb is None or jax.process_index() != 0:
        return
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # W&B's folder `wandb` beside the program is not a package
        raise UserError("train.wandb needs the package wandb, which is not installed: pip install 'jdp[wandb]'")


def start(
    folder: Path, config: Mapping[str, Any], *, wandb: str | None, resumed_step: int = 0
) -> list[BackgroundTracker]:
    """Start the tracker, or continue its run; process 0 only."""
    if wandb is None or jax.process_index() != 0:
        return []
    known, key = _read_ids(folder), f"wandb:{wandb}"
    try:
        tracker = WandB(folder, wandb, config, known.get(key))
    except Exception as error:
        if key in known and resumed_step:
            warn(f"wandb did not continue its run ({_first_line(error)}): metrics are only in {folder}")
            return []
        raise UserError(
            f"train.wandb = {wandb!r} did not start: {_first_line(error)} (run `wandb login`, or set "
            "WANDB_MODE=offline, or leave train.wandb out)"
        ) from error
    fresh = folder / f"{FILE}.new"
    fresh.write_text(json.dumps({**known, key: tracker.id}) + "\n", encoding="utf-8")
    fresh.replace(folder / FILE)
    return [BackgroundTracker(tracker, folder)]


class BackgroundTracker:
    """A tracker on its own thread, because it may be slow; its exceptions end the tracking, not the run."""

    def __init__(self, tracker: WandB, folder: Path) -> None:
        self._tracker, self._folder = tracker, folder
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(WAITING_ROWS)
        self._failed, self._exit_code = False, 0
        self._thread = threading.Thread(target=self._work, name="wandb tracker", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a row; returns at once."""
        try:
            if not self._failed:
                self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            self._fail(f"{WAITING_ROWS} rows behind")

    def close(self, exit_code: int = 0) -> None:
        """Send the queued rows for at most `CLOSE_SECONDS`, and end this visit in the tracker."""
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
            warn(f"wandb failed ({reason}): this run continues without it, metrics are in {self._folder}")


class WandB:
    """A run of Weights & Biases, its files in the run's folder.

    W&B accepts only increasing steps: after a resume it ignores the steps that it has, whose rows are the same.
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
            settings=wandb.Settings(console="off"),  # W&B would replace stdout, which is the command's
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


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
