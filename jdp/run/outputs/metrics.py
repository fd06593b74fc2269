"""Metrics of a run on disk: `metrics.jsonl` for programs, TensorBoard events for people; written by process 0 only.

`metrics.jsonl` has one JSON object a line: {"step": 10, "time": 1718000000.1, "loss": 2.3, ...}, flushed as written.
JSON has no NaN and no infinity: such a value is null, and its text under "nonfinite", as in
{"loss": null, "nonfinite": {"loss": "nan"}}; `read` restores it.

A run that resumes from step s writes the steps after s again, and `Metrics(folder, resumed_step=s)` first removes the
rows that an earlier process wrote for them. Each visit has its own event file, which begins with a record that makes
TensorBoard forget those steps in older files (`purge_step` of its writers). If the checkpoint of s precedes its
evaluation, each visit that resumes there evaluates again: `replace_evaluation` keeps one row of it. A half-written last
row is dropped with a notice. A `metrics.jsonl` that is damaged elsewhere is copied to `metrics.jsonl.damaged`, and its
good rows stay. `check` finds a file that was deleted, cut or replaced during the visit, and writes it anew.
"""

import contextlib
import importlib
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jdp.base.notices import warn
from jdp.run.outputs.trackers import BackgroundTracker

JSONL = "metrics.jsonl"
EVENTS = "events"
"""TensorBoard files are EVENTS.out.tfevents.*"""
_ROW_START = b'{"step"'
_KNOWN_ROWS = 10_000
"""The newest rows that are also in memory, some megabytes, in case somebody cuts the file."""


class Metrics:
    """Appends rows of scalars to a run's metrics. On processes other than 0 it does nothing.

    `patiently` calls what writes to the disk, and again while the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int = 0,
        trackers: Sequence[BackgroundTracker] = (),
        patiently: Callable[[Callable[[], None]], None] = lambda action: action(),
    ) -> None:
        self._speaks, self._patiently = jax.process_index() == 0, patiently
        self._trackers = trackers
        if not self._speaks:
            return
        writer = _writer_of_events()
        self._event: Any = _message_types().Event
        self._file = folder / JSONL
        self._open(lambda row: row["step"] <= resumed_step)
        # tensorboardX names files by the second, and overwrites. TensorBoard reads them in the order of their names.
        visits = sum(1 for _ in folder.glob(f"{EVENTS}.out.tfevents.*"))
        self._events = writer(str(folder / EVENTS), filename_suffix=f".visit{visits:06d}")
        self._event_file: Any = vars(self._events)["_py_recordio_writer"]  # its owner leaves it open on a full disk
        self._purge_events_from(resumed_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row."""
        if not self._speaks:
            return
        now = time.time()
        scalars = {name: _scalar(name, value) for name, value in values.items()}
        row = json.dumps(json_safe({"step": step, "time": round(now, 3)} | scalars), allow_nan=False).encode()
        self._jsonl.write(row + b"\n")
        self._patiently(self._jsonl.flush)  # what it could not write stays in its buffer
        self._newest.append(row)
        self._count, self._bytes = self._count + 1, self._bytes + len(row) + 1
        self._write_event(step, now, scalars)
        for tracker in self._trackers:
            tracker.write(step, scalars)

    def replace_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the evaluation of the last step, in place of the one that an earlier visit may have written."""
        if self._speaks:
            self._jsonl.close()
            self._open(lambda row: row["step"] != step or not _is_evaluation(row))
            self._purge_events_from(step)  # all of the step: what stays is written again
            for row in read(self._file):
                if row["step"] == step:
                    metrics = {name: row[name] for name in _metrics_of(row) if isinstance(row[name], int | float)}
                    self._write_event(step, row.get("time", 0.0), metrics)
        self.write(step, values)

    def check(self) -> None:
        """Write the file anew if it was deleted, cut or replaced since its last row; report the rows that are lost."""
        if not self._speaks:
            return
        found = self._file.stat() if self._file.exists() else None
        ours = found is not None and os.path.samestat(found, os.fstat(self._jsonl.fileno()))
        if found is not None and ours and found.st_size == self._bytes:
            return
        how = "deleted" if found is None else "cut or changed" if ours else "replaced"
        aside = "" if found is None or ours else f" (that one is now {_set_aside(self._file)})"
        rows, expected = self._known_rows(), self._count
        self._jsonl.close()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        _write(self._file, rows)
        self._open(lambda row: True)
        lost = max(0, expected - len(rows))
        warn(
            f"{self._file} was {how} during the run{aside}: it is written anew with {len(rows)} rows; "
            f"{lost or 'no'} older ones are lost"
        )

    def close(self, exit_code: int = 0) -> None:
        """Close the files and the trackers."""
        with contextlib.ExitStack() as closing:  # all of them, even if the disk is full and each raises
            for tracker in self._trackers:
                closing.callback(tracker.close, exit_code)
            if self._speaks:
                closing.callback(self._event_file.close)
                closing.callback(self._events.close)
                closing.callback(self._jsonl.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        self.close(code if isinstance(code, int) else 1)

    def _open(self, stays: Callable[[Mapping[str, Any]], bool]) -> None:
        """Open the file with the rows that stay."""
        rows = _keep_rows(self._file, stays)
        self._jsonl = self._file.open("a+b")
        self._newest, self._count = deque(rows, _KNOWN_ROWS), len(rows)
        self._bytes = os.fstat(self._jsonl.fileno()).st_size

    def _known_rows(self) -> list[bytes]:
        """Return the rows that are left: in the open file, which outlives its name, and in memory."""
        self._jsonl.seek(0)
        newest = {*self._newest}
        return [*(row for row in _Rows.of(self._jsonl.read()).rows if row not in newest), *self._newest]

    def _write_event(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._events.write_event(self._event(wall_time=now, step=step, summary={"value": values}))
        self._patiently(self._events.flush)

    def _purge_events_from(self, step: int) -> None:
        """Make TensorBoard forget what it has read of this step and later ones, as tensorboardX's `purge_step` does."""
        start = {"status": _message_types().SessionLog.START}
        self._events.write_event(self._event(wall_time=time.time(), step=step, session_log=start))
        self._events.flush()


