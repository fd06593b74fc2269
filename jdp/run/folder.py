"""The folder of a run: RUNS/NAME, which belongs to one experiment.

A visit is a process, or cluster, that works on the run. `claimed` makes the folder, or checks that it has the same
experiment and may be resumed, and locks it; `Claim.check` restores deleted files of the claim. `record` writes the
experiment into it. `writing` turns a full or read-only disk into one error; after the first step `passing_trouble` maps
temporary errors to the exit code "run again".

Between visits the way of computing may change (`MAY_CHANGE`): devices, strategy, precision, evaluations, logging. The
number of steps may change if the learning rate does not depend on it. The model, the data, the optimizer, and the
trained parameters with their initial weights may not change. Names and paths may (`PLACES`): the run's folder, the data
or the base model may be moved.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.base.errors import UserError
from jdp.base.notices import warn
from jdp.base.user_path import address_of
from jdp.checkpoint.errors import is_passing
from jdp.core.cluster.barrier import meet
from jdp.experiment.file import ExperimentError, from_table
from jdp.experiment.schema.fields import NONE
from jdp.experiment.schema.model import HF
from jdp.guard.diagnosis import LOGS
from jdp.guard.flight_recorder import FLIGHT
from jdp.run.outputs.metrics import EVENTS, JSONL
from jdp.run.signals import TRY_AGAIN

FILE = "experiment.toml"
NEW = f"{FILE}.new"
LOCK = ".lock"
CHECKPOINTS, EXPORT = "checkpoints", "export"
EXPORTED = f"{EXPORT}/jdp.json"
"""The file that marks a run's export, with its step."""
SUMMARY = "summary.json"
"""The summary of a finished run."""
MAY_CHANGE = {
    *("plugin", "strategy", "offload", "partitioning", "precision", "reduce", "wire", "buckets", "compiler"),
    *(
        "devices",
        "mesh",
        "rules",
        "eval",
        "sample",
        "guard",
        "train",
        "model.attention",
        "model.remat",
    ),
}
"""Keys and tables that may differ when a run is resumed, except `FIXED`, and except `train.steps` if the learning rate
depends on it."""
PLACES = re.compile(r"name|data\.(source|heldout|tokenizer)|data\.mixture\..*\.source")
"""More keys that may differ: the samples at these places are compared by their fingerprint."""
INITIAL = ("train.init_from",)
"""Keys of weights that are read only at a run's start: they may differ if the old path is gone."""
FIXED = frozenset(("train.wrt", *INITIAL))
_HAS_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)
"""Errors of a disk that cannot be written; other system errors are not about writing."""


class Claim:
    """A visit's claim on its folder: the experiment in it, and its lock (None: another process has it, or no lock)."""

    def __init__(self, folder: Path, toml: str) -> None:
        self.folder = folder
        self.lock: Lock | None = None
        self._toml = toml

    def check(self) -> None:
        """Claim the folder again if it, its lock or its experiment was deleted. Raises ExperimentError."""
        if self.lock is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.check()
        if jax.process_index() == 0 and not (self.folder / FILE).exists():
            record(self._toml, self.folder)
            warn(f"{self.folder / FILE} was deleted during the run: it is written again")


@contextlib.contextmanager
def claimed(folder: Path, toml: str) -> Generator[Claim]:
    """Make the folder of the experiment `toml`, or check that it may be resumed; keep other runs out while in `with`.

    Only process 0 writes; the others wait for it.

    A folder without a logged or saved step belongs to no run. A visit that fails earlier (weights that do not fit, too
    little memory) removes it. If a visit is killed earlier, the next visit takes the folder over, even for another
    experiment, so that a corrected command works.
    """
    with contextlib.ExitStack() as held:
        claim = Claim(folder, toml)
        fresh = jax.process_index() == 0 and _claim(claim, toml, held)
        meet(f"the folder of {folder.name}, which process 0 claims")
        try:
            yield claim
        except BaseException:
            if fresh:
                _discard_unused(folder)
            raise


