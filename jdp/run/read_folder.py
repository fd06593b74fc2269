"""Reads a run's folder as plain values: its experiment, metrics and events.

Reading writes and locks nothing, so it works during a run. It omits damaged or missing parts and adds a note for each,
because a failed run must stay readable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdp.base.toml import parse, toml_value
from jdp.base.user_path import user_path
from jdp.base.words import nearest
from jdp.experiment.file import ExperimentError
from jdp.guard.time_account import account
from jdp.launch.events import EVENT_LOGS, history
from jdp.launch.events import read as read_events
from jdp.run.folder import CHECKPOINTS, FILE, flat
from jdp.run.metrics import JSONL, SAMPLES, read

if TYPE_CHECKING:
    from jdp.report.run import Run


def find_run(given: str, runs: Path, *, begun: bool = True) -> Path:
    """Return the folder of a run, given its path or its name in `runs`.

    With `begun=False` it may have only a supervisor's log: all processes failed before the run began.
    """
    path = user_path(given)
    named = [runs / path] if len(path.parts) == 1 else []
    folder = next((each for each in (path, *named) if (each / FILE).is_file()), None)
    if folder is None and not begun:
        folder = next((each for each in (path, *named) if any((each / EVENT_LOGS).glob("node-*.jsonl"))), None)
    if folder is not None:
        return folder
    there = sorted(file.parent.name for file in runs.glob(f"*/{FILE}"))
    hint = nearest(path.name, there, f"; did you mean {runs}/", cutoff=0.5) or (
        f"; {runs} has {', '.join(there[:5])}{' …' * (len(there) > 5)}" if there else f"; {runs} has no runs"
    )
    what = f"it has no {FILE}" if path.is_dir() else "it is a file" if path.exists() else "there is no such folder"
    raise ExperimentError(f"a run is a folder with an {FILE}, or its name in {runs}; given {path}: {what}{hint}")


def read_run(folder: Path, name: str) -> Run:
    """Read a run's folder for the report, without its compiled step."""
    from jdp.report.run import Run  # late: training needs no report

    notes: list[str] = []
    try:
        toml = (folder / FILE).read_bytes().decode(errors="replace")
        rows = _rows(folder / JSONL, notes)
        events = read_events(folder / EVENT_LOGS / "rank-00000.jsonl")
        names = [path.name for path in (folder / CHECKPOINTS).glob("*")]
        samples = read_samples(folder, notes)
    except OSError as error:
        file = error.filename or folder
        raise ExperimentError(f"{file} cannot be read: {error.strerror}; name a run that you may read") from None
    visits, spent = history(events), account(events)
    if not visits:
        notes.append(f"There is no {EVENT_LOGS}/rank-00000.jsonl: resumes and stops of the run are unknown.")
    settings = dict[str, str]()
    try:
        settings = {key: toml_value(value) for key, value in flat(parse(toml)).items()}
    except ValueError as error:
        notes.append(f"{FILE} {error}.")
    return Run(
        name,
        rows,
        visits,
        toml,
        settings,
        sorted(int(step) for step in names if step.isdecimal() and len(step) < 19),
        notes,
        samples=samples,
        goodput=spent.words() if spent.visits else None,
    )


def _rows(file: Path, notes: list[str]) -> list[dict[str, float]]:
    rows = list[dict[str, float]]()
    try:
        rows = read(file)
        notes += [] if rows else ["No step was logged."]
    except FileNotFoundError:
        notes.append(f"There is no {JSONL}: no step was logged.")
    except ValueError as error:
        notes.append(f"{error}.")
    return rows


def read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return a run's samples by step. Damaged rows are left out and reported in `notes`."""
    rows, kinds = list[dict[str, Any]](), {"step": int, "prompt": str, "text": str}
    for file in sorted((folder / SAMPLES).glob("*.jsonl"), key=lambda file: (len(file.name), file.name)):
        found = list[dict[str, Any]]()
        for line in filter(None, file.read_bytes().split(b"\n")):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            found.append(value if isinstance(value, dict) else {})
        good = [row for row in found if all(isinstance(row.get(name), kind) for name, kind in kinds.items())]
        if len(good) < len(found):
            notes.append(f"{len(found) - len(good):,} of {len(found):,} rows of {file.name} are damaged and left out.")
        rows += [{name: row[name] for name in kinds} for row in good]
    return rows
