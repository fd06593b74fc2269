"""The order of gradients, their buckets, when each can be sent, and what each device has before and after."""

import jax
import numpy as np
import pytest
from load import load

import jdp

lesson = load("gradient_sync_visualizer")
DEVICES, ROWS = 8, 32


@pytest.fixture(scope="module")
def made():
    params = lesson.init(jax.random.key(0), lesson.WIDTHS)
    return lesson.readiness(lesson.total_loss, params, lesson.make_batch(0, ROWS))


def test_the_last_layer_comes_first(made):
    ready, _ = made
    assert [one.path for one in ready] == [f"layer{i}/{leaf}" for i in (3, 2, 1, 0) for leaf in ("bias", "kernel")]
    sizes = [4 * a * b for a, b in ((128, 10), (128, 128), (256, 128), (64, 256))]
    assert [one.size for one in ready if "kernel" in one.path] == sizes


def test_the_clock_counts_the_matrix_products(made):
    ready, total = made
    products = [2 * ROWS * a * b for a, b in ((64, 256), (256, 128), (128, 128), (128, 10))]
    assert total == 3 * sum(products) - products[0]  # nobody needs the gradient of the rows
    assert ready[-1].flops == total
    assert ready[1].flops == sum(products) + products[-1]  # the last kernel's: forward pass and one product


def test_buckets_are_closed_at_their_size(made):
    ready, _ = made
    assert len(lesson.buckets(ready, 1)) == len(ready)
    (one,) = lesson.buckets(ready, float("inf"))
    assert (one.size, one.flops) == (sum(each.size for each in ready), ready[-1].flops)
    some = lesson.buckets(ready, 65536)
    assert all(bucket.size >= 65536 for bucket in some[:-1])
    assert sum((bucket.paths for bucket in some), ()) == one.paths


@pytest.mark.parametrize(("strategy", "count"), [("ddp", 3), ("zero1", 3), ("zero2", 6), ("zero3", 6)])
def test_collectives_wait_for_their_bucket_and_predecessor(made, strategy, count):
    ready, total = made
    filled, pace = lesson.buckets(ready, 65536), 64.0
    syncs = lesson.timeline(strategy, filled, total, 2, pace, DEVICES)
    assert len(syncs) == count  # three buckets, in the last microbatch or in both
    factor = (2 if strategy == "ddp" else 1) * 7 / 8
    free = 0.0
    for sync in syncs:
        assert sync.start == max(free, sync.ready)
        assert sync.end - sync.start == pytest.approx(pace * factor * filled[sync.bucket].size)
        free = sync.end


def test_overlap_ends_before_one_bucket_does(made):
    ready, total = made
    ends = [lesson.timeline("ddp", lesson.buckets(ready, size), total, 1, 8, DEVICES)[-1].end for size in (1, 1e9)]
    assert ends[0] < ends[1]
    assert ends[1] == pytest.approx(total + 8 * 1.75 * sum(each.size for each in ready))


def test_what_each_device_has(made):
    paths = [each.path for each in made[0]]
    found = lesson.norms(jdp.make_mesh(data=DEVICES), paths)
    np.testing.assert_allclose(found["ddp"], 1)
    assert np.ptp(found["before"], axis=1).min() > 0  # each device has other rows
    for strategy in ("zero1", "zero2", "zero3"):
        squares = np.square(found[strategy]).sum(axis=1)  # of shards 1, of what stays whole 8
        np.testing.assert_allclose(squares, [8 if "bias" in path else 1 for path in paths], rtol=1e-5)


@pytest.mark.rest
def test_the_page_loads_nothing(tmp_path, capsys):
    page, picture = tmp_path / "sync.html", tmp_path / "sync.svg"
    lesson.main(["--page", str(page), "--picture", str(picture)])
    assert "layer0/kernel" in capsys.readouterr().out
    text = page.read_text("utf-8")
    assert "<svg" in text
    assert "<image" not in text
    assert 'href="http' not in text
    assert picture.is_file()
