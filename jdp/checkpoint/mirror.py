"""A mirror of a directory of checkpoints in object storage: s3://bucket/run, gs://…, any storage of fsspec.

A thread of process 0 uploads committed checkpoints, and deletes copies that the directory's policy does not keep. The
commit file is uploaded last and deleted first, so a partial copy never counts. A start downloads the newest copy if it
is newer than the local checkpoints. Before its first save no other copies are deleted: it may only read, or be refused.
"""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.base.user_path import bucket_address
from jdp.checkpoint.errors import HOURS, CheckpointError, retried
from jdp.checkpoint.stored import COMMITTED, DESCRIPTION, read_metrics, verify
from jdp.checkpoint.upkeep import ABANDONED, DAMAGED, Retention, committed_steps, set_damaged_aside
from jdp.core.cluster.barrier import from_first_process

LOOK_SECONDS = 1.0  # between two looks at the directory
LAST_SECONDS = 600.0  # how long `close` waits for the last uploads


class Mirror:
    """The copies of a directory's checkpoints. Failures of the storage are reported, and never end a run."""

    def __init__(self, address: str, directory: Path, retention: Retention) -> None:
        self._address, self._directory, self._retention = bucket_address(address), directory, retention
        self._say: Callable[[str], None] = lambda message: notice(f"mirror {self._address}: {message}")
        self.sending: int | None = None  # the step that must stay local until it is uploaded
        self._known = {*committed_steps(directory)}  # steps that are or were local
        self._ended, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="jdp mirror", daemon=True)
        problem = self._start() if jax.process_index() == 0 else ""
        if problem := from_first_process("what it fetched from the mirror", problem, seconds=HOURS):
            raise CheckpointError(problem)

    def close(self) -> None:
        """Wait for the last uploads, at most `LAST_SECONDS`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            self._given_up.set()
            self._say(f"the last checkpoints were not uploaded; they are in {self._directory}")

    def _start(self) -> str:
        """Open the storage and fetch; return the problem that keeps a run from starting."""
        import fsspec  # late: only mirrors need it

        final = FileNotFoundError, PermissionError, ImportError, ValueError
        credentials = "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"

        def passes(error: Exception) -> bool:
            return not (self._known or isinstance(error, final) or type(error).__name__ in credentials)

        try:
            self._fs, self._root = fsspec.core.url_to_fs(self._address, use_listings_cache=False)
            retried(self._fetch, passes=passes, say=self._say)
        except Exception as error:
            if not self._known or not hasattr(self, "_fs"):
                fix = "fix that (pip install 'jdp[s3]' or 'jdp[gcs]'?), or remove the mirror"
                return f"a mirror must be readable; {self._address} is not: {error!r}; {fix}"
            self._say(f"it cannot be read ({error!r}); using the checkpoints in {self._directory}")
        self._opened = self._here()
        self._thread.start()
        return ""

    def _fetch(self, _: bool) -> None:
        """Fetch the newest complete checkpoint if it is newer than the local ones, whole or not at all.

        Copies of checkpoints that this directory has abandoned are skipped, and deleted later.
        """
        files, fresh, newest = self._files(), self._directory / ".fetched", max(self._known, default=-1)
        abandoned = {file.read_bytes() for file in self._directory.glob(f"{ABANDONED}*/*/{COMMITTED}")}
        newer = {step for step in files if step > newest and COMMITTED in files[step]}
        gone = {step for step in newer if abandoned and self._fs.cat_file(*self._paths(step, [COMMITTED])) in abandoned}
        for step in sorted(newer - gone, reverse=True):
            shutil.rmtree(fresh, ignore_errors=True)
            self._fs.get(self._paths(step, files[step]), [str(fresh / name) for name in files[step]])
            if problem := verify(fresh):
                self._say(f"checkpoint {step} is damaged ({problem}) and is skipped")
                continue
            if (self._directory / str(step)).exists():  # partial or damaged
                set_damaged_aside(self._directory, step)
            fresh.rename(self._directory / str(step))
            self._say(f"fetched checkpoint {step}")
            break
        shutil.rmtree(fresh, ignore_errors=True)
        self._known |= gone

    def _follow(self) -> None:
        """Copy committed checkpoints, until `close` is called and all are done."""
        done = dict[int, bytes]()
        while not self._given_up.is_set():
            ended = self._ended.wait(LOOK_SECONDS)
            with contextlib.suppress(Exception):  # any kind: it was reported, and the run goes on
                if self._here() != done:
                    done = retried(self._update, passes=lambda _: not self._given_up.is_set(), say=self._say)
                elif ended:
                    return

    def _here(self) -> dict[int, bytes]:
        return {n: (self._directory / f"{n}/{COMMITTED}").read_bytes() for n in committed_steps(self._directory)}

    def _update(self, _: bool) -> dict[int, bytes]:
        """Upload missing checkpoints, newest first; delete those that the policy drops. Return the local ones."""
        here = self._here()
        self._known |= here.keys()
        files, newest = self._files(), max(here, default=-1)
        there = {step: self._fs.cat_file(*self._paths(step, [COMMITTED])) for step in files if COMMITTED in files[step]}
        steps = sorted({*here, *(step for step in there if step < newest)})
        kept = self._retention.kept({step: self._metrics(step) for step in steps})
        for step in sorted((step for step in kept & here.keys() if there.get(step) != here[step]), reverse=True):
            self._send(step, files.get(step, ()))
        self.sending = None
        own = {step for step in self._known - here.keys() if not (self._directory / f"{DAMAGED}{step}").exists()}
        for step in files.keys() - kept:  # later ones are another machine's; a start fetches a damaged one again
            if step in own or (step < newest and here != self._opened):
                self._remove(step, files[step])
        return here

    def _send(self, step: int, old: Iterable[str]) -> None:
        """Upload a checkpoint in place of `old` files."""
        folder, self.sending = self._directory / str(step), step
        self._remove(step, old)
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        commit = files.pop(COMMITTED)
        self._fs.put([*map(str, files.values())], self._paths(step, files))
        there = self._files().get(step, {})
        if lacking := [name for name, file in files.items() if there.get(name) != file.stat().st_size]:
            raise OSError(f"{lacking[0]} of checkpoint {step} did not arrive complete")
        self._fs.put([str(commit)], self._paths(step, [COMMITTED]))

    def _remove(self, step: int, names: Iterable[str]) -> None:
        for some in filter(None, ({COMMITTED} & {*names}, {*names} - {COMMITTED})):
            with contextlib.suppress(FileNotFoundError):  # an earlier try has removed them
                self._fs.rm(self._paths(step, some))

    def _files(self) -> dict[int, dict[str, int]]:
        """Return the files of all copies: step -> name -> bytes, without names that lead out of their folder."""
        files: dict[int, dict[str, int]] = {}
        for path, found in self._fs.find(self._root, detail=True).items():
            step, *parts = path.removeprefix(f"{self._root}/").split("/")
            if parts and step.isdecimal() and step == str(int(step)) and not {"", ".", ".."} & {*parts}:
                files.setdefault(int(step), {})["/".join(parts)] = found["size"]
        return files

    def _metrics(self, step: int) -> Any:
        if (self._directory / str(step)).exists():
            return read_metrics(self._directory / str(step))
        return json.loads(self._fs.cat_file(*self._paths(step, [DESCRIPTION])))["metrics"]

    def _paths(self, step: int, names: Iterable[str]) -> list[str]:
        return [f"{self._root}/{step}/{name}" for name in names]
