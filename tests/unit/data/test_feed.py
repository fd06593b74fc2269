"""From this process' numpy batches to global arrays: whose rows, how far ahead, and what ends it."""

import functools
import gc
import os
import signal
import threading
import time
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from absl import flags
from aligned_arrays import aligned
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

PATIENCE = 60.0  # seconds until a thread that should do something is taken to be stuck


def plan_of(**axes):
    return jdp.Plan(jdp.make_mesh(**axes))


def batches(count, rows=16):
    for i in range(count):
        yield {"x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1000 * i, "n": {"row": np.arange(rows)}}


def until(condition):
    """Wait for another thread; False if it never comes."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert until(lambda: not any(thread.name == "jdp-feed" for thread in threading.enumerate()))


@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"replica": 2, "data": 4}, {"replica": 2, "data": 2, "model": 2}, {"model": 4, "data": 2}]
)
def test_rows_are_sharded_as_the_plan_says(axes):
    plan = plan_of(**axes)
    with jdp.shard_batches(batches(3), plan) as feed:
        got = list(feed)
    assert len(got) == 3
    for batch, expected in zip(got, batches(3), strict=True):
        np.testing.assert_array_equal(batch["x"], expected["x"], strict=True)
        np.testing.assert_array_equal(batch["n"]["row"], expected["n"]["row"])
        assert batch["x"].sharding == NamedSharding(plan.mesh, P(plan.batch_axes))
        rows = 16 // (axes.get("replica", 1) * axes["data"])
        for shard in batch["x"].addressable_shards:
            position = dict(zip(plan.mesh.axis_names, np.argwhere(plan.mesh.devices == shard.device)[0], strict=True))
            block = position.get("replica", 0) * axes["data"] + position["data"]
            np.testing.assert_array_equal(shard.data, expected["x"][block * rows : (block + 1) * rows])


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [([0, 1], [0, 1, 2, 3, 4, 5]), ([2, 3], [6, 7, 8, 9, 10, 11]), ([3, 0, 0], [0, 1, 2, 9, 10, 11])],
)
def test_a_process_reads_its_devices_rows(blocks, expected, monkeypatch):
    """Four shards of twelve rows; a process may hold any of them, some on several devices (a model's axis)."""
    indices = {f"device {i}": (slice(block, block + 1),) for i, block in enumerate(blocks)}
    sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: indices if shape == (4,) else None)
    monkeypatch.setattr(jdp.Plan, "batch_sharding", sharding)
    assert jdp.process_rows(plan_of(data=4, model=2), 12) == expected


def test_rows_that_do_not_divide_or_fit_are_refused():
    with pytest.raises(ValueError, match=r"by data=8; given 12: the nearest that fit: 8 or 16"):
        jdp.process_rows(plan_of(), 12)
    with pytest.raises(ValueError, match=r"its batch shards=8; given 12: the nearest that fit: 8 or 16") as error:
        next(jdp.shard_batches(batches(1, rows=12), plan_of()))
    assert "(leave out a loader's last, shorter batch)" in str(error.value)
    assert [entry.name for entry in error.traceback][1:] == ["__next__"], "one frame of jdp below the loop's"
    with pytest.raises(ValueError, match=r"share their leading dimension, the examples; given .*a scalar"):
        next(jdp.shard_batches([{"x": np.float32(1)}], plan_of()))
    with pytest.raises(ValueError, match="JAX holds int64 as int32; given 4294967296"):
        next(jdp.shard_batches([{"x": np.full(8, 2**32)}], plan_of()))


@pytest.mark.parametrize("kind", ["numpy", "memory map"])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 1, "model": 8}])
def test_a_reused_buffer_is_copied(kind, axes, tmp_path):
    shape = (16, 16)  # two rows a device: 128 bytes, so that every device's part is aligned too
    mapped = functools.partial(np.memmap, tmp_path / "buffer", np.float32, "w+", 0)  # begins at a page
    buffer, plan = (aligned if kind == "numpy" else mapped)(shape), plan_of(**axes)
    alias = jax.device_put(np.asarray(buffer), jax.devices()[0])
    buffer[:] = 7
    assert float(alias[0, 0]) == 7, "JAX did alias it, or this test shows nothing"

    def loader():
        for i in range(5):
            buffer[:] = i
            yield {"x": buffer}

    with jdp.shard_batches(loader(), plan, prefetch=2) as feed:
        got = list(feed)
    assert [np.unique(batch["x"]).tolist() for batch in got] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_loader_runs_prefetch_batches_ahead(prefetch, monkeypatch):
    read, asked = [], []

    class Slots(threading.Semaphore):
        def acquire(self, *given, **named):
            asked.append(len(read))
            return super().acquire(*given, **named)

    def loader():
        for i, batch in enumerate(batches(50)):
            read.append(i)
            yield batch

    monkeypatch.setattr(threading, "Semaphore", Slots)
    with jdp.shard_batches(loader(), plan_of(), prefetch=prefetch) as feed:
        for taken in range(4):
            # Before each batch it asks for a slot; when it asks for one more than there are, it has read what it may.
            assert until(lambda taken=taken: len(asked) > taken + prefetch)
            assert len(read) == asked[-1] == taken + prefetch
            next(feed)


