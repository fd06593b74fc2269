"""A checkpoint in a folder: files are compared with their checksums, then Orbax reads them. Orbax writes the arrays.

Arrays are not compressed, because zstandard saves only 7% on trained float32 weights, and takes three times the
processor time of all other work in both directions.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdp.checkpoint.errors import HOURS, DamagedError, reading
from jdp.checkpoint.format import checksums
from jdp.core.cluster.barrier import from_every_process

DESCRIPTION = "checkpoint.json"
"""The file with the table of leaves, the record and the metrics."""
ARRAYS = "state"
"""The folder of the arrays in a checkpoint."""
_LEAST_PART_BYTES = 2**20
"""Smallest part that one device sends of a replicated array."""
_PATIENCE_SECONDS = 24 * 3600
"""Orbax' limit for a save, by the wall clock: long enough for a machine that sleeps meanwhile."""


class Stored:
    """A checkpoint in a folder, as a `content.Source`; `fix` is the fix if it is damaged."""

    def __init__(self, folder: Path, fix: str) -> None:
        self.folder, self._fix = folder, fix
        self._description: dict[str, Any] = {}

    def table(self) -> dict[str, Any]:
        """Verify and read the description, which has the table of leaves."""
        self._verify(lambda name: name == DESCRIPTION)
        with reading(str(self.folder), self._fix):
            self._description = json.loads((self.folder / DESCRIPTION).read_bytes())
        return self._description

    def record(self) -> dict[str, Any]:
        return self._description["record"]

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify the files of the arrays; read arrays onto these leaves, by path."""
        self._verify(lambda name: name != DESCRIPTION)
        if not wanted:
            return {}
        onto = ocp.checkpoint_utils.construct_restore_args(wanted)
        with (
            reading(str(self.folder), self._fix),
            ocp.Checkpointer(_handler(), multiprocessing_options=_multiprocessing_options()) as reader,
        ):
            arguments = ocp.args.PyTreeRestore(wanted, restore_args=onto, partial_restore=True)
            return reader.restore(self.folder / ARRAYS, args=arguments)

    def _verify(self, wanted: Callable[[str], bool]) -> None:
        """Compare files with their checksums; each process reads a share of them, and all raise the same error."""
        own = checksums.verify(self.folder, wanted, process=jax.process_index(), processes=jax.process_count())
        for problem in filter(None, from_every_process("the checksums of a checkpoint", own, seconds=HOURS)):
            raise DamagedError(f"{self.folder} is damaged: {problem}. {self._fix}.", problem)


def is_checkpoint(folder: Path) -> bool:
    return (folder / checksums.COMMITTED).is_file() and (folder / ARRAYS).is_dir()


def read_metrics(folder: Path) -> dict[str, float | None] | None:
    """Return the metrics saved with the arrays; None if the file is damaged or is being deleted."""
    with contextlib.suppress(OSError):
        if not checksums.verify(folder, lambda name: name == DESCRIPTION):
            return json.loads((folder / DESCRIPTION).read_bytes())["metrics"]
    return None


def open_writer() -> ocp.AsyncCheckpointer:
    """Return the writer of arrays in the background; `save` first copies them from the devices."""
    return ocp.AsyncCheckpointer(
        _handler(),
        async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE_SECONDS, create_directories_asynchronously=False),
        multiprocessing_options=_multiprocessing_options(),
    )


def _multiprocessing_options() -> ocp.options.MultiprocessingOptions:
    """Return options that make processes wait in JAX's coordination service, not on the devices."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax' handler of the arrays.

    Each device sends a part of a large replicated array. Small arrays are not split, because that takes a program for
    each shape and device, and the first save would wait for their compilation.
    """
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_PART_BYTES)
    numpy = ((kind, kinds.get_type_handler(kind)) for kind in (np.number, np.ndarray))
    registry = kinds.create_type_handler_registry((jax.Array, arrays), *numpy)
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