def numbers(values: Mapping[str, jax.Array]) -> dict[str, float]:
    """Return a step's metrics as numbers, which is all that a row holds; arrays are left out, and reported once."""
    for name, value in values.items():
        if value.ndim:
            warn(f"metric {name!r} has shape {value.shape}: rows of metrics hold numbers, so it is left out")
    return {name: float(value) for name, value in jax.device_get(values).items() if not value.ndim}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, non-finite values restored.

    Damaged rows are left out, with a notice unless it is a half-written last one.
    """
    rows, damaged, _ = read_counted(file)
    if damaged:
        warn(f"{file}: {damaged} of {damaged + len(rows)} rows are damaged and left out")
    return rows


def read_counted(file: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """Return the rows, as `read` does, the number of damaged ones, and whether the last row is half-written."""
    stored = _Rows.of(file.read_bytes())
    rows = [
        row | {name: float(word) for name, word in row.pop("nonfinite", {}).items()}
        for row in map(json.loads, stored.rows)
    ]
    return rows, stored.damaged, stored.torn


def json_safe(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with null for NaN and infinities, and their names and texts under "nonfinite"."""
    bad = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in bad else value for name, value in row.items()} | ({"nonfinite": bad} if bad else {})


def _writer_of_events() -> Any:
    """Return tensorboardX's class, imported without the packages of Google's and Amazon's storage.

    Where these are installed it imports them, which takes longer than all else of it, and is for files that are not
    here: a run's folder is on this machine.
    """
    absent = [name for name in ("boto3", "google.cloud.storage") if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(absent))  # None: an import of it fails
    try:
        return importlib.import_module("tensorboardX.event_file_writer").EventsWriter
    finally:
        for name in absent:
            del modules[name]


def _message_types() -> Any:
    """Return the module of tensorboardX's messages; protobuf makes its classes at import, so no checker knows them."""
    return importlib.import_module("tensorboardX.proto.event_pb2")


def _scalar(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.ndim or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise ValueError(f"A metric is one number; given {name}, {array.dtype}{list(array.shape)}: reduce it.")
    return float(array) if array.dtype.kind not in "biu" else int(array)


@dataclass(frozen=True)
class _Rows:
    """The rows of a metrics.jsonl."""

    rows: list[bytes]  # the good rows as they were written, each a line of JSON with a step, in their order
    damaged: int  # number of the other lines
    torn: bool  # whether the file ends with a part of a row, as after its writer was killed

    @staticmethod
    def of(data: bytes) -> "_Rows":
        *lines, last = data.split(b"\n")
        rows = [row for line in lines if line for row in _rows_in(line)]
        complete = _is_row(last)
        good = [row for row in rows if row is not None] + ([last] if complete else [])
        return _Rows(good, rows.count(None), bool(last) and not complete)


def _rows_in(line: bytes) -> Iterator[bytes | None]:
    """Yield the rows in a line, None for a damaged one: the row of a killed writer may be followed by the next."""
    if _is_row(line):
        yield line
        return
    yield None
    again = line.rfind(_ROW_START)
    if again > 0 and _is_row(line[again:]):
        yield line[again:]


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
        words = row.get("nonfinite", {})
        return type(row["step"]) is int and all(math.isnan(x) or math.isinf(x) for x in map(float, words.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # any JSON, or any bytes
        return False


def _metrics_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a row of the file."""
    return [name for name in row if name not in ("step", "time", "nonfinite")]


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return True for the row of an evaluation: a step's own has its loss."""
    return all(name.startswith("eval_") for name in _metrics_of(row))


def _keep_rows(file: Path, stays: Callable[[Mapping[str, Any]], bool]) -> list[bytes]:
    """Keep the rows that stay, and return them."""
    if not file.exists():
        return []
    stored = _Rows.of(file.read_bytes())
    if stored.damaged:
        aside = _set_aside(file)
        warn(
            f"{file}: {stored.damaged} of {stored.damaged + len(stored.rows)} rows are damaged; that file is now "
            f"{aside}, and the others go on in a new one"
        )
    elif stored.torn:
        warn(f"{file}: the last row was only half written, and is dropped")
    rows = [row for row in stored.rows if stays(json.loads(row))]
    _write(file, rows)
    return rows


def _write(file: Path, rows: Sequence[bytes]) -> None:
    """Write the rows. The new file replaces the old one in one move: a crash here loses nothing."""
    fresh = file.with_suffix(".jsonl.new")
    fresh.write_bytes(b"".join(row + b"\n" for row in rows))
    fresh.replace(file)


def _set_aside(file: Path) -> str:
    """Copy a damaged file to NAME.damaged, or NAME.damaged-2 and so on, and return the copy's name."""
    number, aside = 1, file.with_name(f"{file.name}.damaged")
    while aside.exists():
        number += 1
        aside = file.with_name(f"{file.name}.damaged-{number}")
    shutil.copyfile(file, aside)
    return aside.name
