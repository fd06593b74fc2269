"""Copies on this host of checkpoints in a bucket: of a directory such as s3://bucket/run, and of single ones.

Orbax 0.12 writes to Google's storage and to disks, not to S3; and checksums, damage and set-aside steps need folders
that can be renamed. So a checkpoint is written to a scratch folder of this host and sent from there, in the background,
its commit file last. A killed process thus leaves it complete or invisible in the bucket too.

The scratch folder has every checkpoint without its arrays (the files below `state`). When one is read, each process
fetches the blocks that hold its shards, and compares them with their checksums. The file of a block that is not here
has a hole there. A step that is renamed there (damaged or abandoned) is moved in the bucket, and one
that is deleted there is deleted. Its arrays leave the scratch folder when the next checkpoint is sent.

Each process writes a part of every checkpoint, so all must see one scratch folder: those of one host do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from jdp.base.bucket import Remote, RemoteError, Stored, place_of
from jdp.base.notices import shown
from jdp.checkpoint.errors import CheckpointError, DamagedError, on_first_process
from jdp.checkpoint.format import checksums, content
from jdp.checkpoint.format.checksums import COMMITTED, Blocks
from jdp.checkpoint.format.chunk_table import Partial, Range, Source
from jdp.checkpoint.scratch import Scratch
from jdp.checkpoint.upkeep import ownership
from jdp.core.cluster.barrier import meet

_T = TypeVar("_T")
_ARRAYS, _UNFINISHED = "state", ".unfinished"
_SENDINGS = 3
"""How often files are sent that do not arrive complete."""


class BucketCopies:
    """Checkpoints in a bucket, and the scratch folder of this host with their copies.

    Attributes:
        remote: the folder in the bucket.
        folder: the scratch folder.
        unfinished: steps that a killed process has left half-sent or half-deleted.
    """

    def __init__(self, remote: Remote, *, together: bool = True) -> None:
        self.remote = remote
        self.scratch = Scratch(self.remote.address, together=together)
        self.folder = self.scratch.folder
        self.unfinished: list[str] = []
        self._known: dict[tuple[int, bytes], str] = {}
        self.look()
        if together:
            meet("where each process has looked at a directory of checkpoints")

    def look(self) -> None:
        """Fetch every checkpoint that is not here yet, without its arrays; drop those that are gone."""
        with self.scratch.turn():
            files = self.remote.files()
            complete = _checkpoints(files)
            for folder in self._here():
                if folder not in complete:
                    shutil.rmtree(self.folder / folder)
            fresh = [folder for folder in complete if not (self.folder / folder / COMMITTED).exists()]
            small = [name for folder in fresh for name in _below(files, folder) if not _is_large(name, folder)]
            commits = [_in(folder, COMMITTED) for folder in fresh]
            self.remote.fetch([name for name in small if name not in commits], self.folder)
            self.remote.fetch(commits, self.folder)
            for folder in complete:
                (self.folder / folder / _ARRAYS).mkdir(exist_ok=True)
            self._look_at_others(files, complete)
            self._known = {_key(self.folder / folder): folder for folder in complete}

    def _look_at_others(self, files: Mapping[str, Stored], complete: Sequence[str]) -> None:
        """Make entries in the scratch folder for other names in the bucket that jdp gives itself, or refuses."""
        tops = {name.split("/")[0] for name in files}
        self.unfinished = sorted(name for name in tops - {*complete} if f"{name}/{_UNFINISHED}" in files)
        for name in tops - {*complete} - {*self.unfinished}:
            if name in files and name.isdecimal():
                (self.folder / name).touch()
            elif name.isdecimal() or name.startswith((ownership.ABANDONED, ownership.DAMAGED)):
                for entry in {each.split("/")[1] for each in _below(files, name)}:
                    (self.folder / name / entry).mkdir(parents=True, exist_ok=True)

    def _here(self) -> list[str]:
        """Return the paths of the checkpoints in the scratch folder."""
        found = [path.parent for depth in ("", "*/", "*/*/") for path in self.folder.glob(f"{depth}{COMMITTED}")]
        return [path.relative_to(self.folder).as_posix() for path in found if content.is_checkpoint(path)]

    def _partial(self, folder: Path, *, complete: bool = False) -> Partial | None:
        """Fetch a checkpoint but for the large files to fetch in parts; None if there are none.

        With `complete` these are only the files of which parts are here.
        """
        if not (folder / COMMITTED).exists():
            self.look()
        name = folder.relative_to(self.folder).as_posix()
        there = self.remote.files(_in(name, _ARRAYS))
        blocks = {
            file: each
            for file, each in checksums.block_table(folder).items()
            if (found := there.get(_in(name, file))) is not None and found.size == each.file
            if not complete or (folder / file).exists()
        }
        apart = {_in(name, file) for file in blocks}
        with self.scratch.turn():
            self.remote.fetch_missing({file: found for file, found in there.items() if file not in apart}, self.folder)

        def fetch(ranges: Iterable[Range]) -> None:
            parts: dict[str, list[tuple[int, int]]] = {}
            for each in ranges:
                parts.setdefault(f"{_ARRAYS}/{each.file}", []).append((each.offset, each.size))
            for file, some in parts.items():
                if file in blocks:
                    self._fetch_blocks(folder, file, blocks[file], some)

        return Partial({file: each.file for file, each in blocks.items()}, fetch) if blocks else None

    def _fetch_blocks(self, folder: Path, file: str, blocks: Blocks, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the blocks of a file that these ranges touch, as far as they are not here, and compare them."""
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if path.stat().st_size != blocks.file:
            os.truncate(path, blocks.file)
        missing = blocks.changed(path, blocks.of(ranges))
        spans = [(i * blocks.block, min((i + 1) * blocks.block, blocks.file)) for i in missing]
        self.remote.fetch_ranges(path.relative_to(self.folder).as_posix(), spans, path)
        if blocks.changed(path, missing):
            raise DamagedError(f"{folder} is damaged: {file} has changed.", f"{file} has changed")

    def read(self, folder: Path, fix: str, read: Callable[[Source], _T]) -> _T:
        """Read a checkpoint of which large files are fetched in parts."""
        try:
            return read(Source(folder, fix, self._partial(folder)))
        except DamagedError as error:
            if error.__cause__ is not None:
                self.fetched(folder)  # so that it can be told whether it is damaged, or cannot be read
            raise

    def fetched(self, folder: Path) -> Path:
        """Return the folder of a checkpoint after all of it was fetched."""
        partial = self._partial(folder, complete=True) or Partial({}, lambda ranges: None)
        for file, size in partial.files.items():
            with suppress(DamagedError):  # its reader finds it again
                partial.fetch([Range(file.removeprefix(f"{_ARRAYS}/"), 0, size)])
        return folder

    def send(self, folder: Path, first: Callable[[Path], None] | None) -> None:
        """Send a complete checkpoint, its commit file last; the copies of those before it lose their arrays.

        `first` is called with it before. What was not sent does not count here either.
        """
        name = folder.relative_to(self.folder).as_posix()
        try:
            if first is not None:
                first(folder)
            send(self.remote, folder, name)
        except BaseException:
            (folder / COMMITTED).unlink(missing_ok=True)
            raise
        for before in self._known.values():
            for path in (self.folder / before / _ARRAYS).glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._known[_key(folder)] = name

    def follow(self) -> None:
        """Move in the bucket what was renamed here: steps that are damaged or abandoned."""
        for name in self._here():
            key = _key(self.folder / name)
            was = self._known.get(key, name)
            if was != name:
                move(self.remote, was, name)
                self._known[key] = name

    def delete(self, names: Sequence[str]) -> None:
        """Delete checkpoints, or what there is of them, in the bucket."""
        self._known = {key: name for key, name in self._known.items() if name not in names}
        for name in names:
            delete(self.remote, name)


