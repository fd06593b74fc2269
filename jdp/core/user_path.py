"""Paths as users write them, held against what a file system can have at all: before `pathlib` raises as it likes.

To pathlib `gs://bucket/run` is a folder `gs:` below the working directory, and what is written there is on this
machine's disk only. So every path that comes from a user goes through `user_path`.
"""

import errno
import os
import re
import stat
from pathlib import Path

from jdp.core.toml import brief

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://|(gs|gcs|s3a?|az|abfss?|adl|hdfs|https?|ftp|file|memory):/")
"""Of a known kind also with one slash: pathlib makes one of two."""


class PathError(ValueError):
    """What is wrong with a path shows without looking for it."""


def user_path(given: str | os.PathLike[str]) -> Path:
    """The path, `~` and `~user` resolved; whether something is there is for the reader to say.

    Raises:
        PathError: an address such as gs://bucket/run, a NUL character, bytes that are not UTF-8, a name or path longer
            than the file system takes, a user who has no home folder, or a folder on the way that may not be entered.
            The message begins with the rule.
    """
    text = os.fspath(given)
    _check_text(text)
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise PathError(
            f"a path must begin with a user who has a home folder, got {brief(text)}: {user} has none; write the "
            "folder, or ./ before a name that begins with ~"
        ) from None
    try:
        path.lstat()
    except OSError as error:
        if error.errno not in _ABSENT:
            raise PathError(
                f"a path must be one that the system can look up, got {brief(text)}: {error.strerror}; mend it"
            ) from None
    return path


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError for a pipe, a socket or a device, as reading one may wait for ever; and where nothing is there."""
    mode = os.stat(path).st_mode  # noqa: PTH116 - of millions of pictures there are names, not paths
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


def _check_text(text: str) -> None:
    if "\0" in text:
        raise PathError(f"a path must have no NUL character, got {brief(text)}: remove it")
    if address := _ADDRESS.match(text):
        raise PathError(
            f"a path must be on a disk of this machine, got {brief(text)}: {address[1] or address[2]}:// is not read "
            "or written yet; mount it (gcsfuse, mountpoint-s3, rclone) or copy it, and give that folder"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PathError(f"a path must be text in UTF-8, got {text[:60]!r}: rename the file or folder") from None
