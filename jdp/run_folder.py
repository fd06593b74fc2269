"""The folder of a run: RUNS/NAME, which belongs to one experiment.

`claim` makes it, or finds that it holds the same experiment and may be resumed; `record` writes the experiment down
when a visit goes on with it. What may change between visits is how the work is done: devices, mesh, strategy,
precision, microbatches, how often to log and save, and, where the learning rate does not depend on it, how many steps.
"""

import tomllib
from pathlib import Path
from typing import Any

import jax

from jdp.experiment import ExperimentError, to_toml
from jdp.schema import Experiment

FILE = "experiment.toml"
MAY_CHANGE = frozenset(("strategy", "partitioning", "precision", "devices", "mesh", "sample", "train"))
"""Keys and tables that may differ when a run is resumed, except `train.batch_size`, and `train.steps` if the learning
rate's schedule runs over them."""


def claim(experiment: Experiment, runs: Path) -> Path:
    """Return the run's folder, made and marked as this experiment's if it is new. Only process 0 writes.

    Raises:
        ExperimentError: the folder holds something else, or a run of another experiment; nothing was changed.
    """
    folder = runs / experiment.name
    if jax.process_index() != 0:
        return folder
    file = folder / FILE
    if file.exists():
        _check_same(experiment, file)
        return folder
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(
            f"{folder} is a file, where the run's folder should be: choose another `name` or --run-dir"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder} is not empty and has no {FILE}, so it is not a run of jdp's: choose another `name` or --run-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record(experiment, folder)
    except OSError as error:
        raise ExperimentError(f"{folder} cannot be written: {error.strerror}; choose another --run-dir") from None
    return folder


def record(experiment: Experiment, folder: Path) -> None:
    """Write the experiment, as resolved, into its folder. The new file replaces an old one in one move."""
    if jax.process_index() == 0:
        fresh = folder / f"{FILE}.new"
        fresh.write_text(to_toml(experiment), encoding="utf-8")
        fresh.replace(folder / FILE)


def _check_same(experiment: Experiment, file: Path) -> None:
    """Compare with what the folder was made for, key by key."""
    try:
        before = _flat(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExperimentError(
            f"{file} cannot be read, so it is unknown whose run this is ({error}): choose another `name` or --run-dir"
        ) from None
    now = _flat(tomllib.loads(to_toml(experiment)))
    kept = {"train.batch_size"} | ({"train.steps"} if experiment.optimizer.schedule != "constant" else set[str]())
    differing = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and (key in kept or key.partition(".")[0] not in MAY_CHANGE)
    ]
    if differing:
        raise ExperimentError(
            f"{file.parent} holds a run of another experiment ({'; '.join(differing)}): choose another `name` "
            "(--name NEW) or --run-dir, or remove that folder"
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
