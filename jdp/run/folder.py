"""The folder of a run: RUNS/NAME, which belongs to one experiment.

A visit is a process, or cluster, that works on the run. `claimed` makes the folder, or checks that it has the same
experiment and may be resumed, and locks it. Between visits the way of computing may change (`MAY_CHANGE`), and names
and paths (`PLACES`); the number of steps, if the learning rate does not depend on it. The model, the data, the
optimizer, and the trained parameters with their initial weights may not change.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
import tomllib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from jdp.base.errors import UserError
from jdp.base.notices import warn
from jdp.base.signals import TRY_AGAIN
from jdp.base.user_path import address_of
from jdp.checkpoint.errors import is_passing
from jdp.core.cluster.barrier import meet
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.fields import NONE
from jdp.experiment.schema.model import HF
from jdp.guard.diagnosis import LOGS
from jdp.launch.events import EVENT_LOGS, read
from jdp.run.metrics import EVENTS, JSONL, replace_file

FILE = "experiment.toml"
LOCK = ".lock"
CHECKPOINTS, EXPORT = "checkpoints", "export"
SUMMARY = "summary.json"
MAY_CHANGE = {
    *("plugin", "strategy", "offload", "partitioning", "precision", "reduce", "wire", "buckets", "compiler"),
    *("devices", "mesh", "rules", "eval", "sample", "guard", "train", "model.attention", "model.remat"),
}
"""Keys and tables that may differ when a run is resumed; `_may_differ` has the exceptions."""
PLACES = re.compile(r"name|data\.(source|heldout|tokenizer)|data\.mixture\..*\.source")
"""More keys that may differ: the samples at these places are compared by their fingerprint."""
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)
"""Errors of a disk that cannot be written; other system errors are not about writing."""


class Claim:
    """A visit's claim on its folder: the experiment in it, and its lock, held while in `with` by process 0.

    The system releases an `flock` whenever its process ends, so no lock is ever stale.
    """

    def __init__(self, folder: Path, toml: str = "") -> None:
        self.folder = folder
        self._toml = toml
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # a process forked meanwhile also has the file open
            os.close(self._handle)

    def lock(self) -> bool:
        """Lock the folder. Return False if the file system has no locks; raise ExperimentError if a run has it."""
        self._handle = _take(self.folder / LOCK)
        if self._handle is None:
            warn(f"{self.folder} is on a file system without locks: a second run there is not detected")
        return self._handle is not None

    def check(self) -> None:
        """Claim the folder again if it, its lock or its experiment was deleted. Raises ExperimentError."""
        if self._handle is not None and not _is_open(self._handle, file := self.folder / LOCK):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                again = _take(file)
            except ExperimentError as error:
                raise ExperimentError(f"{file} was deleted during this run, which has ended: {error}") from None
            os.close(self._handle)
            self._handle = again
            warn(f"{file} was deleted during the run: the lock is taken again")
        if jax.process_index() == 0 and not (self.folder / FILE).exists():
            record(self._toml, self.folder)
            warn(f"{self.folder / FILE} was deleted during the run: it is written again")


@contextlib.contextmanager
def claimed(folder: Path, toml: str) -> Generator[Claim]:
    """Make the folder of the experiment `toml`, or check that it may be resumed; keep other runs out while in `with`.

    Only process 0 writes; the others wait for it.

    A folder without a logged or saved step belongs to no run. A visit that fails before a step (weights that do not
    fit, too little memory) removes it. If a visit ends later or is killed, the next visit takes the folder over, even
    for another experiment, so that a corrected command works.
    """
    with Claim(folder, toml) as claim:
        fresh = jax.process_index() == 0 and _claim(claim, toml)
        meet(f"the folder of {folder.name}, which process 0 claims")
        try:
            yield claim
        except BaseException:
            events = read(folder / EVENT_LOGS / "rank-00000.jsonl") if fresh else []
            if fresh and not any(event["event"] == "step" for event in events):  # else `jdp why` reads them
                _discard_unused(folder)
            raise


def _claim(claim: Claim, toml: str) -> bool:
    """Lock the folder and write the experiment into it; return True if it was new. Raises ExperimentError."""
    folder = claim.folder
    try:
        check_same(folder, toml)
        folder.mkdir(parents=True, exist_ok=True)
        is_locked = claim.lock()
        check_same(folder, toml)  # again, now that no other process changes it
        if not _is_unused(folder):
            return False
        if (folder / FILE).exists() and (words := refused(changed(folder, toml), toml)):
            if not is_locked:  # the earlier visit may still run
                raise ExperimentError(_other_experiment(folder, toml, words))
            warn(
                f"{folder} was left before its first step was logged or saved, by a run of another experiment "
                f"({'; '.join(words)}): it is taken over"
            )
            for file in (folder / EVENT_LOGS).glob("rank-*.jsonl"):
                file.unlink()
        try:
            record(toml, folder)
        except OSError:
            _discard_unused(folder)
            raise
    except OSError as error:
        raise ExperimentError(
            f"{folder} cannot be written: {error.strerror}; choose another --run-dir"
            + (", or a shorter `name`" if error.errno == errno.ENAMETOOLONG else "")
        ) from None
    return True


def check_same(folder: Path, toml: str) -> None:
    """Raise ExperimentError if the folder is not this experiment's (compared key by key), unused or missing."""
    if (folder / FILE).exists():  # without the lock's file a run may be alive
        is_unused = (folder / LOCK).exists() and _is_unused(folder)
        if not is_unused and (words := refused(changed(folder, toml), toml)):
            raise ExperimentError(_other_experiment(folder, toml, words))
    elif folder.exists() and not folder.is_dir():
        raise ExperimentError(f"a run needs a folder; {folder} is a file: choose another `name` or --run-dir")
    elif folder.exists() and not _is_unused(folder):
        raise ExperimentError(
            f"a run needs its own folder; {folder} is not empty and has no {FILE}: choose another `name` or --run-dir"
        )


