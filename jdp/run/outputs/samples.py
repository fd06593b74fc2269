"""The files samples/STEP.jsonl of a run's text, [sample]: a row for each prompt."""

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
