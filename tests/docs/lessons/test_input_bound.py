"""Readers keep the order, a loop takes at least what it waits for, and hosts wait for the last one's input."""

import numpy as np
import pytest
from load import load

import jdp

lesson = load("input_bound")


@pytest.mark.parametrize("readers", [0, 1, 4])
def test_readers_keep_the_order(readers):
    assert [int(batch[0, 0]) for batch in lesson.loader(readers, 0.001, 9)] == list(range(9))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_lines_and_feed_report_the_waiting(prefetch):
    found = lesson.run(jdp.Plan(jdp.make_mesh(data=8)), 1, prefetch, 0.02, steps=3)
    assert 3 * found["all"] >= 3 * 0.02, "a sleep takes at least as long as it says"
    assert 0 < found["waited"] <= found["next(feed)"] * 1.0001  # the feed's clock is inside ours
    assert sum(found[name] for name in lesson.LINES) <= found["all"]


def test_hosts_wait_for_the_last_one():
    assert [lesson.seconds_a_step(2, 1, readers) for readers in (0, 1, 4)] == [3, 2, 1]
    step, own, others = lesson.waiting(1, 0.08, 0.1, 0.5)
    assert others == 0 and step == pytest.approx(0.1 + own)
    step, own, others = lesson.waiting(64, 0.08, 0.1, 0.5)
    assert others > own and step == pytest.approx(0.1 + own + others)
    np.testing.assert_allclose(lesson.waiting(64, 0.08, 0.1, 0.0), (0.1, 0, 0))
