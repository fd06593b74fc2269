"""The folder of a run: RUNS/NAME, which belongs to one experiment.

`claimed` makes it, or finds that it holds the same experiment and may be resumed, and keeps other runs out of it;
`record` writes the experiment down when a visit goes on with it. What may change between visits is how the work is
done: devices, mesh, rules, strategy, precision, microbatches, what to evaluate, how often to log and save, when to stop
early, and, where the learning rate does not depend on it, how many steps. What is learnt may not: the model, the data,
the optimizer, what is trained and where it started. `writing` is around everything a run writes: a disk that is full or
read-only is one error.
"""

import contextlib
import errno
import json
import os
import tomllib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdp.core.notices import notice
from jdp.experiment.file import ExperimentError, to_toml
from jdp.experiment.schema.experiment import Experiment
from jdp.run.lock import LOCK, locked
from jdp.run.outputs.metrics import EVENTS, JSONL

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


@contextlib.contextmanager
def claimed(experiment: Experiment, runs: Path) -> Generator[Path]:
    """The run's folder, for a visit: made and marked as this experiment's if it is new, and no other run's meanwhile.
    Only process 0 writes, and the others wait for it: whoever comes later may make folders of its own in there.

    A folder in which no step was logged or saved belongs to nobody: a visit that fails before (weights that do not fit,
    memory that does not suffice) removes it, and one that was killed before leaves it to the next, of whatever
    experiment, or the corrected command would find a run of another experiment.

    Raises:
        ExperimentError: the folder holds something else, or a run of another experiment, or one that goes on; nothing
            was changed.
    """
    folder = runs / experiment.name
    with contextlib.ExitStack() as held:
        fresh = jax.process_index() == 0 and _claim(experiment, folder, held)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"{experiment.name} is claimed")
        try:
            yield folder
        except BaseException:
            if fresh:
                _discard_unused(folder)
            raise


def _claim(experiment: Experiment, folder: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder and mark it as this experiment's; whether nothing was in it before."""
    missing = _missing(folder)
    try:
        _check_free(experiment, folder)
        folder.mkdir(parents=True, exist_ok=True)
        alone = held.enter_context(locked(folder))
        _check_free(experiment, folder)  # again: now nobody else changes it
        if not _is_unused(folder):
            return False
        if (folder / FILE).exists():
            _take_over(experiment, folder, alone=alone)
        record(experiment, folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / NEW).unlink(missing_ok=True)  # what is half written would make it somebody's folder
            if folder in missing:
                (folder / LOCK).unlink(missing_ok=True)
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise ExperimentError(
            f"{folder} cannot be written: {error.strerror}; choose another --run-dir"
            + (", or a shorter `name`" if error.errno == errno.ENAMETOOLONG else "")
        ) from None
    return True


def _check_free(experiment: Experiment, folder: Path) -> None:
    if (folder / FILE).exists():
        return check_same(experiment, folder)
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(
            f"{folder} is a file, where the run's folder should be: choose another `name` or --run-dir"
        )
    if folder.exists() and not _is_unused(folder):
        raise ExperimentError(
            f"{folder} is not empty and has no {FILE}, so it is not a run of jdp's: choose another `name` or --run-dir"
        )
    return None


def _take_over(experiment: Experiment, folder: Path, *, alone: bool) -> None:
    """A folder that another visit left before its first step. Where nothing is locked, that one may still be alive."""
    differing = _differences(experiment, folder)
    if differing and not alone:
        raise _other_experiment(folder, differing)
    if differing:
        notice(
            f"{folder} was left before its first step was logged or saved, by a run of another experiment "
            f"({'; '.join(differing)}): it is taken over"
        )


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that are still to be made, innermost first."""
    missing: list[Path] = []
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            break
        missing.append(path)
    return missing


def _is_unused(folder: Path) -> bool:
    """Whether there is nothing in it but what a visit begins with: no row of metrics, no checkpoint, nothing else."""
    empty = {folder / JSONL, folder / CHECKPOINTS}
    return not set(folder.iterdir()) - empty - set(_files(folder)) and not any(map(_holds_something, empty))


def _files(folder: Path) -> list[Path]:
    """What a visit begins with, its lock and its mark last: what is left after a crash is still a run's."""
    events = folder.glob(f"{EVENTS}.out.tfevents.*")
    return [folder / NEW, *events, folder / FILE, folder / LOCK]


def _discard_unused(folder: Path) -> None:
    """Remove a run's folder that holds nothing but what a visit begins with."""
    with contextlib.suppress(OSError):
        if not _is_unused(folder):
            return
        (folder / JSONL).unlink(missing_ok=True)
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        for file in _files(folder):
            file.unlink(missing_ok=True)
        folder.rmdir()


def _holds_something(path: Path) -> bool:
    """Whether it is a file or a folder with something in it."""
    if path.is_dir():
        return any(path.iterdir())
    return os.path.lexists(path) and path.lstat().st_size > 0


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
    """Compare with what the folder was made for, key by key. A folder in which no run took a step is nothing to compare
    with.

    Raises:
        ExperimentError: it holds a run of another experiment.
    """
    begun = (folder / FILE).exists()
    if not begun or ((folder / LOCK).exists() and _is_unused(folder)):  # without, a run that locks nothing may be alive
        return
    if differing := _differences(experiment, folder):
        raise _other_experiment(folder, differing)


def _differences(experiment: Experiment, folder: Path) -> list[str]:
    """What may not differ between the visits of a run and does."""
    file = folder / FILE
    try:
        before = _flat(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExperimentError(
            f"{file} cannot be read, so it is unknown whose run this is ({error}): choose another `name` or --run-dir"
        ) from None
    now = _flat(tomllib.loads(to_toml(experiment)))
    kept = FIXED | ({"train.steps"} if experiment.optimizer.schedule != "constant" else set[str]())
    return [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and (key in kept or key.partition(".")[0] not in MAY_CHANGE)
    ]


def _other_experiment(folder: Path, differing: Sequence[str]) -> ExperimentError:
    return ExperimentError(
        f"{folder} holds a run of another experiment ({'; '.join(differing)}): choose another `name` "
        "(--name NEW) or --run-dir, or remove that folder"
    )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
