"""A folder in a bucket, such as s3://bucket/run: its files, listed, read, written and copied to or from this machine.

fsspec does the work, with the package of each kind of storage (s3fs, gcsfs, adlfs), their credentials and retries. An
object store has no folders, no renaming and no appending. A file is complete or absent, so a marker file that is
written last makes a folder valid. Nothing is cached: every call asks the storage.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jdp.base.notices import notice_anywhere
from jdp.base.retrying import retried
from jdp.base.shorten import brief
from jdp.base.timer import call_after
from jdp.base.user_path import PathError, address_of, scheme_of, user_path

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PACKAGES = {"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "adl": "adlfs", "oss": "ossfs"}
_ON_THIS_MACHINE = ("file", "local", "memory")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_AT_ONCE = 1000
"""Files in one call."""
_RANGE, _RANGES = 2**23, 16
"""Bytes of one request for a part of a file, and requests at once."""
SILENT_SECONDS = 5.0
_T = TypeVar("_T")
_answered: set[str] = set()
"""Kinds of storage that have answered in this process."""


class RemoteError(PathError):
    """A bucket cannot be reached, read or written; the message has the rule, the address and the fix.

    Attributes:
        passing: True for trouble that may pass, such as a storage that does not answer.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True)
class Stored:
    """A file in a bucket: its size in bytes, and a tag that changes with its content."""

    size: int
    tag: str


@dataclass(frozen=True)
class Remote:
    """A folder in a bucket, which may not exist."""

    address: str  # of the folder, as `address_of` returns it

    @staticmethod
    def at(given: str | os.PathLike[str]) -> Remote:
        """Return the folder of an address that a user wrote, with its package imported."""
        address = address_of(given)
        if address is None:
            raise RemoteError(f"an address must begin with its kind, given {brief(str(given))}: s3://bucket/folder")
        scheme, rest = scheme_of(address), address.partition("://")[2]
        if scheme in _ON_THIS_MACHINE:
            raise RemoteError(
                f"an address must lead to storage that other machines reach, given {brief(address)}: {scheme}:// is on "
                "this one; write the folder itself"
            )
        if "://" not in address:
            fixed = f"{scheme}://{address.partition(':')[2]}"
            raise RemoteError(f"an address must have two slashes, given {brief(address)}: write {brief(fixed)}")
        if not rest or "\0" in rest:
            raise RemoteError(f"an address must name a bucket, given {brief(address)}: {scheme}://BUCKET/FOLDER")
        remote = Remote(address)
        _ = remote._opened
        return remote

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the path in it."""
        import fsspec

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs with a traceback what it also raises
        scheme = scheme_of(self.address)
        extra = _EXTRAS.get(scheme)
        try:
            with _waiting(self.address):
                return fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        except ImportError as error:
            package = f"'jdp[{extra}]'" if extra else _PACKAGES.get(scheme)
            fix = f"pip install {package}" if package else f"install what it needs ({error})"
            raise RemoteError(
                f"{scheme}:// needs a package that is not installed, given {brief(self.address)}: {fix}"
            ) from None
        except ValueError:
            raise RemoteError(
                f"an address must be of a kind that fsspec knows, given {brief(self.address)}: {scheme}:// is none; "
                "s3://, gs:// and az:// are some"
            ) from None
        except Exception as error:
            raise self._error("be opened", error) from error

    def files(self, below: str = "") -> dict[str, Stored]:
        """Return all files, sorted by their path in the folder."""
        fs, root = self._opened
        return self._stored(self._do("be listed", lambda: fs.find(f"{root}/{below}".rstrip("/"), detail=True)))

    def matching(self, pattern: str) -> dict[str, Stored]:
        """Return the files that a pattern matches (`**` for any depth), sorted by their path in the folder."""
        fs, root = self._opened
        return self._stored(self._do("be listed", lambda: fs.glob(f"{root}/{pattern}", detail=True)))

    def _stored(self, found: Mapping[str, Any]) -> dict[str, Stored]:
        prefix = f"{self._opened[1].rstrip('/')}/"
        files = {
            name.removeprefix(prefix): Stored(int(info.get("size") or 0), _tag(info))
            for name, info in found.items()
            if name.startswith(prefix) and not name.endswith("/") and info.get("type") == "file"
        }
        return {name: files[name] for name in sorted(files) if _is_safe(name)}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        fs, root = self._opened

        def read() -> bytes | None:
            try:
                return fs.cat_file(f"{root}/{name}")
            except FileNotFoundError:
                return None

        return self._do("be read", read)

    def write(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Write a small file; with `new` return False if it exists already."""
        fs, root = self._opened

        def write() -> bool:
            try:
                fs.pipe_file(f"{root}/{name}", content, mode="create" if new else "overwrite")
            except FileExistsError:
                return False
            return True

        return self._do("be written", write)

    def fetch(self, names: Sequence[str], folder: Path) -> None:
        """Copy these files to the same paths below a folder of this machine."""
        fs, root = self._opened
        for some in _pieces(names):
            for parent in {folder / PurePosixPath(name).parent for name in some}:
                parent.mkdir(parents=True, exist_ok=True)
            here, there = [str(folder / name) for name in some], [f"{root}/{name}" for name in some]
            self._do("be read", partial(fs.get, there, here))

    def fetch_missing(self, files: Mapping[str, Stored], folder: Path) -> None:
        """Copy the files that a folder of this machine lacks, or has in another size, and check what arrived."""
        self.fetch([name for name, stored in files.items() if not _has(folder / name, stored)], folder)
        for name, stored in files.items():
            if not _has(folder / name, stored):
                raise RemoteError(
                    f"files must stay the same while they are fetched; {self.address}/{name} does not have its "
                    f"{stored.size:,} bytes: run again"
                )

    def fetch_ranges(self, name: str, spans: Iterable[tuple[int, int]], file: Path) -> None:
        """Copy ranges (first byte, byte after the last) of a file to the same places in a file of this machine."""
        fs, root = self._opened
        with file.open("r+b") as onto:
            for some in _batches(spans):
                starts, stops = zip(*some, strict=True)
                get = partial(fs.cat_ranges, [f"{root}/{name}"] * len(some), starts, stops, on_error="raise")
                parts = self._do("be read", get)
                for (start, stop), part in zip(some, parts, strict=True):
                    if len(part) != stop - start:
                        raise RemoteError(
                            f"a part of a file must arrive complete; of {self.address}/{name} {len(part):,} bytes came "
                            f"in place of {stop - start:,}: run again"
                        )
                    onto.seek(start)
                    onto.write(part)

    def send(self, names: Sequence[str], folder: Path, into: str = "") -> None:
        """Copy these files from a folder of this machine to the same paths here, or below `into`."""
        fs, root = self._opened
        for some in _pieces(names):
            there = [f"{root}/{into}/{name}" if into else f"{root}/{name}" for name in some]
            self._do("be written", partial(fs.put, [str(folder / name) for name in some], there))

    def move(self, names: Sequence[str], source: str, target: str) -> None:
        """Move files below `source` to the same paths below `target`.

        The last name is the marker: it is written last at the target, and deleted first at the source.
        """
        if not names:
            return
        fs, root = self._opened
        *most, marker = names
        for some in [*_pieces(most), [marker]]:
            here, there = ([f"{root}/{folder}/{name}" for name in some] for folder in (source, target))
            self._do("be written", partial(fs.copy, here, there))
        self.delete([f"{source}/{marker}"])
        self.delete([f"{source}/{name}" for name in most])

    def delete(self, names: Sequence[str]) -> None:
        """Delete these files, as far as they exist."""
        fs, root = self._opened
        for some in _pieces(names):
            self._do("be deleted", partial(_remove, fs, [f"{root}/{name}" for name in some]))

    def _do(self, what: str, action: Callable[[], _T]) -> _T:
        """Call the storage; one that has answered this process before, and is away now, is asked again for a while."""

        def once(_: bool) -> _T:
            with self._doing(what):
                return action()

        def passes(error: Exception) -> bool:
            return isinstance(error, RemoteError) and error.passing and scheme_of(self.address) in _answered

        return retried(once, passes=passes, say=notice_anywhere)

    @contextmanager
    def _doing(self, what: str) -> Generator[None]:
        """Turn any exception of the storage into a RemoteError."""
        try:
            with _waiting(self.address):
                yield
            _answered.add(scheme_of(self.address))
        except (RemoteError, MemoryError):
            raise
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise
            raise self._error(what, error) from error
        except Exception as error:
            raise self._error(what, error) from error

    def _error(self, what: str, error: Exception) -> RemoteError:
        words = " ".join((str(error).strip() or type(error).__name__).split())[:200].rstrip(".")
        passing = False
        if isinstance(error, FileNotFoundError):
            fix = "make that bucket, or fix its name"
        elif isinstance(error, PermissionError) or "redential" in words:
            fix = "give this process credentials that may (environment, a file in the home folder, the machine's role)"
        else:
            fix, passing = "see that the storage can be reached from here, and run again", True
        return RemoteError(
            f"storage must be there for this process to use; {self.address} cannot {what}: {words}; {fix}",
            passing=passing,
        )


