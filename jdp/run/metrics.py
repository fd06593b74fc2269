"""Metrics of a run: `metrics.jsonl` for programs, TensorBoard events and W&B for people; written by process 0 only.

`metrics.jsonl` has one JSON object a line: {"step": 10, "time": 1718000000.1, "loss": 2.3, ...}, flushed as written.
JSON has no NaN and no infinity: such a value is null, and its text under "nonfinite"; `read` restores it.

A run that resumes from step s writes the steps after s again. So `Metrics(folder, resumed_step=s)` removes the rows of
an earlier process, and begins an event file that makes TensorBoard forget them. If the checkpoint of s precedes its
evaluation, that row is removed too, because each visit that resumes there evaluates again.

Weights & Biases (optional) gets a copy of the rows; trackers.json names its run, which a resumed run continues. It
starts before the first step, and a failure then is an error; a later one is reported once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import jax
from pydantic import TypeAdapter, ValidationError

from jdp.base.errors import UserError
from jdp.base.notices import warn

JSONL = "metrics.jsonl"
EVENTS = "events"
"""TensorBoard files are EVENTS.*tfevents.*"""
TRACKERS, SAMPLES = "trackers.json", "samples"
"""The file with the runs' names in W&B, and the folder of [sample]."""
CLOSE_SECONDS = 60.0
"""How long the end of a visit waits for unsent rows."""


class Metrics:
    """Appends rows of scalars to a run's metrics. On processes other than 0 it does nothing.

    `evaluates`: the evaluation of `resumed_step` is to come, perhaps again. `patiently` calls a function that writes to
    the disk, and repeats it while the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int = 0,
        evaluates: bool = False,
        tracker: Tracker | None = None,
        patiently: Callable[[Callable[[], None]], None] = lambda action: action(),
    ) -> None:
        self._speaks, self._patiently = jax.process_index() == 0, patiently
        self._tracker = tracker
        if not self._speaks:
            return
        writer = importlib.import_module("tensorboardX.event_file_writer").EventsWriter
        messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")  # protobuf makes them at import
        self._event = messages.Event
        file, last = folder / JSONL, list[dict[str, Any]]()
        if file.exists():  # it is replaced in one move, so a crash loses nothing
            rows = [row for row in _rows(file) if row["step"] <= resumed_step]
            if evaluates:  # a step's own row has its loss
                rows = [row for row in rows if row["step"] < resumed_step or "loss" in row]
            replace_file(file, "".join(json.dumps(row) + "\n" for row in rows))
            last = [row for row in rows if row["step"] == resumed_step]
        self._jsonl = file.open("a+b")
        # tensorboardX names files by the second and overwrites them. TensorBoard reads them in the order of names: here
        # that of visits, whatever the clocks of machines say.
        visits = sum(1 for _ in folder.glob(f"{EVENTS}.*tfevents.*"))
        self._events = writer(str(folder / f"{EVENTS}.visit{visits:06d}"))
        self._event_file: Any = vars(self._events)["_py_recordio_writer"]  # its owner leaves it open on a full disk
        # TensorBoard forgets this step and later ones, as by tensorboardX's `purge_step`.
        start = {"status": messages.SessionLog.START}
        self._events.write_event(self._event(wall_time=time.time(), step=resumed_step, session_log=start))
        for row in map(_restored, last):
            self._write_event(resumed_step, row.pop("time", 0.0), {name: row[name] for name in row if name != "step"})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._speaks:
            return
        now = time.time()
        row = json.dumps(json_safe({"step": step, "time": round(now, 3), **values}), allow_nan=False).encode()
        self._jsonl.write(row + b"\n")
        self._patiently(self._jsonl.flush)  # unwritten text stays in the buffer
        self._write_event(step, now, values)
        if self._tracker is not None:
            self._tracker.write(step, values)

    def close(self, exit_code: int = 0) -> None:
        with contextlib.ExitStack() as closing:  # all of them, even if the disk is full and each raises
            if self._tracker is not None:
                closing.callback(self._tracker.close, exit_code)
            if self._speaks:
                closing.callback(self._event_file.close)
                closing.callback(self._events.close)
                closing.callback(self._jsonl.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        self.close(code if isinstance(code, int) else 1)

    def _write_event(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._events.write_event(self._event(wall_time=now, step=step, summary={"value": values}))
        self._patiently(self._events.flush)


def replace_file(file: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    fresh = file.with_name(f"{file.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def numbers(values: Mapping[str, jax.Array]) -> dict[str, float]:
    """Return a step's metrics as numbers; arrays are dropped, and reported once."""
    for name, value in values.items():
        if value.ndim:
            warn(f"metric {name!r} has shape {value.shape}: rows of metrics hold only numbers, so it is left out")
    return {name: float(value) for name, value in jax.device_get(values).items() if not value.ndim}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, non-finite values restored, without a half-written last row.

    Raises ValueError if another line is not a row.
    """
    return [*map(_restored, _rows(file))]


def _restored(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: float(word) for name, word in row.pop("nonfinite", {}).items()}


def _rows(file: Path) -> list[dict[str, Any]]:
    rows, lines = list[dict[str, Any]](), file.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append((row := json.loads(line)) | {"step": row["step"]})
        except (ValueError, TypeError, KeyError):  # other JSON too
            if number < len(lines):
                raise UserError(
                    f"{file} must have a row of metrics in each line; line {number} has none: remove that line"
                ) from None
    return rows


def json_safe(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities in a row by null, and put their names and texts under "nonfinite"."""
    bad = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in bad else value for name, value in row.items()} | ({"nonfinite": bad} if bad else {})