def send(remote: Remote, folder: Path, name: str) -> None:
    """Write a checkpoint below `name`, its commit file last; until then it is marked as unfinished.

    A file that did not arrive complete is sent again: a storage may be late with a deletion.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    remote.write(f"{name}/{_UNFINISHED}", b"")
    stale = {each.removeprefix(f"{name}/") for each in remote.files(name)} - {*names, _UNFINISHED}
    remote.delete([f"{name}/{each}" for each in sorted(stale)])
    lacking = sizes = {each: (folder / each).stat().st_size for each in names if each != COMMITTED}
    for _ in range(_SENDINGS):
        remote.send(list(lacking), folder, name)
        there = {each: stored.size for each, stored in remote.files(name).items()}
        lacking = {each: size for each, size in sizes.items() if there.get(f"{name}/{each}") != size}
        if not lacking:
            break
    for each, size in lacking.items():
        raise RemoteError(
            f"a file that is sent must arrive complete; {remote.address}/{name}/{each} does not have its {size:,} "
            "bytes: save again",
            passing=True,
        )
    remote.send([COMMITTED], folder, name)
    remote.delete([f"{name}/{_UNFINISHED}"])


def move(remote: Remote, source: str, target: str) -> None:
    """Move a checkpoint: its commit file is written last at the target, and deleted first at the source."""
    marks = [f"{target}/{_UNFINISHED}", f"{source}/{_UNFINISHED}"]
    files = [name for name in _ordered(remote.files(source), source) if name not in marks]
    for mark in marks:
        remote.write(mark, b"")
    remote.move([each.removeprefix(f"{source}/") for each in files], source, target)
    remote.delete(marks)


def delete(remote: Remote, name: str) -> None:
    """Delete a checkpoint, or what there is of it: its commit file first, its mark as unfinished last."""
    files = _ordered(remote.files(name), name)
    if not files:
        return
    remote.write(f"{name}/{_UNFINISHED}", b"")
    remote.delete(files[-1:])
    remote.delete([each for each in files[:-1] if each != f"{name}/{_UNFINISHED}"])
    remote.delete([f"{name}/{_UNFINISHED}"])


def read(remote: Remote, read: Callable[[BucketCopies], _T], *, together: bool = True) -> _T:
    """Read from the checkpoints in a folder of a bucket."""
    with named():
        return read(BucketCopies(remote, together=together))


def save(place: Remote, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Write one checkpoint to a bucket. With `overwrite` the one before is `.NAME.old` until it is there."""
    parent, _, name = place.address.rpartition("/")
    if parent.endswith("/"):
        raise CheckpointError(
            f"A checkpoint has a folder in its bucket; given {parent}/{name}. Write {parent}/{name}/NAME."
        )
    remote, scratch = Remote(parent), Scratch(f"{parent}/{name}", together=True)
    scratch.require_shared()
    on_first_process(lambda: _check_free(remote, name, overwrite))
    with named():
        write(scratch.folder)
    on_first_process(lambda: _replace(remote, name, scratch.folder))