def _is_unused(folder: Path) -> bool:
    """Return True if it has only the files of a visit's start: no row of metrics, no checkpoint, no other file."""
    known = (FILE, f"{FILE}.new", LOCK, JSONL, CHECKPOINTS, EVENT_LOGS, LOGS)
    paths = {path.name: path for path in folder.iterdir() if not path.match(f"{EVENTS}.*tfevents.*")}
    rows, checkpoints = paths.get(JSONL), paths.get(CHECKPOINTS)
    has_rows = rows is not None and (not rows.is_file() or rows.stat().st_size > 0)
    has_checkpoints = checkpoints is not None and (not checkpoints.is_dir() or any(checkpoints.iterdir()))
    return not (has_rows or has_checkpoints) and paths.keys() <= {*known}


def _discard_unused(folder: Path) -> None:
    """Remove the files of a visit's start by name; logs, the batches of skipped steps and a user's files stay."""
    with contextlib.suppress(OSError):
        if not _is_unused(folder):
            return
        events, logs = folder.glob(f"{EVENTS}.*tfevents.*"), (folder / EVENT_LOGS).glob("rank-*.jsonl")
        names = (JSONL, f"{FILE}.new", FILE, LOCK)  # the files that mark a run's folder come last
        for file in (*events, *logs, *(folder / name for name in names)):
            file.unlink(missing_ok=True)
        for made in (folder / CHECKPOINTS, folder / EVENT_LOGS, folder):
            with contextlib.suppress(OSError):
                made.rmdir()


class RunAgain(UserError):
    """A temporary disk error that retries did not overcome."""

    exit_code = TRY_AGAIN