def _claim(claim: Claim, toml: str, held: contextlib.ExitStack) -> bool:
    """Lock the folder and write the experiment into it; return True if it was new. Raises ExperimentError."""
    folder = claim.folder
    missing = list(itertools.takewhile(lambda path: not os.path.lexists(path), (folder, *folder.parents)))
    try:
        _check_free(folder, toml)
        folder.mkdir(parents=True, exist_ok=True)
        claim.lock = held.enter_context(locked(folder))
        _check_free(folder, toml)  # again, now that no other process changes it
        if not _is_unused(folder):
            return False
        if (folder / FILE).exists() and (differing := _differences(folder, toml)):
            if claim.lock is None:  # without locks, the earlier visit may still run
                raise ExperimentError(_other_experiment(folder, toml, differing))
            warn(
                f"{folder} was left before its first step was logged or saved, by a run of another experiment "
                f"({'; '.join(differing)}): it is taken over"
            )
            _forget_visits(folder)
        record(toml, folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / NEW).unlink(missing_ok=True)  # a half-written file would count as a user's
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


def _check_free(folder: Path, toml: str) -> None:
    """Raise ExperimentError if the folder is not this experiment's, unused or missing."""
    if (folder / FILE).exists():
        return check_same(folder, toml)
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"a run needs a folder; {folder} is a file: choose another `name` or --run-dir")
    if folder.exists() and not _is_unused(folder):
        raise ExperimentError(
            f"a run needs its own folder; {folder} is not empty and has no {FILE}: choose another `name` or --run-dir"
        )
    return None


def _is_unused(folder: Path) -> bool:
    """Return True if it has only the files of a visit's start: no row of metrics, no checkpoint, no other file."""
    empty = {folder / JSONL, folder / CHECKPOINTS}
    known = {*empty, *_files(folder), folder / FLIGHT, folder / LOGS}
    return not set(folder.iterdir()) - known and not any(map(_holds_something, empty))


def _files(folder: Path) -> list[Path]:
    """Return the files of a visit's start, in the order of removal: the files that mark a run's folder come last."""
    events = folder.glob(f"{EVENTS}.out.tfevents.*")
    return [folder / NEW, *events, folder / FILE, folder / LOCK]


def _discard_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not _is_unused(folder):
            return
        (folder / JSONL).unlink(missing_ok=True)
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        _forget_visits(folder)
        for file in _files(folder):
            file.unlink(missing_ok=True)
        if (folder / FLIGHT).exists():
            (folder / FLIGHT).rmdir()
        folder.rmdir()


def _forget_visits(folder: Path) -> None:
    for file in (folder / FLIGHT).glob("rank-*.jsonl"):
        file.unlink(missing_ok=True)


def _holds_something(path: Path) -> bool:
    """Return True for a file or folder that is not empty."""
    if path.is_dir():
        return any(path.iterdir())
    return os.path.lexists(path) and path.lstat().st_size > 0


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Turn a failure to write below `folder` into one error. (Checkpoints have their own error.)"""
    try:
        yield
    except OSError as error:
        elsewhere = error.filename and not Path(str(error.filename)).absolute().is_relative_to(folder.absolute())
        if error.errno not in _DISK or elsewhere:
            raise
        raise ExperimentError(
            f"{folder} cannot be written: {error.strerror}; the checkpoints in it are complete: make room, or choose "
            "another --run-dir, and run again to resume"
        ) from error


class RunAgain(UserError):
    """A temporary disk error that retries did not overcome."""

    exit_code = TRY_AGAIN


@contextlib.contextmanager
def passing_trouble(began: Callable[[], bool]) -> Generator[None]:
    """Exit with 75, "run again", for temporary errors after the run `began`; before, they are a user's mistake."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not (began() and is_passing(error)):
            raise
        raise RunAgain(f"{str(error).removesuffix('.')}; this may pass: run again to resume") from error


def record(toml: str, folder: Path) -> None:
    """Write the resolved experiment into its folder, in one rename."""
    _replace(folder / FILE, toml)


