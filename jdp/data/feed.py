"""From per-process NumPy batches to global arrays, put on the devices by a thread, ahead of the step."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jdp.base.errors import UserError, public
from jdp.base.signals import THREAD_SECONDS
from jdp.base.toml import described
from jdp.base.words import is_integer
from jdp.core.batch import batch_rows, owned
from jdp.core.plan import Plan, check_plan
from jdp.core.sharding.axes import BatchUnit, batch_unit
from jdp.core.types import Batch


@public()
def process_rows(plan: Plan, batch_size: int) -> list[int]:
    """Return the rows of a global batch that this process' devices hold, in order.

        >>> jdp.process_rows(plan, 16) == list(range(16))  # a single process holds all rows
        True

    Args:
        plan: its batch axes shard the rows.
        batch_size: rows of the global batch.

    Raises:
        ValueError: `batch_size` does not divide by the plan's batch shards; or `plan` is not a `jdp.Plan`.
    """
    check_plan(plan, "jdp.process_rows(plan, batch_size)", batch_size)
    batch_unit(plan.mesh.shape).check(batch_size, microbatches=False)
    rows = batch_size // plan.batch_shards
    return [row for block in _local_blocks(plan) for row in range(block * rows, (block + 1) * rows)]


@public()
def shard_batches(loader: Iterable[Batch], plan: Plan, *, prefetch: int = 2) -> Feed:
    """Turn this process' NumPy batches into global arrays on the plan's devices, `prefetch` batches ahead.

        >>> loader = (batch for _ in range(3))
        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> for global_batch in jdp.shard_batches(loader, plan):
        ...     state, metrics = train_step(state, global_batch)
        >>> global_batch["x"].sharding.spec
        P('data',)

    Args:
        loader: yields pytrees of NumPy arrays: the rows from `process_rows` (in a single process, complete global
            batches). All processes must yield the same number of batches with the same shapes. Each batch is copied
            when read, so the loader may reuse its memory.
        plan: its batch axes shard the leading dimension.
        prefetch: batches to read and transfer ahead of the step. Raise it if the time to read a batch varies; each
            batch ahead takes memory on the devices.

    Returns:
        An iterator of batches, with `wait_seconds`: the seconds waited for batches so far. It raises the loader's
        errors. It raises ValueError for rows that do not divide by this process' batch shards, for a loader without
        batches, and for a second pass.

    Raises:
        ValueError: `loader` is not an iterable of batches; `prefetch` is less than 1; or `plan` is not a `jdp.Plan`.
    """
    check_plan(plan, "jdp.shard_batches(loader, plan)", loader)
    given: Any = loader  # often a batch itself, or a function that makes one
    is_batch = isinstance(given, Mapping | str) or hasattr(given, "dtype")
    if is_batch or (not isinstance(given, Iterable) and not hasattr(given, "__getitem__")):
        fix = "Call it" if callable(given) else "Write [batch] for a single batch"
        raise UserError(f"A loader is an iterable of batches; given {described(given)}. {fix}.")
    return Feed(loader, plan, prefetch)


class Feed(Iterator[Batch]):
    """The iterator that `shard_batches` returns. Close it (or use `with`) if you leave before the end.

        >>> with jdp.shard_batches((batch for _ in range(3)), plan) as feed:
        ...     first = next(feed)
        >>> feed.wait_seconds > 0
        True

    Attributes:
        wait_seconds: seconds waited for batches so far.

    Args:
        loader, plan, prefetch: as for `shard_batches`.

    Raises:
        ValueError: `prefetch` is less than 1.
    """

    def __init__(self, loader: Iterable[Batch], plan: Plan, prefetch: int) -> None:
        if not is_integer(prefetch) or prefetch < 1:
            raise UserError(f"prefetch must be at least 1 batch; given {prefetch!r}: use 2, for example")
        self.wait_seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(prefetch)
        stop = threading.Event()
        self._done = False
        # The thread holds no reference to this object, so an abandoned feed is collected, which stops the thread.
        args = (iter(loader), plan, self._queue, self._slots, stop)
        self._thread = threading.Thread(target=_run, args=args, name="jdp-feed", daemon=True)
        self._stop = weakref.finalize(self, lambda stop, slots: (stop.set(), slots.release()), stop, self._slots)
        self._thread.start()
        _stops[self._thread] = self._stop

    def __iter__(self) -> Feed:
        if self._done:
            raise UserError(
                "A feed is read once; this feed has ended or was closed. Make a new one for each pass: "
                "jdp.shard_batches(loader, plan)."
            )
        return self

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
            raise value.with_traceback(None) if isinstance(value, UserError) else value
        raise StopIteration

    def close(self) -> None:
        """Stop reading, and wait a limited time for the current batch, because a loader may hang."""
        self._done = True
        self._stop()
        self._thread.join(timeout=10)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_END = object()
_NONE = (
    "A loader yields batches; this loader yielded none. It has no data, or is a generator that was read before: make a "
    "new one for each pass."
)
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Wait for the threads at exit: a thread that returns from JAX while Python exits aborts it."""
    for thread, stop in list(_stops.items()):
        stop()
        thread.join(THREAD_SECONDS)


def _run(batches: Iterator[Batch], plan: Plan, out: queue.SimpleQueue[Any], slots: Any, stop: threading.Event) -> None:
    """Run the thread: take a slot, read a batch, repeat; the loop raises its errors."""
    blocks, first = _local_blocks(plan), True
    try:
        while slots.acquire() and not stop.is_set():
            batch = next(batches, _END)
            if batch is _END:
                return out.put(("error", UserError(_NONE)) if first else ("end", None))
            first = False
            arrays = jax.tree.map(np.asarray, jax.tree.map(owned, batch))
            batch_rows(arrays)  # raises where they differ
            out.put(("batch", jax.tree.map(lambda x: _global_array(x, plan, blocks), arrays)))
    except BaseException as error:
        out.put(("error", error))


def _local_blocks(plan: Plan) -> list[int]:
    """Return the numbers of the batch's equal blocks that this process' devices hold."""
    indices = plan.batch_sharding.addressable_devices_indices_map((plan.batch_shards,))
    return sorted({index[0].start or 0 for index in indices.values() if index is not None})


def _global_array(local: np.ndarray[Any, Any], plan: Plan, blocks: list[int]) -> jax.Array:
    fed = "the rows that a process feeds (leave out a loader's last, shorter batch)"
    BatchUnit({"its batch shards": len(blocks)}).check(local.shape[0], fed, microbatches=False)
    rows = local.shape[0] // len(blocks)
    shape = (rows * plan.batch_shards, *local.shape[1:])

    def block_at(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        assert index is not None
        start = blocks.index((index[0].start or 0) // rows) * rows
        return local[start : start + rows]

    return jax.make_array_from_callback(shape, plan.batch_sharding, block_at)
