"""Check paths from users, and refuse addresses such as s3://bucket/run.

For pathlib `gs://bucket/run` is a folder `gs:` below the working directory: files written there would be on this
machine's disk only. Its errors for other paths name no rule and no fix. So every path from a user passes through
`user_path`.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jdp.base.errors import UserError
from jdp.base.toml import brief, described

HF, STREAM = "hf:", "hf-stream:"
BUILDERS = {
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "arrow": (".arrow", ".feather"),
    "imagefolder": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"),
    "webdataset": (".tar",),
}
"""The builders that read files, and their files' suffixes."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_SOURCE = re.compile(
    rf"(?P<prefix>{HF}|{STREAM})(?:(?P<builder>{'|'.join(BUILDERS)}):)?"
    r"(?P<path>.*?)(?::(?P<split>\w[\w.-]*(?:\[[^\]]*\])?))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class HubSource:
    """A source with its parts."""

    prefix: str  # HF or STREAM
    builder: str | None
    path: str  # files, a folder, or the name of a data set
    split: str | None

    @staticmethod
    def of(source: str | os.PathLike[str]) -> HubSource | None:
        """Return the parts of a source; None if it does not begin with a prefix of these."""
        match = _SOURCE.fullmatch(str(source))
        if match is None:
            return None
        parsed = HubSource(**match.groupdict())
        path = f"{parsed.path}:{parsed.split}"
        if parsed.split is not None and "\0" not in path and Path(path).expanduser().exists():
            return replace(parsed, path=path, split=None)  # an existing path stays a path, even with colons
        return parsed

    @property
    def is_path(self) -> bool:
        """Whether the source names files of this machine, rather than a data set on the hub or an address."""
        return "://" not in self.path and (self.builder is not None or self.path.startswith((".", "~", "/")))

    @property
    def no_builder(self) -> str | None:
        """The problem of a source such as "hf:jsonl:rows.jsonl", whose first word is not a builder; else None."""
        word, colon, rest = self.path.partition(":")
        file = rest if colon else self.split or ""
        is_complete = self.builder is not None or "://" in self.path or word[:1] in ("", ".", "~", "/")
        if is_complete or (not colon and builder_of(file) is None):
            return None
        return f'must name one of the builders {", ".join(BUILDERS)}, as in "{HF}{builder_of(file) or "json"}:{file}"'

    def at(self, change: Callable[[str], str]) -> str:
        """Return the source with another path."""
        builder = "" if self.builder is None else f"{self.builder}:"
        return f"{self.prefix}{builder}{change(self.path)}" + ("" if self.split is None else f":{self.split}")


def builder_of(name: str) -> str | None:
    """Return the builder for a file's suffix, ignoring a suffix of `COMPRESSED`; None if no builder reads it."""
    plain = name.lower()
    for suffix in COMPRESSED:
        plain = plain.removesuffix(suffix)
    return next((builder for builder, suffixes in BUILDERS.items() if plain.endswith(suffixes)), None)


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//|/|$)")
"""Also with one slash, or none at the end, because pathlib reduces two to one. One letter is a drive."""

_KNOWN = re.compile(r"(gs|gcs|s3a?|az|abfss?|adl|oss|hdfs|https?|ftp|file|memory):", re.IGNORECASE)
"""Kinds that are addresses even if the slashes are missing, or if a folder of that name exists."""


class PathError(UserError):
    """A path that no file can have; the message has the rule, the path and the fix."""


def user_path(given: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~user` expanded. The path need not exist."""
    if not isinstance(given, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PathError(f'a path must be text or a pathlib.Path, given {described(given)}: write one, such as "runs"')
    text = os.fspath(given)
    if "\0" in text:
        raise PathError(f"a path must have no NUL character, given {brief(text)}: remove it")
    if address_of(text):
        raise PathError(
            f"a path must be on a disk of this machine, given {brief(text)}: mount it (gcsfuse, mountpoint-s3, rclone) "
            "or copy it, and give the folder (jdp/outside.md); checkpoints are copied to storage by train.mirror"
        )
    try:
        text.encode()
        path = Path(text).expanduser()
    except UnicodeEncodeError:
        raise PathError(f"a path must be text in UTF-8, given {text[:60]!r}: rename the file or folder") from None
    except RuntimeError:
        rule = f"a path must begin with a user who has a home folder, given {brief(text)}"
        raise PathError(f"{rule}: {Path(text).parts[0]} has none; write the folder") from None
    try:
        path.lstat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise PathError(f"a path must be accessible, given {brief(text)}: {error.strerror}; change it") from None
    return path


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a path is a file or folder: reading a pipe, a socket or a device may wait for ever."""
    mode = os.stat(path).st_mode  # noqa: PTH116 - names of millions of images are text, not Path
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


def matching(path: Path) -> list[str]:
    """Return the file, or the sorted files of a glob. Brackets in the names of existing folders are not a pattern."""
    if path.is_file():
        return [str(path)]
    folder = next((parent for parent in path.parents if parent.exists()), Path())
    pattern = str(Path(glob.escape(str(folder)), path.relative_to(folder)))
    return sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))  # noqa: PTH207 - may be many


def address_of(given: object) -> str | None:
    """Return an address with its kind in lower case and two slashes, or as s3:bucket/run; None for a path.

    A path whose first part looks like a kind and exists here is a path.
    """
    if not isinstance(given, str | os.PathLike):
        return None
    text = str(os.fspath(given))
    found, known = _SCHEME.match(text), _KNOWN.match(text)
    if found and (known or found[2] == "//" or not (text.startswith((HF, STREAM)) or os.path.lexists(f"{found[1]}:"))):
        return f"{found[1].lower()}://{text[found.end() :].strip('/')}"
    return text if known else None


def bucket_address(given: str) -> str:
    """Return the address of a folder in object storage, such as s3://bucket/run. Raises PathError."""
    address = address_of(given) or ""
    scheme, _, place = address.partition("://")
    if not place or scheme in ("file", "local", "memory", "http", "https"):  # on this machine, or not writable
        raise PathError(
            f"a mirror must be the address of a folder in storage, given {brief(given)}: write s3://bucket/run or "
            "gs://bucket/run; a folder of this machine is given as --run-dir"
        )
    return address
