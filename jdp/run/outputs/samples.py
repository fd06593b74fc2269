"""The files samples/STEP.jsonl with a run's text, [sample]: a row for each prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

SAMPLES = "samples"


def write(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the texts of a step into a run's folder, completely or not at all; process 0 only."""
    if not rows or jax.process_index() != 0:
        return
    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    file = folder / SAMPLES / f"{step}.jsonl"
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    fresh.replace(file)


def read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return a run's samples by step. Damaged rows are left out and reported in `notes`."""
    rows: list[dict[str, Any]] = []
    for file in sorted((folder / SAMPLES).glob("*.jsonl"), key=lambda file: (len(file.name), file.name)):
        lines = [line for line in file.read_bytes().decode(errors="replace").split("\n") if line]
        good = [row for row in map(_row, lines) if row is not None]
        if len(good) < len(lines):
            notes.append(f"{len(lines) - len(good):,} of {len(lines):,} rows of {file.name} are damaged and left out.")
        rows += good
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    kinds = {"step": int, "prompt": str, "text": str}
    if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
        return None
    return {name: row[name] for name in kinds}
