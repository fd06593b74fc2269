"""How Orbax writes and reads the arrays of a checkpoint.

Arrays are not compressed: zstandard makes trained float32 weights 7% smaller, and takes three times the processor time
of all other work, for writing as for reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

FOLDER = "state"
"""The folder of the arrays in that of a checkpoint."""
_LEAST_PART_BYTES = 2**20
"""The least part that one device sends of an array that several devices hold."""
_PATIENCE_SECONDS = 24 * 3600
"""How long Orbax may take for a save, by the wall clock: a machine that sleeps in a save is not too late for it."""


def open_writer() -> ocp.AsyncCheckpointer:
    """Return what writes arrays in the background, after `save` has copied them from the devices."""
    return ocp.AsyncCheckpointer(
        _handler(),
        async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE_SECONDS, create_directories_asynchronously=False),
        multiprocessing_options=_multiprocessing_options(),
    )


def read(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arrays of a checkpoint onto leaves that have a shape, dtype and sharding, by path."""
    onto = ocp.checkpoint_utils.construct_restore_args(wanted)
    with ocp.Checkpointer(_handler(), multiprocessing_options=_multiprocessing_options()) as reader:
        return reader.restore(
            folder / FOLDER, args=ocp.args.PyTreeRestore(wanted, restore_args=onto, partial_restore=True)
        )


def _multiprocessing_options() -> ocp.options.MultiprocessingOptions:
    """Return the options by which processes wait in JAX's coordination service, and not on the devices."""
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return Orbax' handler of the arrays.

    Of a large array that all devices hold each sends a part. Smaller ones are not cut: that takes a program for each
    shape and device, for which the first save would wait.
    """
    kinds = ocp.type_handlers
    arrays = kinds.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_PART_BYTES)
    numpy = ((kind, kinds.get_type_handler(kind)) for kind in (np.number, np.ndarray))
    registry = kinds.create_type_handler_registry((jax.Array, arrays), *numpy)
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
