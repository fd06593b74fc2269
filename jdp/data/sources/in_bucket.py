"""Data behind an address, such as s3://bucket/corpus: fetched once to a folder of this host, and read as any other.

Token files and tables are mapped into memory, and pictures read in any order, which storage does not do. The folder is
below the user's cache ($JDP_CACHE_DIR), named by a hash of the address and of each file's name, size and tag (ETag), so
that what has changed is fetched anew. One process of a host fetches, the others wait. Nothing deletes it but its user.
"""

import fcntl
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from jdp.base.bucket import Remote, RemoteError, Stored
from jdp.base.bucket_address import address_of
from jdp.base.disk_cache import Cache, default_folder
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice_anywhere, show_as
from jdp.base.user_path import PathError, user_path

_WHOLE = "fetched.json"


def local_path(source: str | os.PathLike[str], *, only: Callable[[str], bool] | None = None) -> Path:
    """Return the path of data: as it is written, or where a copy of what is behind an address is."""
    if address_of(source) is None:
        return user_path(source)
    remote = Remote.at(os.fspath(source))
    base, pattern = _split(remote.address)
    remote_folder = Remote(base)
    found = remote_folder.matching(pattern or "*") if pattern or only else remote_folder.files()
    files = {name: stored for name, stored in found.items() if only is None or only(name)}
    if not files and not pattern:  # it may be one file
        base, _, pattern = remote.address.rpartition("/")
        remote_folder = Remote(base)
        files = {} if base.endswith("/") else remote_folder.matching(pattern)
    if not files:
        raise ValueError(
            f"an address must lead to a file, a glob or a folder that exists; given {remote.address}, where there is "
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
    """Return the folder of this host with copies of some files, fetched unless they are there."""
    facts = [remote.address, *(f"{name} {stored.size} {stored.tag}" for name, stored in sorted(files.items()))]
    home = default_folder().absolute() / "fetched" / Cache.key(*facts)[:32]
    folder = home / PurePosixPath(remote.address).name
    show_as(f"{folder}", remote.address)
    if (home / _WHOLE).exists():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PathError(
            f"data behind an address needs a folder on this host, and {home.parent} cannot be written: "
            f"{error.strerror}; set JDP_CACHE_DIR to a folder that can"
        ) from error
    with (home / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / _WHOLE).exists():
            return folder
        size = format_bytes(sum(stored.size for stored in files.values()))
        notice_anywhere(f"{remote.address}: {len(files):,} files, {size}, are fetched once, to {home}")
        remote.fetch([name for name, stored in files.items() if not _has(folder / name, stored)], folder)
        for name, stored in files.items():
            if not _has(folder / name, stored):
                raise RemoteError(
                    f"data must stay the same while it is fetched; {remote.address}/{name} has not its {stored.size:,} "
                    "bytes: run again"
                )
        (home / _WHOLE).write_text(json.dumps(facts))
    return folder


def _has(file: Path, stored: Stored) -> bool:
    return file.is_file() and file.stat().st_size == stored.size
