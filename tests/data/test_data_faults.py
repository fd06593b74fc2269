"""A data worker that is killed, and a record that cannot be read: an error in the loop, never a wait without end."""

import os
import signal
import time

import grain
import numpy as np
import pytest
from absl import flags

import jdp

pytestmark = pytest.mark.faults


class Numbered:
    """A source of grain's: rows that say who read them, and one that cannot be read."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"record {index} of numbers.bin is damaged")
        return {"x": np.full(2, index, np.float32), "reader": np.float32(os.getpid())}


def loader(workers, bad=None):
    return grain.DataLoader(
        data_source=Numbered(bad),
        sampler=grain.samplers.IndexSampler(4096, grain.sharding.NoSharding(), shuffle=False, num_epochs=1),
        operations=[grain.transforms.Batch(8)],
        worker_count=workers,
    )


@pytest.fixture(scope="module")
def plan():
    flags.FLAGS.mark_as_parsed()  # as grain's workers need it; a program does so at its start
    return jdp.Plan(jdp.make_mesh(data=-1))


def test_a_data_worker_that_is_killed_is_an_error_in_the_loop(plan):
    """grain finds out in 3 seconds on an idle machine; the loop then raises, and does not wait."""
    with jdp.shard_batches(loader(workers=1), plan) as feed:
        worker = int(np.asarray(next(feed)["reader"])[0])
        assert worker != os.getpid()
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(Exception, match=r"(?i)worker|process|died|killed|terminated"):
            for _ in feed:
                assert time.monotonic() - start < 60
        with pytest.raises(StopIteration):
            next(feed)


def test_a_record_that_cannot_be_read_is_named_after_the_batches_before_it(plan):
    with jdp.shard_batches(loader(workers=0, bad=20), plan) as feed:
        assert [float(np.asarray(next(feed)["x"])[0, 0]) for _ in range(2)] == [0.0, 8.0]
        with pytest.raises(OSError, match=r"record 20 of numbers\.bin is damaged"):
            next(feed)
