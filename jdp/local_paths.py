"""A path that a user gives: `~` filled in, and refused where it is none that this machine can open.

pathlib takes anything: `gs://bucket/run` is to it a folder `gs:` below the working directory, and what is written there
is on this machine's disk only. So every path that comes from a user goes through `local_path`.
"""

import os
import re
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Of one slash too: pathlib makes one of two. (One letter alone is a drive.)"""
_LONGEST_SHOWN = 200


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """`path` with `~` and `~name` filled in; relative where it was.

    Args:
        path: as the user gave it.
        what: what it is, for messages: "a checkpoint's path".

    Raises:
        ValueError: it is an address such as gs://bucket/run, names a user that there is not, or cannot be a path.
    """
    text = os.fspath(path)
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    if scheme := _SCHEME.match(text):
        raise ValueError(
            f"{what} must be on a disk of this machine or one mounted here; given {shown!r}, and jdp does not read or "
            f"write {scheme[1]}:// yet: mount it (gcsfuse, mountpoint-s3, rclone) or copy it, and give that folder"
        )
    if "\0" in text:
        raise ValueError(f"{what} must be a path, which has no NUL in it; given {shown!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(
            f"{what} must start with ~ or ~USER of this machine, or neither; given {shown!r}, and there is no user "
            f"{user[1:] or 'with a home'}: write the folder out, or ./{user} for one of that name"
        ) from None
