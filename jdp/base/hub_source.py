"""Sources that `datasets` reads, as they are written in an experiment file: "hf:parquet:rows/*.parquet:train".

A builder reads files: "hf:BUILDER:PATH". A source without a builder is a data set of the hub ("hf:NAME",
"hf:OWNER/NAME", "hf:OWNER/NAME/CONFIG") or in a folder ("hf:/local/path"). "hf-stream:" streams the same sources. A
split may follow: ":train", ":train[:1000]".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

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
