"""The folder of a run: RUNS/NAME, which belongs to one experiment.

`claim` makes it, or finds that it holds the same experiment and may be resumed. What a run costs - devices, strategy,
mesh, precision, number of steps, how often to log - may change between visits; what it computes may not.
"""

import tomllib
from pathlib import Path
from typing import Any

import jax

from jdp.experiment import ExperimentError, to_toml
from jdp.schema import Experiment

FILE = "experiment.toml"
MAY_CHANGE = frozenset(("strategy", "partitioning", "precision", "devices", "mesh", "sample", "train"))
"""Keys and tables that may differ when a run is resumed, except those in `MUST_STAY`."""
MUST_STAY = frozenset(("train.batch_size",))


def claim(experiment: Experiment, runs: Path) -> Path:
    """Return the run's folder, made and marked as this experiment's. Only process 0 writes.

    Raises:
        ExperimentError: the folder holds something else, or a run of another experiment; nothing was changed.
    """
    folder = runs / experiment.name
    if jax.process_index() != 0:
        return folder
    file = folder / FILE
    if file.exists():
        _check_same(experiment, file)
    elif folder.exists() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder} is not empty and has no {FILE}, so it is not a run of jdp's: choose another `name` or --run-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".toml.new")
    fresh.write_text(to_toml(experiment), encoding="utf-8")
    fresh.replace(file)
    return folder


def _check_same(experiment: Experiment, file: Path) -> None:
    """Compare with what the folder was made for, key by key."""
    before, now = _flat(tomllib.loads(file.read_text(encoding="utf-8"))), _flat(tomllib.loads(to_toml(experiment)))
    differing = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _may_change(key)
    ]
    if differing:
        raise ExperimentError(
            f"{file.parent} holds a run of another experiment ({'; '.join(differing)}): choose another `name` or "
            "--run-dir, or remove that folder"
        )


def _may_change(key: str) -> bool:
    return key.partition(".")[0] in MAY_CHANGE and key not in MUST_STAY


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