def record_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Write the summary of a finished run into its folder, in one rename."""
    _replace(folder / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def _replace(file: Path, text: str) -> None:
    if jax.process_index() == 0:
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)


def check_same(folder: Path, toml: str) -> None:
    """Compare an experiment, as TOML, with the one in a folder, key by key, unless the folder is unused."""
    begun = (folder / FILE).exists()
    if not begun or ((folder / LOCK).exists() and _is_unused(folder)):  # without the lock's file a run may be alive
        return
    if differing := _differences(folder, toml):
        raise ExperimentError(_other_experiment(folder, toml, differing))


def _differences(folder: Path, toml: str) -> list[str]:
    """Return the differences that may not occur between visits of a run. Raises ExperimentError."""
    constant = tomllib.loads(toml)["optimizer"]["schedule"] == "constant"
    kept = FIXED if constant else FIXED | {"train.steps"}
    return [
        f"{key} was {was!r}, is {now!r}"
        for key, (was, now) in changed(folder, toml).items()
        if (key in kept or not MAY_CHANGE & {key, key.partition(".")[0]}) and not _is_the_same(key, was, now)
    ]


def _is_the_same(key: str, was: Any, now: Any) -> bool:
    """Return True if two different values of a key train the same model."""
    if key == "model.scan":  # both store the same parameters
        return {was, now} == {True, "auto"}
    if key == "model.name":  # the fields are compared one by one
        return all(str(name).startswith(HF) for name in (was, now))
    if key in INITIAL and isinstance(was, str) and isinstance(now, str):
        moved = was != NONE and now != NONE and address_of(was) is None
        return moved and (not os.path.lexists(was) or Path(was).resolve() == Path(now).resolve())
    return PLACES.fullmatch(key) is not None


def changed(folder: Path, toml: str) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (recorded value, new value) for each difference; None for a missing key."""
    file, current = folder / FILE, tomllib.loads(toml)
    try:
        before = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExperimentError(
            f"{file} has the run's experiment, but cannot be read ({error}): choose another `name` or --run-dir"
        ) from None
    before, now = _flat(before), _flat(current)
    pairs = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    return {key: (was, is_now) for key, (was, is_now) in pairs.items() if was != is_now}


def _other_experiment(folder: Path, toml: str, differing: Sequence[str]) -> str:
    if [word.partition(" ")[0] for word in differing] == ["train.steps"]:
        return _other_course(folder, toml)
    return (
        f"{folder} holds a run of another experiment ({'; '.join(differing)}): choose another `name` (--name NEW) or "
        "--run-dir, or remove that folder"
    )


def _other_course(folder: Path, toml: str) -> str:
    """Return the message about another number of steps: its effect on the learning rate, and the fix."""
    from jdp.experiment.optimizer import learning_rate  # late: no other message needs optax

    text = (folder / FILE).read_text(encoding="utf-8")
    before, now = (from_table(table, plugin=table["plugin"]) for table in map(tomllib.loads, (text, toml)))
    saved = [int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    done = max(saved, default=0)
    was, new = (float(np.asarray(learning_rate(each)(done))) for each in (before, now))
    steps = before.train.steps
    return (
        f"optimizer.schedule = {now.optimizer.schedule!r} lowers the learning rate over train.steps, which was {steps} "
        f"in {folder}, is {now.train.steps}, and would change the rate of step {done + 1} from {was:.2e} to {new:.2e}: "
        f"restore train.steps = {steps}, or start a new run from its weights (--name NEW --train.init_from {folder})"
    )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


# The lock of a run's folder. The system releases an `flock` whenever its process ends, so no lock is ever stale.


class Lock:
    """The lock of a run's folder, while it is held."""

    def __init__(self, file: Path, handle: int) -> None:
        self._file, self._handle = file, handle

    def check(self) -> None:
        """Take the lock again if its file was deleted. Raises ExperimentError if another run has taken it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._handle), self._file.stat()):
                return
        try:
            handle = _take(self._file)
        except ExperimentError as error:
            raise ExperimentError(f"{self._file} was deleted during this run, which has ended: {error}") from None
        if handle is not None:
            os.close(self._handle)
            self._handle = handle
            warn(f"{self._file} was deleted during the run: the lock is taken again")

    def release(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # a process forked meanwhile also has the file open
        os.close(self._handle)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[Lock | None]:
    """Hold the lock of a run's folder; yield None if the file system has no locks."""
    handle = _take(folder / LOCK)
    if handle is None:
        warn(f"{folder} is on a file system without locks: a second run there is not detected")
        yield None
        return
    lock = Lock(folder / LOCK, handle)
    try:
        yield lock
    finally:
        lock.release()


def _take(file: Path) -> int | None:
    """Open and lock the file; None if the file system has no locks. Raises ExperimentError."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno in _HAS_NONE:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ExperimentError(
                f"a folder is for one run at a time; {file.parent} is in use by a run"
                f"{f', {holder}' if holder else ''}: wait for its end, or choose another `name` (--name NEW) or "
                "--run-dir"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), file.stat()):
                break
        os.close(handle)  # meanwhile its folder was removed, and perhaps made again
    with contextlib.suppress(OSError):  # on a full disk the file does not name its holder
        os.ftruncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return handle
