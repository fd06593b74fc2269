"""How Orbax writes and reads the arrays of a checkpoint.

Arrays are not compressed, because zstandard saves only 7% on trained float32 weights, and takes three times the
processor time of all other work in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

FOLDER = "state"
"""The folder of the arrays in a checkpoint."""
_LEAST_PART_BYTES = 2**20
"""Smallest part that one device sends of a replicated array."""
_PATIENCE_SECONDS = 24 * 3600
"""Orbax' limit for a save, by the wall clock: long enough for a machine that sleeps meanwhile."""


def open_writer() -> ocp.AsyncCheckpointer:
    """Return the writer of arrays in the background; `save` first copies them from the devices."""
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