def check_installed(wandb: str | None) -> None:
    """Check that the package of a requested tracker is installed; only process 0 needs it."""
    if wandb is None or jax.process_index() != 0:
        return
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # W&B's folder `wandb` beside the program is not a package
        raise UserError("train.wandb needs the package wandb, which is not installed: pip install 'jdp[wandb]'")


def start_tracker(
    folder: Path, config: Mapping[str, Any], *, wandb: str | None, resumed_step: int = 0
) -> Tracker | None:
    """Start the tracker, or continue its run; process 0 only."""
    if wandb is None or jax.process_index() != 0:
        return None
    file, key, new, known = folder / TRACKERS, f"wandb:{wandb}", secrets.token_hex(4), dict[str, str]()
    try:
        known = TypeAdapter(dict[str, str]).validate_json(file.read_bytes() if file.exists() else "{}")
    except ValidationError:
        warn(f"{file} cannot be read: the trackers start new runs")
    try:
        run = start_wandb(folder, wandb, config, known.get(key, new))
    except Exception as error:
        if key in known and resumed_step:
            warn(f"wandb did not continue its run ({_first_line(error)}): metrics are only in {folder}")
            return None
        raise UserError(
            f"train.wandb = {wandb!r} did not start: {_first_line(error)} (run `wandb login`, or set "
            "WANDB_MODE=offline, or leave train.wandb out)"
        ) from error
    replace_file(file, json.dumps({key: new, **known}) + "\n")
    return Tracker(run, folder)


class Tracker:
    """A tracker whose exceptions end the tracking, not the run."""

    def __init__(self, run: Any, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._failed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass a row on; W&B sends it from a process of its own, so a slow network delays no step."""
        self._try(lambda: self._run.log(dict(values), step=step))

    def close(self, exit_code: int = 0) -> None:
        """End this visit in the tracker; W&B sends its rows for at most `CLOSE_SECONDS`."""
        self._try(lambda: self._run.finish(exit_code=exit_code))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            if not self._failed:
                action()
        except Exception as error:
            self._failed = True
            reason = _first_line(error)
            warn(f"wandb failed ({reason}): this run continues without it, metrics are in {self._folder}")


def start_wandb(folder: Path, project: str, config: Mapping[str, Any], known: str) -> Any:
    """Start a run of Weights & Biases with this id, or continue it; its files are in the run's folder.

    W&B accepts only increasing steps: after a resume it ignores the steps that it has, whose rows are the same.
    """
    import wandb

    entity, _, name = project.rpartition("/")
    return wandb.init(
        project=name,
        entity=entity or None,
        name=folder.name,
        id=known,
        resume="allow",
        dir=str(folder),
        config=dict(config),
        allow_val_change=True,  # a resumed run may have another strategy
        # W&B would replace stdout, which is the command's.
        settings=wandb.Settings(console="off", finish_timeout=CLOSE_SECONDS, finish_timeout_raises=True),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
