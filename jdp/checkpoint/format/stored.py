"""A checkpoint in a folder: Orbax reads it, after its files were compared with their checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jdp.checkpoint.errors import DamagedError, reading
from jdp.checkpoint.format import checksums, committing
from jdp.checkpoint.format.checksums import COMMITTED
from jdp.checkpoint.format.committing import METADATA
from jdp.core.cluster.barrier import from_every_process

_ARRAYS = "state/"
_HOURS = 4 * 3600.0  # a share of the largest checkpoints takes longer to read than processes wait elsewhere


class Stored:
    """A checkpoint in a folder, as a `content.Source`; `fix` says what to do if it is damaged."""

    def __init__(self, folder: Path, fix: str) -> None:
        self.folder, self._fix = folder, fix
        self._verified = False

    def table(self) -> dict[str, Any]:
        """Verify the small files; return the table of leaves."""
        self._verify(lambda name: not name.startswith(_ARRAYS))
        table = self._json("leaves")
        if not isinstance(table.get("leaves"), dict):
            raise self._damaged("leaves has no table of leaves")
        return table

    def record(self) -> dict[str, Any]:
        """Return the JSON object that was saved beside the arrays; `table` has verified it."""
        return self._json("record")

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify the files of the arrays at the first call; read arrays onto these leaves, by path."""
        if not self._verified:
            self._verify(lambda name: name.startswith(_ARRAYS))
            self._verified = True
        if not wanted:
            return {}
        onto = ocp.checkpoint_utils.construct_restore_args(wanted)
        return self._read("state", ocp.args.PyTreeRestore(wanted, restore_args=onto, partial_restore=True))

    def _json(self, name: str) -> dict[str, Any]:
        value = self._read(name, ocp.args.JsonRestore())
        if not isinstance(value, dict):
            raise self._damaged(f"{name} has no JSON object")
        return value

    def _read(self, item: str, arguments: Any) -> Any:
        handler, meeting = ocp.CompositeCheckpointHandler(**item_handlers()), committing.multiprocessing_options()
        with (
            reading(str(self.folder), self._fix),
            ocp.Checkpointer(handler, multiprocessing_options=meeting) as reader,
        ):
            return reader.restore(self.folder, args=ocp.args.Composite(**{item: arguments}))[item]

    def _verify(self, wanted: Callable[[str], bool]) -> None:
        """Compare files with their checksums; each process reads a share of them, and all raise the same error."""
        own = checksums.verify(self.folder, wanted, process=jax.process_index(), processes=jax.process_count())
        for problem in filter(None, from_every_process("the checksums of a checkpoint", own, seconds=_HOURS)):
            raise self._damaged(problem)

    def _damaged(self, problem: str) -> DamagedError:
        return DamagedError(f"{self.folder} is damaged: {problem}. {self._fix}.", problem)


def item_handlers() -> dict[str, Any]:
    """Return Orbax' handler of each item."""
    return {
        "state": committing.array_handler(),
        "leaves": ocp.JsonCheckpointHandler(),
        "record": ocp.JsonCheckpointHandler(),
    }


def is_checkpoint(folder: Path) -> bool:
    """Return True if `folder` holds a checkpoint that was written to its end."""
    return (folder / COMMITTED).is_file() and (folder / "leaves").is_dir() and (folder / "state").is_dir()


def check_metrics(folder: Path) -> None:
    """Check the metrics beside a checkpoint."""
    if problem := checksums.verify(folder, lambda name: name == METADATA or name.startswith("metrics/")):
        raise DamagedError(f"{folder} is damaged: {problem}. Move it away.", problem)
    file = folder / "metrics" / "metrics"
    try:
        metrics = json.loads(file.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        metrics = None
    if not isinstance(metrics, dict) or not all(x is None or isinstance(x, int | float) for x in metrics.values()):
        raise DamagedError(
            f"{file} is damaged: it must be a JSON object of numbers. Remove that file: the checkpoint is then one "
            "without metrics.",
            "metrics/metrics is no JSON object of numbers",
        )