@contextlib.contextmanager
def disk_trouble(folder: Path, began: Callable[[], bool]) -> Generator[None]:
    """Turn a failure to write below `folder` into one error, with exit code 75 if it may pass after the run `began`.

    (Checkpoints have their own error.)
    """
    try:
        yield
    except (OSError, ValueError) as error:
        words: str | None = None
        if isinstance(error, OSError) and error.errno in _DISK:
            file = Path(str(error.filename or folder)).absolute()
            if file.is_relative_to(folder.absolute()):
                words = f"{folder} cannot be written: {error.strerror}; the checkpoints in it are complete"
        if began() and is_passing(error):
            message = (words or str(error)).removesuffix(".")
            raise RunAgain(f"{message}; this may pass: run again to resume") from error
        if words is None:
            raise
        raise ExperimentError(f"{words}: make room, or choose another --run-dir, and run again to resume") from error


def record(toml: str, folder: Path) -> None:
    """Write the resolved experiment into its folder, in one rename; process 0 only."""
    if jax.process_index() == 0:
        replace_file(folder / FILE, toml)


def refused(pairs: Mapping[str, tuple[Any, Any]], toml: str) -> list[str]:
    """Return the differences (of `differing`) from an experiment `toml` that may not occur between visits of a run."""
    constant = tomllib.loads(toml)["optimizer"]["schedule"] == "constant"
    return [
        f"{key} was {was!r}, is {now!r}"
        for key, (was, now) in pairs.items()
        if not (constant if key == "train.steps" else _may_differ(key, was, now))
    ]


def _may_differ(key: str, was: Any, now: Any) -> bool:
    """Return True if two values of a key may be of one run."""
    match key:
        case "train.wrt":
            return False
        case "model.name":  # the fields are compared one by one
            return all(str(name).startswith(HF) for name in (was, now))
        case "train.init_from":  # it is read only at a run's start; the old path may be gone
            if not isinstance(was, str) or not isinstance(now, str) or NONE in (was, now) or address_of(was):
                return False
            return not os.path.lexists(was) or Path(was).resolve() == Path(now).resolve()
        case _:
            return bool(MAY_CHANGE & {key, key.partition(".")[0]} or PLACES.fullmatch(key))


def changed(folder: Path, toml: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences of an experiment from the folder's. Raises ExperimentError."""
    file = folder / FILE
    try:
        return differing(file.read_text(encoding="utf-8"), toml)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExperimentError(
            f"{file} has the run's experiment, but cannot be read ({error}): choose another `name` or --run-dir"
        ) from None


def differing(before: str, toml: str) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (earlier value, new value) for each difference of two experiments; None: a missing key."""
    was, now = (flat(tomllib.loads(text)) for text in (before, toml))
    return {key: (was.get(key), now.get(key)) for key in sorted({*was, *now}) if was.get(key) != now.get(key)}


def _other_experiment(folder: Path, toml: str, words: list[str]) -> str:
    if [word.partition(" ")[0] for word in words] != ["train.steps"]:
        return (
            f"{folder} holds a run of another experiment ({'; '.join(words)}): choose another `name` (--name NEW) "
            "or --run-dir, or remove that folder"
        )
    was, now = changed(folder, toml)["train.steps"]
    return (
        f"optimizer.schedule = {tomllib.loads(toml)['optimizer']['schedule']!r} lowers the learning rate over "
        f"train.steps, which was {was} in {folder}, and is {now}: restore train.steps = {was}, or start a new run from "
        f"its weights (--name NEW --train.init_from {folder})"
    )


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a table and its subtables by dotted key."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def _is_open(handle: int, file: Path) -> bool:
    """Return True if `file` is still the file that `handle` has open."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), file.stat())
    return False


def _take(file: Path) -> int | None:
    """Open and lock the file; None if the file system has no locks. Raises ExperimentError."""
    handle = -1
    while handle < 0 or not _is_open(handle, file):
        if handle >= 0:
            os.close(handle)  # meanwhile its folder was removed, and perhaps made again
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno in _HAS_NO_LOCKS:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ExperimentError(
                f"a folder is for one run at a time; {file.parent} is in use by a run"
                f"{f', {holder}' if holder else ''}: wait for its end, or choose another `name` (--name NEW) or "
                "--run-dir"
            ) from None
    with contextlib.suppress(OSError):  # on a full disk the file does not name its holder
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return handle
