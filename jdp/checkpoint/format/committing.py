"""How Orbax is used here: its options, and the work before a checkpoint counts.

After the last array is on the disk, in the background, each process hashes its own files. Then process 0 hashes the
rest and writes the table and the commit file. The training loop waits for none of it.

Arrays are not compressed: zstandard makes trained float32 weights 7% smaller, and takes three times the processor time
of all other work, for writing as for reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.futures import future as waiting
from orbax.checkpoint._src.futures import signaling_client as signals
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint.path import atomicity

from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.format import checksums

METADATA = "_CHECKPOINT_METADATA"
"""Orbax' notes about a checkpoint: which handlers wrote it, and when."""
_LEAST_PART_BYTES = 2**20
"""The least part that one device sends of an array that several devices hold."""

# Orbax waits by the wall clock, and a machine that wakes up, or is set right, in a save would be too late for it.
waiting.time = signals.time = SimpleNamespace(time=time.monotonic)  # pyright: ignore[reportAttributeAccessIssue]


class CommittedWithChecksums(atomicity.CommitFileTemporaryPath):
    """The folder of a checkpoint, or of one of its items, until it is committed."""

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


def open_manager(directory: Path, handlers: dict[str, Any], kept: Any, score: Any) -> ocp.CheckpointManager:
    """Return Orbax' manager of a directory."""
    options = ocp.CheckpointManagerOptions(
        preservation_policy=kept,
        best_fn=score,
        atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
        temporary_path_class=CommittedWithChecksums,
        multiprocessing_options=multiprocessing_options(),
        create=False,
    )
    try:
        return ocp.CheckpointManager(directory, item_handlers=handlers, options=options)
    except ValueError as error:  # what Orbax keeps of each step is JSON, but no table
        raise CheckpointError(
            f"{directory} cannot be opened; the {METADATA} of one of its checkpoints is damaged: {error}. Remove that "
            "file: Orbax does without."
        ) from error


def multiprocessing_options() -> ocp.options.MultiprocessingOptions:
    """Return the options by which processes wait in JAX's coordination service, and not on the devices."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def snapshot(arrays: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return copies of arrays in host memory, which no step can take over; None if Orbax copies them itself.

    Only for one process on CPU devices, whose memory is the host's. From others Orbax copies less: a part of each
    replica of a large array.
    """
    on_host = all(isinstance(x, jax.Array) and next(iter(x.devices())).platform == "cpu" for x in arrays.values())
    if jax.process_count() > 1 or not on_host:
        return None
    places = {path: x.sharding for path, x in arrays.items()}
    return jax.device_put(dict(arrays), places, may_alias=False)


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax' handler of the arrays.

    Of a large array that all devices hold each sends a part. Smaller ones are not cut: that takes a program for each
    shape and device, for which the first save would wait.
    """
    arrays = type_handlers.ArrayHandler(
        array_metadata_store=array_metadata_store.Store(), min_slice_bytes_for_replica_parallel=_LEAST_PART_BYTES
    )
    others = ((kind, type_handlers.get_type_handler(kind)) for kind in (int, float, bytes, str, np.number, np.ndarray))
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays), *others)
    handler = _Arrays(use_compression=False, type_handler_registry=registry)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, handler_impl=handler)
