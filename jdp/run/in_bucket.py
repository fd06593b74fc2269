"""A run in a bucket: its folder is s3://bucket/runs/NAME, and a scratch folder of this host has a copy.

Process 0 fetches the files except checkpoints, which `jdp.Checkpoints` keeps there itself. It sends changed files
completely, as storage appends nothing: every `EVERY_SECONDS`, before each checkpoint counts, and at the end. A run that
is killed loses what it logged after its newest checkpoint in its last seconds, and does those steps again.

A file `.lock` in the bucket names the process that holds the run; it is renewed with the files. A lock is taken over if
its process on this host has ended; one of another host or container, if it was not renewed for `LEASE_SECONDS`. A run
that finds the lock to be another's stops, so two runs never write to one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from jdp.base.bucket import Remote, RemoteError
from jdp.base.notices import warn
from jdp.checkpoint.format.checksums import COMMITTED
from jdp.checkpoint.scratch import Scratch
from jdp.core.cluster.barrier import meet
from jdp.experiment.file import ExperimentError
from jdp.run.folder import CHECKPOINTS, EXPORT, EXPORTED, FILE, LOCK

EVERY_SECONDS, LEASE_SECONDS = 30.0, 180.0


class RemoteRun:
    """The folder of a run in a bucket (`remote`), and the scratch folder of this host with its copy (`folder`)."""

    def __init__(self, address: str, *, together: bool) -> None:
        self.remote = Remote.at(address)
        self._scratch = Scratch(self.remote.address, together=together)
        self.folder = self._scratch.folder
        self._sent: dict[str, tuple[int, int]] = {}
        self._busy, self._ended = threading.Lock(), threading.Event()
        self._token = ""
        self._problem: RemoteError | None = None

    def fetch(self) -> bool:
        """Download the run's files except checkpoints (each becomes an empty folder) and an export's weights.

        Return True if a run exists.

        In the copy of a folder that has no run, files are empty.
        """
        files = self.remote.files()
        parts = [name.split("/") for name in files]
        for step in {part[1] for part in parts if part[0] == CHECKPOINTS and part[2:] == [COMMITTED]}:
            (self.folder / CHECKPOINTS / step).mkdir(parents=True, exist_ok=True)
        large = (f"{CHECKPOINTS}/", f"{EXPORT}/model")
        names = [name for name in files if name != LOCK and not name.startswith(large)]
        if FILE in files:
            self.remote.fetch(names, self.folder)
        else:
            for top in {name.split("/")[0] for name in names}:
                (self.folder / top).touch()
        self._sent = self._files()
        return FILE in files

    def push(self) -> None:
        """Send the files that have changed, if the lock is still this process'."""
        with self._busy:
            if self._problem is not None:
                raise self._problem
            self._renew()
            now = self._files()
            changed = [name for name, seen in now.items() if self._sent.get(name) != seen]
            # With the first it is a run's folder, with the last it has an export.
            ends = ([FILE] if FILE in changed else [], [EXPORTED] if EXPORTED in changed else [])
            for names in (ends[0], [name for name in changed if name not in (FILE, EXPORTED)], ends[1]):
                self._send(names)
            self.remote.delete([name for name in self._sent if name not in now])
            self._sent = now

    def _send(self, names: list[str]) -> None:
        try:
            self.remote.send(names, self.folder)
        except RemoteError:
            left = [name for name in names if (self.folder / name).exists()]
            if left == names:
                raise
            self.remote.send(left, self.folder)  # one was renamed meanwhile

    def before_commit(self, checkpoint: Path) -> None:
        """Send the rows of the steps before a checkpoint, which counts next."""
        self.push()
        (self.folder / CHECKPOINTS / checkpoint.name).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Hold the lock; fetch the run's files, send them in the background and at the end."""
        self._take()
        sender = threading.Thread(target=self._send_now_and_then, name="jdp sender", daemon=True)
        try:
            self.fetch()
            sender.start()
            yield
        except BaseException:
            try:
                self._finish(sender)
            except RemoteError as error:
                warn(str(error))  # the exception that is being raised already matters more
            raise
        self._finish(sender)

    def _finish(self, sender: threading.Thread) -> None:
        """Send what is left, or remove what was sent of a discarded run, and release the lock."""
        self._ended.set()
        try:
            if sender.ident is not None:  # it was started; else the copy may be half-fetched
                sender.join()
                self.push()
        except Exception as error:
            kept = self._scratch.keep()
            raise RemoteError(f"{self._in_words(error)}; what was not sent is kept in {kept}") from error
        finally:
            with contextlib.suppress(RemoteError):
                if self._is_mine(self.remote.read(LOCK)):
                    self.remote.delete([LOCK])

    def _send_now_and_then(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            try:
                self.push()
            except Exception as error:  # of any kind: the thread must go on
                warn(f"{self._in_words(error)}; it is tried again")

    def _in_words(self, error: Exception) -> str:
        if isinstance(error, RemoteError):
            return str(error)
        return f"files must be sent while a run goes on; {self.remote.address} was not: {type(error).__name__}: {error}"

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the files to send, each with its time of change and size."""
        files: dict[str, tuple[int, int]] = {}
        for parent, folders, names in os.walk(self.folder, onerror=_raise_unless_gone):
            if Path(parent) == self.folder:
                folders[:] = [name for name in folders if name != CHECKPOINTS and not name.startswith(f".{EXPORT}")]
            for path in (Path(parent, name) for name in names if not name.endswith(".new")):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        seen = path.stat()
                        files[path.relative_to(self.folder).as_posix()] = seen.st_mtime_ns, seen.st_size
        files.pop(LOCK, None)
        return files

    # The lock.

    def _take(self) -> None:
        """Make the lock, or take over that of a run that has ended."""
        if (there := self.remote.read(LOCK)) is not None:
            self._wait_for_its_end(there)
        self._token = secrets.token_hex(8)
        held = self.remote.read(LOCK) is not None
        self.remote.write(LOCK, self._mine(), new=not held)
        if held:
            time.sleep(1)  # of two that take it over, the later one holds it
        if not self._is_mine(self.remote.read(LOCK)):
            raise ExperimentError(
                f"a folder is for one run at a time; {self.remote.address} was taken by another one just now: choose "
                "another `name` (--name NEW) or --run-dir"
            )

    def _wait_for_its_end(self, there: bytes) -> None:
        """Return when the run that holds this lock has ended: on another host, when it is no longer renewed."""
        holder, until = _parsed(there), time.monotonic() + LEASE_SECONDS
        lives, now = _lives(holder), there
        if lives is None:
            warn(
                f"{self.remote.address} has the lock of {holder.get('holder')}: it is taken over if that does not "
                f"renew it for {LEASE_SECONDS:.0f} s"
            )
        while lives is None and now is not None and time.monotonic() < until:
            time.sleep(EVERY_SECONDS / 10)
            now = self.remote.read(LOCK)
            lives = True if now not in (None, there) else None
        if lives:
            raise ExperimentError(
                f"a folder is for one run at a time; {self.remote.address} has a run that goes on, "
                f"{_parsed(now).get('holder')}: wait for its end, or choose another `name` (--name NEW) or --run-dir"
            )

    def _renew(self) -> None:
        """Renew the lock; raise RemoteError if another run holds it."""
        if not self._is_mine(self.remote.read(LOCK)):
            self._problem = RemoteError(
                f"a folder is for one run at a time; {self.remote.address} was taken over by another run, as this one "
                f"had not renewed its lock for {LEASE_SECONDS:.0f} seconds: end one of them"
            )
            raise self._problem
        self.remote.write(LOCK, self._mine())

    def _mine(self) -> bytes:
        here, pid = socket.gethostname(), os.getpid()
        holder = {"holder": f"process {pid} on {here}", "host": here, "within": within(), "pid": pid}
        return json.dumps(holder | {"token": self._token, "heard": time.time()}).encode()

    def _is_mine(self, lock: bytes | None) -> bool:
        """Return True if a lock is this run's, whenever it was renewed: the answer to a write may be lost."""
        return _parsed(lock).get("token") == self._token


@contextlib.contextmanager
def at_hand(root: Path | Remote, name: str) -> Generator[tuple[Path, RemoteRun | None]]:
    """Yield the run's folder on this host, and the run in a bucket whose copy it is (None: a run on a disk)."""
    if isinstance(root, Path):
        yield root / name, None
        return
    run = RemoteRun(f"{root.address}/{name}", together=True)
    with run.held() if jax.process_index() == 0 else contextlib.nullcontext():
        meet("the folder of a run, which process 0 fetches")
        yield run.folder, run


def fetched(address: str) -> Path:
    """Return a copy of a run's folder to read from, which is removed when this process ends."""
    run = RemoteRun(address, together=False)
    if not run.fetch():
        raise ExperimentError(f"a run is a folder with an {FILE}; given {run.remote.address}, which has none: fix it")
    _looked_at.append(run)
    return run.folder


_looked_at: list[RemoteRun] = []


def _parsed(lock: bytes | None) -> dict[str, Any]:
    """Return the table in a lock; {} for one that is damaged or gone."""
    try:
        found = json.loads(lock or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def within() -> str:
    """Return an identity of this host's boot and of a container's processes; "" outside Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _raise_unless_gone(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed: its files would be taken for deleted ones."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _lives(holder: dict[str, Any]) -> bool | None:
    """Return True if a lock's process lives; None for one of another host or container."""
    pid = holder.get("pid")
    if (holder.get("host"), holder.get("within")) != (socket.gethostname(), within()) or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return pid != os.getpid()  # equal: of a process that ended before this one got its number