def test_only_waiting_is_counted(monkeypatch):
    """By a clock that the loader sets forward while it is waited for, and the loop while it works."""
    now, waiting = [0.0], threading.Event()

    def clock():
        waiting.set()
        return now[0]

    def loader():
        assert waiting.wait(PATIENCE)
        now[0] += 5  # the first batch is slow
        yield from batches(3)

    monkeypatch.setattr("jdp.data.feed.time", SimpleNamespace(perf_counter=clock))
    with jdp.shard_batches(loader(), plan_of()) as feed:
        assert feed.wait_seconds == 0
        next(feed)
        assert feed.wait_seconds == 5
        now[0] += 100  # a step works
        next(feed)
        assert feed.wait_seconds == 5


def test_nothing_to_read_is_an_error_in_words():
    generator = batches(2)
    feed = jdp.shard_batches(generator, plan_of())
    assert len(list(feed)) == 2
    with pytest.raises(ValueError, match=r"A feed is read once; .* jdp\.shard_batches\(loader, plan\)"):
        iter(feed)
    for loader in ([], generator):
        with pytest.raises(ValueError, match=r"yielded none\. It has no data, or is a generator that was read before"):
            next(jdp.shard_batches(loader, plan_of()))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ({"x": np.ones(8)}, r"given a dict\. Write \[batch\]"),
        (np.ones((8, 2)), r"given an array float64\[8, 2\]\. Write \[batch\]"),
        (batches, r"given the function batches\. Call it"),
        (None, "given None"),
    ],
)
def test_a_loader_is_an_iterable_of_batches(loader, words):
    with pytest.raises(ValueError, match=f"A loader is an iterable of batches; {words}"):
        jdp.shard_batches(loader, plan_of())
    with pytest.raises(ValueError, match="prefetch must be at least 1 batch; given '2'"):
        jdp.shard_batches([], plan_of(), prefetch="2")


def test_a_loaders_error_comes_after_its_batches():
    def loader():
        yield from batches(2)
        raise OSError("disk on fire")

    feed = jdp.shard_batches(loader(), plan_of())
    assert [float(next(feed)["x"][0, 0]) for _ in range(2)] == [0, 1000]
    with pytest.raises(OSError, match="disk on fire"):
        next(feed)
    with pytest.raises(StopIteration):
        next(feed)


def test_a_killed_worker_is_an_error():
    """grain finds out in 3 seconds on an idle machine; the loop then raises, and does not wait."""
    flags.FLAGS.mark_as_parsed()  # as grain's workers need it; a program does so at its start
    readers = grain.MapDataset.range(4096).map(lambda _: {"reader": np.float32(os.getpid())}).batch(8)
    loader = readers.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    with jdp.shard_batches(loader, plan_of(data=-1)) as feed:
        worker = int(np.asarray(next(feed)["reader"])[0])
        assert worker != os.getpid()
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(Exception, match=r"(?i)worker|process|died|killed|terminated"):
            for _ in feed:
                assert time.monotonic() - start < 60
        with pytest.raises(StopIteration):
            next(feed)


@pytest.mark.parametrize("taken", [0, 3])
def test_closing_midway_stops_reading_and_ends_the_thread(taken):
    read, closed = [], threading.Event()

    def loader():
        try:
            for i in range(10**9):
                read.append(i)
                yield next(batches(1))
        finally:
            closed.set()

    feed = jdp.shard_batches(loader(), plan_of())
    assert len([next(feed) for _ in range(taken)]) == taken
    feed.close()
    so_far = len(read)
    assert closed.wait(PATIENCE)  # the loader was let go as well
    assert so_far == len(read) <= taken + 3
    assert next(feed, None) is None
    feed.close()  # twice is no mistake


def test_an_abandoned_feed_stops_its_thread():
    feed = jdp.shard_batches(batches(10**9), plan_of())
    next(feed)
    del feed
    gc.collect()  # `no_thread_is_left` sees that it ends