def _check_free(remote: Remote, name: str, overwrite: bool) -> None:
    """Raise CheckpointError if there is something, except for a checkpoint to overwrite, or one half-written."""
    for place in (f".{name}.old", name):
        files = remote.files(place)
        if files and place not in _checkpoints(files) and f"{place}/{_UNFINISHED}" not in files:
            taken = f"{remote.address}/{place}"
            raise CheckpointError(
                f"{taken} is there already and is not a checkpoint, so it is left alone. Choose another."
            )
    if name in _checkpoints(remote.files(name)) and not overwrite:
        raise CheckpointError(
            f"{remote.address}/{name} holds a checkpoint already. Choose another path, or pass overwrite=True."
        )


def _replace(remote: Remote, name: str, folder: Path) -> None:
    """Send a checkpoint to its place; the one that was there is deleted after that."""
    old, files = f".{name}.old", remote.files(name)
    if name in _checkpoints(files):
        delete(remote, old)
        move(remote, name, old)
    send(remote, folder, name)
    delete(remote, old)


@contextmanager
def named() -> Generator[None]:
    """Make errors name the address in place of the scratch folder."""
    try:
        yield
    except CheckpointError as error:
        error.args = (shown(str(error)),)
        raise
    except RemoteError as error:
        raise CheckpointError(shown(str(error))) from error


@named()
def parsed(given: str | Path) -> Path | Remote:
    """Return the path that a user gave, absolute, or the folder in a bucket for an address."""
    place = place_of(given)
    return place.absolute() if isinstance(place, Path) else place


def _checkpoints(files: Iterable[str]) -> list[str]:
    """Return the folders of complete checkpoints among files; "." for one that is not in a folder."""
    parts = {(PurePosixPath(name).parent.parent.as_posix(), PurePosixPath(name).parent.name) for name in files}
    folders = {PurePosixPath(name).parent.as_posix() for name in files if PurePosixPath(name).name == COMMITTED}
    has = {folder: {name for parent, name in parts if parent == folder} for folder in folders}
    return sorted(folder for folder in folders if {"leaves", _ARRAYS} <= has[folder])


def _in(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder}/{name}"


def _below(files: Iterable[str], folder: str) -> list[str]:
    return [name for name in files if folder == "." or name.startswith(f"{folder}/")]


def _ordered(files: Iterable[str], folder: str) -> list[str]:
    """Return the files of a checkpoint, its commit file last."""
    return sorted(_below(files, folder), key=lambda name: (name == _in(folder, COMMITTED), name))


def _is_large(name: str, folder: str) -> bool:
    """Return True for arrays, which are fetched when a checkpoint is read, and for the mark, which never is."""
    return name.startswith(_in(folder, f"{_ARRAYS}/")) or name == _in(folder, _UNFINISHED)


def _key(folder: Path) -> tuple[int, bytes]:
    """Return an identity of a checkpoint that stays when its folder is renamed."""
    return folder.stat().st_ino, (folder / COMMITTED).read_bytes()
