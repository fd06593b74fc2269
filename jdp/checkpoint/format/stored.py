"""A checkpoint in a folder: files are compared with their checksums, then Orbax reads them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jdp.checkpoint.errors import HOURS, DamagedError, reading
from jdp.checkpoint.format import arrays, checksums
from jdp.core.cluster.barrier import from_every_process

DESCRIPTION = "checkpoint.json"
"""The file with the table of leaves, the record and the metrics."""


class Stored:
    """A checkpoint in a folder, as a `content.Source`; `fix` is the fix if it is damaged."""

    def __init__(self, folder: Path, fix: str) -> None:
        self.folder, self._fix = folder, fix
        self._description: dict[str, Any] = {}

    def table(self) -> dict[str, Any]:
        """Verify and read the description, which has the table of leaves."""
        self._verify(_is_description)
        with reading(str(self.folder), self._fix):
            description = json.loads((self.folder / DESCRIPTION).read_bytes())
        if not isinstance(description, dict) or not all(
            isinstance(description.get(x), dict) for x in ("leaves", "record")
        ):
            raise self._damaged(f"{DESCRIPTION} has no leaves or no record")
        self._description = description
        return description

    def record(self) -> dict[str, Any]:
        """Return the JSON object saved with the arrays; `table` has read it."""
        return self._description["record"]

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify the files of the arrays; read arrays onto these leaves, by path."""
        self._verify(lambda name: not _is_description(name))
        if not wanted:
            return {}
        with reading(str(self.folder), self._fix):
            return arrays.read(self.folder, wanted)

    def _verify(self, wanted: Callable[[str], bool]) -> None:
        """Compare files with their checksums; each process reads a share of them, and all raise the same error."""
        own = checksums.verify(self.folder, wanted, process=jax.process_index(), processes=jax.process_count())
        for problem in filter(None, from_every_process("the checksums of a checkpoint", own, seconds=HOURS)):
            raise self._damaged(problem)

    def _damaged(self, problem: str) -> DamagedError:
        return DamagedError(f"{self.folder} is damaged: {problem}. {self._fix}.", problem)


def _is_description(name: str) -> bool:
    return name == DESCRIPTION


def is_checkpoint(folder: Path) -> bool:
    """Return True if `folder` holds a complete checkpoint."""
    return (folder / checksums.COMMITTED).is_file() and (folder / arrays.FOLDER).is_dir()


def read_metrics(folder: Path) -> dict[str, float | None] | None:
    """Return the metrics saved with the arrays; None if they cannot be read, now or ever."""
    with contextlib.suppress(OSError):  # it is being deleted
        if not checksums.verify(folder, _is_description):
            return json.loads((folder / DESCRIPTION).read_bytes())["metrics"]
    return None
