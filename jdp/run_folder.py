"""The folder of a run: RUNS/NAME, which belongs to one experiment.

`claim` makes it, or finds that it holds the same experiment and may be resumed; `record` writes the experiment down
when a visit goes on with it. What may change between visits is how the work is done: devices, mesh, rules, strategy,
precision, microbatches, what to evaluate, how often to log and save, when to stop early, and, where the learning rate
does not depend on it, how many steps. What is learnt may not: the model, the data, the optimizer, what is trained and
where it started. `writing` is around everything a run writes: a disk that is full or read-only is one error.
"""

import contextlib
import errno
import json
import shutil
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdp.experiment import ExperimentError, to_toml
from jdp.metrics import EVENTS, JSONL
from jdp.schema import Experiment

FILE = "experiment.toml"
NEW = f"{FILE}.new"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
"""What `jdp train` says at the end, of a run that came to its end."""
MAY_CHANGE = frozenset(
    ("strategy", "partitioning", "precision", "devices", "mesh", "rules", "eval", "sample", "track", "train")
)
"""Keys and tables that may differ when a run is resumed, except `FIXED`, and `train.steps` if the learning rate's
schedule runs over them."""
FIXED = frozenset(("train.batch_size", "train.wrt", "train.init_from", "train.init_names"))
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)
"""What a disk says that takes no more; other errors of the system are not about writing."""


def claim(experiment: Experiment, runs: Path) -> Path:
    """Return the run's folder, made and marked as this experiment's if it is new. Only process 0 writes, and the others
    wait for it: whoever comes later may make folders of its own in there.

    Raises:
        ExperimentError: the folder holds something else, or a run of another experiment; nothing was changed.
    """
    folder = runs / experiment.name
    if jax.process_index() == 0:
        _claim(experiment, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"{experiment.name} is claimed")
    return folder


@contextlib.contextmanager
def claimed(experiment: Experiment, runs: Path) -> Generator[Path]:
    """`claim`, for a visit: one that made the folder and fails before there is a row of metrics or a checkpoint in it
    (weights that do not fit, memory that does not suffice) removes it, or the corrected command would find a run of
    another experiment.

    The next visit could take such a folder over instead, which would serve a run that was killed too. But a run that is
    alive looks the same while it compiles, and then two would write into one folder: no lock that says whose it is
    holds on every shared file system.
    """
    fresh = jax.process_index() == 0 and not (runs / experiment.name / FILE).exists()
    folder = claim(experiment, runs)
    try:
        yield folder
    except BaseException:
        if fresh:
            _discard_unused(folder)
        raise


def _discard_unused(folder: Path) -> None:
    """Remove a run's folder that holds nothing but what a visit begins with."""
    empty = [folder / JSONL, folder / CHECKPOINTS]
    files = [folder / FILE, folder / NEW, *folder.glob(f"{EVENTS}.out.tfevents.*")]
    with contextlib.suppress(OSError):
        if set(folder.iterdir()) - {*empty, *files} or any(map(_holds_something, empty)):
            return
        for file in (folder / JSONL, *reversed(files)):  # its mark last: what is left after a crash is still a run's
            file.unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        folder.rmdir()


def _holds_something(path: Path) -> bool:
    """Whether it is a file with something in it, or a folder with a folder in it, as a checkpoint is."""
    return any(part.is_dir() for part in path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def _claim(experiment: Experiment, folder: Path) -> None:
    if (folder / FILE).exists():
        return check_same(experiment, folder)
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
        with contextlib.suppress(OSError):
            (folder / NEW).unlink(missing_ok=True)  # what is half written would make it somebody's folder
            folder.rmdir()
        raise ExperimentError(f"{folder} cannot be written: {error.strerror}; choose another --run-dir") from None
    return None


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Turns a failure to write below `folder` into one error that says so. (Checkpoints have their own.)

    Raises:
        ExperimentError: the disk is full, read-only or failing.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename and not Path(str(error.filename)).absolute().is_relative_to(folder.absolute())
        if error.errno not in _DISK or elsewhere:
            raise
        raise ExperimentError(
            f"{folder} cannot be written: {error.strerror}; the checkpoints in it are whole: make room, or choose "
            "another --run-dir, and run again to resume"
        ) from error


def record(experiment: Experiment, folder: Path) -> None:
    """Write the experiment, as resolved, into its folder. The new file replaces an old one in one move."""
    if jax.process_index() == 0:
        fresh = folder / NEW
        fresh.write_text(to_toml(experiment), encoding="utf-8")
        fresh.replace(folder / FILE)


def record_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Write the summary of a finished run into its folder, in one move."""
    if jax.process_index() == 0:
        fresh = folder / f"{SUMMARY}.new"
        fresh.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        fresh.replace(folder / SUMMARY)


def check_same(experiment: Experiment, folder: Path) -> None:
    """Compare with what the folder was made for, key by key. A folder that is no run's yet is nothing to compare with.

    Raises:
        ExperimentError: it holds a run of another experiment.
    """
    file = folder / FILE
    if not file.exists():
        return
    try:
        before = _flat(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExperimentError(
            f"{file} cannot be read, so it is unknown whose run this is ({error}): choose another `name` or --run-dir"
        ) from None
    now = _flat(tomllib.loads(to_toml(experiment)))
    kept = FIXED | ({"train.steps"} if experiment.optimizer.schedule != "constant" else set[str]())
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
