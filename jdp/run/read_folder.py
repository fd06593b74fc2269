"""Reads a run's folder as plain values: its experiment, metrics and events.

Reading writes and locks nothing, so it works during a run. It omits damaged or missing parts and adds a note for each,
because a failed run must stay readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdp.base.toml import parse, toml_key, toml_value
from jdp.base.user_path import user_path
from jdp.base.words import nearest
from jdp.experiment.file import ExperimentError
from jdp.guard.flight_recorder import FLIGHT, history
from jdp.guard.flight_recorder import read as read_flight
from jdp.guard.time_account import account
from jdp.run.folder import CHECKPOINTS, FILE
from jdp.run.outputs.metrics import JSONL, read
from jdp.run.outputs.samples import read_samples

if TYPE_CHECKING:
    from jdp.report.run import Run


def find_run(given: str, runs: Path) -> Path:
    """Return the folder of a run, given its path or its name in `runs`."""
    path = user_path(given)
    named = [runs / path] if len(path.parts) == 1 else []
    folder = next((each for each in (path, *named) if (each / FILE).is_file()), None)
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
        events = read_flight(folder / FLIGHT / "rank-00000.jsonl")
        names = [path.name for path in (folder / CHECKPOINTS).glob("*")]
        samples = read_samples(folder, notes)
    except OSError as error:
        file = error.filename or folder
        raise ExperimentError(f"{file} cannot be read: {error.strerror}; name a run that you may read") from None
    visits, spent = history(events), account(events)
    if not visits:
        notes.append(f"There is no {FLIGHT}/rank-00000.jsonl: resumes and stops of the run are unknown.")
    return Run(
        name,
        rows,
        visits,
        toml,
        _settings(toml, notes),
        sorted(int(step) for step in names if step.isdecimal() and len(step) < 19),
        notes,
        samples=samples,
        goodput=spent.words() if spent.visits else None,
    )


def _rows(file: Path, notes: list[str]) -> list[dict[str, float]]:
    if not file.exists():
        notes.append(f"There is no {JSONL}: no step was logged.")
        return []
    try:
        rows = read(file)
    except ValueError as error:
        notes.append(f"{error}.")
        return []
    if not rows:
        notes.append("No step was logged.")
    return rows


def _settings(toml: str, notes: list[str]) -> dict[str, str]:
    try:
        return dict(_flat(parse(toml)))
    except ValueError as error:
        notes.append(f"{FILE} {error}.")
        return {}


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in table.items():
        key = f"{prefix}{toml_key(name)}"
        flat += _flat(value, f"{key}.") if isinstance(value, dict) and value else [(key, toml_value(value))]
    return flat
