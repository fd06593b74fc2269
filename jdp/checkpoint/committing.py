"""What Orbax does here beyond what it does by itself: it hashes what was written, before a checkpoint counts.

In the background, after the last array is on the disk: each process hashes its own files, all meet, process 0 hashes
the rest and writes the table and the commit file. The training loop waits for none of it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler
from orbax.checkpoint.path import atomicity

from jdp.checkpoint import checksums

METADATA = "_CHECKPOINT_METADATA"
"""Orbax' notes about a checkpoint: which handlers wrote it, and when."""


class CommittedWithChecksums(atomicity.CommitFileTemporaryPath):
    """The folder of a checkpoint, or of one of its items, while it is being written."""

    async def finalize(self) -> None:
        """Hash all files and write the commit file; of an item, Orbax' own."""
        store, folder = self._checkpoint_metadata_store, self.get()
        if store is None:
            await super().finalize()
            return
        store.update(folder / METADATA, commit_timestamp_nsecs=time.time_ns())
        await asyncio.to_thread(store.wait_until_finished)
        await asyncio.to_thread(checksums.commit, Path(folder))


class _Arrays(BasePyTreeCheckpointHandler):
    """Writes arrays; with several processes, each then hashes its own."""

    async def async_save(self, directory: Any, args: Any) -> Any:
        futures = await super().async_save(directory, args)
        return futures if jax.process_count() == 1 else [_Hashed(futures, Path(directory).parent)]


class _Hashed:
    """A future of Orbax: done when this process' arrays are written and hashed."""

    def __init__(self, written: Any, folder: Path) -> None:
        self._written, self._folder = list(written or ()), folder

    def result(self, timeout: float | None = None) -> None:
        for future in self._written:
            future.result(timeout)
        checksums.write_part(self._folder, jax.process_index())

    def cancel(self) -> None:
        for future in self._written:
            future.cancel()


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax' handler of the arrays."""
    return ocp.PyTreeCheckpointHandler(handler_impl=_Arrays())
