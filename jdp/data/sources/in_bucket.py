"""Data in a bucket, such as s3://bucket/corpus: fetched once to a folder of this host, then read from there.

Token files and tables are mapped into memory, and images are read in any order: a bucket allows neither. The folder is
below the user's cache ($JDP_CACHE_DIR). Its name is a hash of the address and of each file's name, size and tag (ETag),
so changed files are fetched again. One process of a host fetches, the others wait. Only the user deletes it.
"""

import fcntl
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from jdp.base.bucket import Remote, Stored, place_of
from jdp.base.disk_cache import Cache, default_folder, make_folder
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice_anywhere, show_as
from jdp.base.user_path import PathError

_COMPLETE = "fetched.json"


def local_path(source: str | os.PathLike[str], *, only: Callable[[str], bool] | None = None) -> Path:
    """Return the path of data that a user names: as given, or of the local copy for an address."""
    return local_copy(place_of(source), only=only)


def local_copy(place: Path | Remote, *, only: Callable[[str], bool] | None = None) -> Path:
    """Return a path as it is, and for a folder, file or glob in a bucket the path of its local copy."""
    if isinstance(place, Path):
        return place
    base, pattern = _split(place.address)
    remote_folder = Remote(base)
    found = remote_folder.matching(pattern or "*") if pattern or only else remote_folder.files()
    files = {name: stored for name, stored in found.items() if only is None or only(name)}
    if not files and not pattern:  # it may be one file
        base, _, pattern = place.address.rpartition("/")
        remote_folder = Remote(base)
        files = {} if base.endswith("/") else remote_folder.matching(pattern)
    if not files:
        raise ValueError(
            f"an address must lead to a file, a glob or a folder that exists; given {place.address}, where there is "
            f"nothing{' of the files that are read' if found else ''}: fix the address"
        )
    folder = fetch(remote_folder, files)
    return folder / pattern if pattern else folder


def _split(address: str) -> tuple[str, str]:
    """Return the folder of an address, and the file or the pattern in it."""
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])


def fetch(remote: Remote, files: dict[str, Stored]) -> Path:
    """Return the folder of this host with copies of these files, fetched unless they are there."""
    facts = [remote.address, *(f"{name} {stored.size} {stored.tag}" for name, stored in sorted(files.items()))]
    home = default_folder().absolute() / "fetched" / Cache.key(*facts)[:32]
    folder = home / PurePosixPath(remote.address).name
    show_as(f"{folder}", remote.address)
    if (home / _COMPLETE).exists():
        return folder
    try:
        make_folder(home)
    except OSError as error:
        raise PathError(
            f"data in a bucket needs a folder on this host, and {home.parent} cannot be written: "
            f"{error.strerror}; set JDP_CACHE_DIR to a folder that can"
        ) from error
    with (home / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / _COMPLETE).exists():
            return folder
        size = format_bytes(sum(stored.size for stored in files.values()))
        notice_anywhere(f"{remote.address}: {len(files):,} files, {size}, are fetched once, to {home}")
        remote.fetch_missing(files, folder)
        (home / _COMPLETE).write_text(json.dumps(facts))
    return folder
