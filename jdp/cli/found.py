"""Reads the files of a run's evaluations and samples; what is damaged is left out, and noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jdp.cli.options import UsageError
from jdp.report.evaluations import Found
from jdp.run.outputs.evaluated import CONFUSION, DOCUMENTS, EVALUATIONS
from jdp.run.outputs.samples import SAMPLES

_DOCUMENT = {"document": int, "tokens": int}
_SAMPLE = {"step": int, "prompt": str, "text": str}


def read_found(folder: Path, notes: list[str]) -> Found:
    """Read a run's samples, and the files of its newest evaluation. Raises UsageError for one that may not be read."""
    try:
        return _read(folder, notes)
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} cannot be read: {error.strerror}; name a run that you may read"
        ) from None


def _read(folder: Path, notes: list[str]) -> Found:
    steps = [int(path.name) for path in (folder / EVALUATIONS).glob("*") if path.name.isdecimal() and path.is_dir()]
    step = max(steps, default=0)
    files = sorted((folder / EVALUATIONS / str(step)).glob("*"))
    confusion = {_set(file, CONFUSION): _confusion(file, notes) for file in files if file.name.endswith(CONFUSION)}
    documents = {
        _set(file, DOCUMENTS): _rows(file, _DOCUMENT, notes) for file in files if file.name.endswith(DOCUMENTS)
    }
    written = sorted((folder / SAMPLES).glob("*.jsonl"), key=lambda file: (len(file.name), file.name))
    samples = tuple(row for file in written for row in _rows(file, _SAMPLE, notes))
    return Found(step, {name: found for name, found in confusion.items() if found}, documents, samples)


def _set(file: Path, kind: str) -> str:
    return file.name.removesuffix(f"-{kind}")


def _rows(file: Path, kinds: dict[str, type], notes: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lines = [line for line in file.read_bytes().decode(errors="replace").split("\n") if line]
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
            rows.append({name: value for name, value in row.items() if name in kinds or _fits(name, value)})
    if len(rows) < len(lines):
        notes.append(f"{len(lines) - len(rows):,} of {len(lines):,} rows of {file.name} are damaged and left out.")
    return rows


def _fits(name: str, value: Any) -> bool:
    """Return whether the value of a key that may be missing is of its kind."""
    return isinstance(value, str) if name == "text" else isinstance(value, int | float) and not isinstance(value, bool)


def _confusion(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
        counts = [[int(number) for number in triple] for triple in found["counts"]]
        if all(len(triple) == 3 and min(triple) >= 0 for triple in counts):
            return {"classes": [str(name) for name in found["classes"]], "counts": counts}
    except (ValueError, TypeError, KeyError):
        pass
    notes.append(f"{file.name} is damaged and left out.")
    return {}