def _remove(fs: Any, paths: list[str]) -> None:
    with suppress(FileNotFoundError):
        fs.rm(paths)


def place_of(given: str | os.PathLike[str]) -> Path | Remote:
    """Return the folder in a bucket for an address that a user wrote, the path for anything else."""
    return user_path(given) if address_of(given) is None else Remote.at(given)


@contextmanager
def _waiting(address: str) -> Generator[None]:
    """Report once that storage does not answer, if a call before its kind's first answer takes long.

    The packages retry silently for up to a minute.
    """
    if (scheme := scheme_of(address)) in _answered:
        yield
        return
    said = f"{address}: {scheme}:// has not answered for {SILENT_SECONDS:.0f} s; it is waited for, and asked again"
    with call_after(SILENT_SECONDS, notice_anywhere, said):
        yield


def _tag(info: Mapping[str, Any]) -> str:
    """Return the version of a file's content: an ETag of S3 and Azure, a checksum of Google."""
    keys = ("ETag", "etag", "md5Hash", "crc32c", "generation", "LastModified", "mtime", "updated")
    return next((str(info[key]) for key in keys if info.get(key)), "")


def _is_safe(name: str) -> bool:
    """Return False for a name that would lead out of a folder, such as "../x"."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _has(file: Path, stored: Stored) -> bool:
    return file.is_file() and file.stat().st_size == stored.size


def _batches(spans: Iterable[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
    """Yield ranges in order, neighbours as one, a few at a time: those of `_RANGES` are in memory together."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start and stop - joined[-1][0] <= _RANGE:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return [joined[i : i + _RANGES] for i in range(0, len(joined), _RANGES)]


def _pieces(names: Iterable[str]) -> Iterable[list[str]]:
    every = list(names)
    return [every[i : i + _MOST_AT_ONCE] for i in range(0, len(every), _MOST_AT_ONCE)]
