"""From per-process numpy batches to global arrays, ahead of the step.

1. `process_rows` says which rows of each global batch this process must read: those its devices hold.
2. A thread takes batches from the loader, puts every device's rows on it, and queues the global array; `prefetch` of
   them at most are ahead of the loop.
3. The loop takes from the queue; what it waited is counted in `wait_seconds`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jdp.plan import Plan
from jdp.types import Batch


def process_rows(plan: Plan, batch_size: int) -> list[int]:
    """The rows of a global batch of `batch_size` rows that this process' devices hold, in order.

    Raises:
        ValueError: `batch_size` does not divide by the plan's batch shards.
    """
    if batch_size % plan.batch_shards:
        raise ValueError(f"A batch of {batch_size} rows does not divide by {plan.batch_shards} batch shards.")
    rows = batch_size // plan.batch_shards
    return [row for block in _local_blocks(plan) for row in range(block * rows, (block + 1) * rows)]


def shard_batches(loader: Iterable[Batch], plan: Plan, *, prefetch: int = 2) -> Feed:
    """Turn this process' numpy batches into global arrays on the plan's devices, `prefetch` batches ahead.

    Args:
        loader: yields pytrees of numpy arrays: the rows that `process_rows` names (in a single process: whole global
            batches). All processes must yield the same number of batches of the same shapes.
        plan: the leading dimension is laid over its batch axes.
        prefetch: batches that are read and transferred ahead of the step.

    Returns:
        An iterator of batches, with `wait_seconds`: how long its user has waited so far, in seconds.
    """
    return Feed(loader, plan, prefetch)


class Feed(Iterator[Batch]):
    """The iterator that `shard_batches` returns. Close it (or use it in `with`) when leaving before the end."""

    def __init__(self, loader: Iterable[Batch], plan: Plan, prefetch: int) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is a number of batches, at least 1; got {prefetch}.")
        self.wait_seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(prefetch)
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, args=(loader, plan), name="jdp-feed", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._done:
            raise StopIteration
        start = time.perf_counter()
        kind, value = self._queue.get()
        self.wait_seconds += time.perf_counter() - start
        if kind == "batch":
            self._slots.release()
            return value
        self._done = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop reading and wait for the thread."""
        self._done = True
        self._stop.set()
        self._slots.release()
        self._thread.join()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, loader: Iterable[Batch], plan: Plan) -> None:
        blocks = _local_blocks(plan)
        try:
            batches = iter(loader)
            while self._slots.acquire() and not self._stop.is_set():
                batch = next(batches, _END)
                if batch is _END:
                    self._queue.put(("end", None))
                    return
                laid = jax.tree.map(lambda x: _global_array(np.asarray(x), plan, blocks), batch)
                self._queue.put(("batch", laid))
        except BaseException as error:  # handed to the loop, which raises it
            self._queue.put(("error", error))


_END = object()


def _local_blocks(plan: Plan) -> list[int]:
    """Which of the batch's equal blocks, numbered along the batch, lie on this process' devices."""
    whole = plan.batch_sharding.addressable_devices_indices_map((plan.batch_shards,))
    return sorted({index[0].start or 0 for index in whole.values() if index is not None})


def _global_array(local: np.ndarray[Any, Any], plan: Plan, blocks: list[int]) -> jax.Array:
    if local.ndim == 0 or local.shape[0] % len(blocks):
        size = local.shape[0] * plan.batch_shards // len(blocks) if local.ndim else "a scalar"
        raise ValueError(
            f"A batch's rows must divide by the plan's {plan.batch_shards} batch shards; this process holds "
            f"{len(blocks)} of them and was given {local.shape[0] if local.ndim else 'a scalar'} rows (global: {size})."
        )
    rows = local.shape[0] // len(blocks)
    shape = (rows * plan.batch_shards, *local.shape[1:])
    position = {block: i for i, block in enumerate(blocks)}

    def piece(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        assert index is not None
        start = position[(index[0].start or 0) // rows] * rows
        return local[start : start + rows]

    return jax.make_array_from_callback(shape, plan.batch_sharding, piece)
